"""`tether serve-search` as a process of its own: it serves what the index holds, refuses what it must, and stops when told."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tether.cli.main import main
from tether.core.http_client import close_connections
from tether.envs.registry import make_env
from tether.envs.searchqa.client import RemoteRetriever
from tether.envs.searchqa.dataset import world_corpus
from tether.envs.searchqa.index import open_index

TETHER = [sys.executable, "-c", "from tether.cli.main import main; main()", "serve-search"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TETHER_TOKEN", raising=False)


@contextmanager
def served(*arguments: str, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    process = subprocess.Popen(
        [*TETHER, "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://\S+", line)
        assert address, f"it said {line!r} and {process.stderr.read() if process.stderr and process.poll() is not None else ''!r}"
        yield address[0], process
    finally:
        close_connections()
        if process.poll() is None:
            process.kill()
        process.communicate(timeout=20)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    rows = [{"id": str(number), "contents": f'"Page {number}"\nBridges, and the number {number}.'} for number in range(30)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What is said about arguments that cannot be used."""

    def call(*arguments: str) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(["serve-search", *arguments])
        out, err = capsys.readouterr()
        assert (stopped.value.code, out) == (2, "")
        assert err.startswith("tether: ") and len(err.splitlines()) == 1
        return err

    return call


def test_the_encyclopedia_in_both_shapes() -> None:
    with served() as (url, process):
        index = open_index(world_corpus())
        assert httpx.get(f"{url}/health").json()["corpus_size"] == len(index) > 3000
        for query in ("River Takoma", "Who founded the guild that built the ship Leaden Fox?", "the"):
            assert RemoteRetriever(url, "queries").search(query, 5) == index.search(query, 5)
            assert RemoteRetriever(url, "query").search(query, 5) == index.search(query, 5)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "Stopped.\n", "")


def test_a_corpus_of_ones_own_played_here_and_there(corpus: Path, tmp_path: Path) -> None:
    corpus.write_text(corpus.read_text() + '\n{"id": "no document"}\n')
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "Which page has 17?", "golden_answers": ["Page 17"]}))
    with served("--corpus", str(corpus), "--bad-rows", "skip") as (url, process):
        here = make_env("searchqa", data=str(questions), corpus=str(corpus), bad_rows="skip", split="all")
        for api in ("queries", "query"):
            there = make_env("searchqa", data=str(questions), retriever=url, retriever_api=api, split="all")
            assert here.reset(0) == there.reset(0)
            step = here.step("search[number 17]")
            assert step.info["titles"][0] == "Page 17" and len(step.info["titles"]) == 5
            assert step == there.step("search[number 17]")
            for answer in ("search[the]", "finish[Page 17]"):
                assert here.step(answer) == there.step(answer)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=20)
        assert "skipped 1 of 31 rows of" in err and len(err.splitlines()) == 1


def test_a_token(corpus: Path) -> None:
    with served("--corpus", str(corpus), "--host", "0.0.0.0", TETHER_TOKEN="hush") as (url, _):
        address = f"http://127.0.0.1:{url.rpartition(':')[2]}"
        assert httpx.post(f"{address}/retrieve", json={"query": "bridges"}).status_code == 401
        assert len(RemoteRetriever(address, token="hush").search("bridges", 3)) == 3


def test_beyond_this_machine_only_with_a_token(refused: Callable[..., str]) -> None:
    assert "host '0.0.0.0' can be reached from other machines, so clients need a token" in refused("--host", "0.0.0.0")


def test_a_port_in_use(refused: Callable[..., str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert f"cannot serve on port {port} of '127.0.0.1'" in refused("--port", port)


def test_bad_arguments(tmp_path: Path, refused: Callable[..., str]) -> None:
    assert "corpus='nowhere.jsonl' does not exist" in refused("--corpus", "nowhere.jsonl", "--port", "0")
    assert "--bad-rows got 'ignore'; use error or skip" in refused("--bad-rows", "ignore")
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "good"}\n{"id": 1}\n')
    assert f"{bad}:2: has neither contents nor text" in refused("--corpus", str(bad), "--port", "0")
