"""`tether serve` as a person meets it: the lines it prints, how it is used and stopped, and one line for each mistake."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from tether.cli.main import app
from tether.core.errors import BadInput, TetherError
from tether.runs.store import RunStore
from tether.training.checkpoint import save_checkpoint

COMMAND = "from tether.cli.main import main; main()"


@contextmanager
def _started(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The command in a process of its own, the address it prints, and its second line."""
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "serve", *arguments, "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        assert process.stdout is not None
        try:
            first = process.stdout.readline()
            found = re.search(r"at (http://[^ ]+) \(Ctrl-C stops\)", first)
            assert found, first + process.stderr.read() if process.stderr else first
            yield process, found[1], process.stdout.readline()
        finally:
            process.kill()


def test_serves_the_checkpoint_of_a_run_and_stops_while_it_decodes(tiny: Any, tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "steps: 1\n", {})
    save_checkpoint(store.checkpoints, 1, tiny.model, tiny.tokenizer, {}, keep=1)
    with _started(str(store.folder)) as (process, url, second):
        assert second == f"Use it with any OpenAI client at {url}/v1, or: tether train ENV --model {store.folder} --engine {url}\n"
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "run"
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "Up", "max_tokens": 2}, timeout=60).status_code == 200
        with ThreadPoolExecutor(1) as threads:
            body = {"prompt": "Up", "max_tokens": 1000, "temperature": 0}
            long = threads.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
            while not httpx.get(f"{url}/health").json()["requests"]:
                time.sleep(0.01)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=20)
            assert (process.returncode, out, err) == (0, "Stopped.\n", "")
            assert long.exception() is not None or long.result().status_code == 503


def _refused(*arguments: str) -> str:
    with pytest.raises(TetherError) as refused:
        CliRunner().invoke(app, ["serve", *arguments], catch_exceptions=False, env={"TETHER_TOKEN": ""})
    assert len(str(refused.value).splitlines()) == 1 and refused.value.exit_code == 2
    return str(refused.value)


def test_mistakes_are_one_line_each(tmp_path: Path) -> None:
    assert "can be reached from other machines, so clients need a token" in _refused("tiny", "--host", "0.0.0.0")
    assert "did you mean 'tiny'?" in _refused("tinny")
    assert "is an address" in _refused("http://127.0.0.1:1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "choose another --port" in _refused("tiny", "--port", str(taken.getsockname()[1]))
    RunStore.create(tmp_path / "run", "steps: 1\n", {})
    with pytest.raises(BadInput, match="has no checkpoint yet"):
        CliRunner().invoke(app, ["serve", str(tmp_path / "run")], catch_exceptions=False)
