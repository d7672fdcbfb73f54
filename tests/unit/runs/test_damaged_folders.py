"""Run folders and results that somebody damaged, or made to hang whoever reads them: one row, or one line, in bounded time; never a traceback."""

import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tether.cli.main import main
from tether.core.errors import TetherError
from tether.runs.files import as_written
from tether.runs.lock import lock_holder
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

BOMB = "a: &a [1,2,3,4,5,6,7,8,9]\n" + "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
SETTINGS = [
    b"\xff\xfe\x00bad", b"steps: " + b"9" * 5001, b"[" * 3000, BOMB.encode(), b"- a\n- b\n", b"steps: 1\x00\n", b"a: &a {b: *a}\n", b"x: 2020-99-99\n",
    b"env: [1]\n", b"filter: text\n", b"env: {? [1, 2] : 3}\n", b"also: [{1: a, b: c, 2020-01-01: d}]\n", b"x" * (2**20 + 1), b"model: {name: 'a\n",
]  # fmt: skip
RECORDS = [
    b'{"step": 1, "metrics": {"a": "x"}}\n', b'{"step": 1, "metrics": {"a": 1' + b"0" * 400 + b"}}\n", b'{"step": 1, "metrics": []}\n',
    b'{"step": 1, "metrics": {"validation/success": NaN}}\n', b'{"step": ' + b"9" * 200 + b', "metrics": {}}\n', b'{"step": -1, "metrics": {}}\n',
    b'{"step": 1, "metrics": {}, "alarms": [5]}\n', b'{"step": 1, "metrics": {}, "alarms": [{"name": "a"}]}\n', b'{"step": 1, "metrics": {}, "notes": 5}\n',
]  # fmt: skip
EPISODES = [
    b'{"step": 1, "split": "train", "attempt": 0}\n', b'{"step": 1, "split": "train", "attempt": 0, "turns": 5}\n',
    b'{"step": 1, "split": "train", "attempt": 0, "stop_reason": "\\ud800", "turns": [{"observation": 5}]}\n',
    b'{"step": 1, "split": "train", "attempt": 0, "reward": 1' + b"0" * 400 + b', "group": 0, "member": 0, "turns": [{"response": "a", "reward": "b"}]}\n',
    b'{"step": 1, "split": "train", "attempt": 0, "group": 0, "member": 0, "turns": [{"response": "a", "response_ids": ["x"], "logprobs": 4}]}\n',
]  # fmt: skip
ABOUT = [
    b"\xff",
    b"[" * 50_000,
    b"[]",
    b'{"schema": ' + b"1" * 5001 + b"}",
    b'{"schema": 1, "about": {"tags": 5, "model": {"a": [1]}, "started": 7}}',
    b"",
]
DAMAGE = [
    *(("config.yaml", content) for content in SETTINGS),
    *(("metrics.jsonl", content) for content in RECORDS),
    *(("timings.jsonl", content) for content in (b'{"step": "a"}\n', b'{"step": 1, "seconds": {"a": 1' + b"0" * 400 + b"}}\n")),
    *(("trajectories.jsonl", content) for content in EPISODES),
    *(("run.json", content) for content in ABOUT),
]


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """A read that hangs fails its test."""

    def end(*_: Any) -> None:
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(200)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def make(folder: Path) -> Path:
    store = RunStore.create(folder, "env: {name: frozen_lake}\nsteps: 2\nseed: 0\n", {"env": "frozen_lake", "model": "tiny", "seed": 0})
    for step in range(3):
        store.append(StepRecord(step, {"rollout/success": 0.5, "rollout/episodes": 1.0, "groups/rv_mean": 0.1}))
        turn = {"observation": "a map", "response": "<think>go</think><answer>Up</answer>", "valid": True, "reward": 0.0}
        store.append_trajectories([{"step": step, "split": "train", "group": 0, "member": 0, "reward": 0.0, "turns": [turn]}])
        store.append_timings(step, {"seconds": {"rollout": 1.0}})
    store.close()
    return folder


def told(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code of a verb and what it said on standard error; an exception that leaves `main` fails the test."""
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0), capsys.readouterr().err


def served(folder: Path) -> Any:
    from tether.cli.report import step_templates
    from tether.core.http import serving_app
    from tether.runs.dashboard.app import make_app
    from tether.runs.dashboard.catalogue import Catalogue

    return serving_app(make_app(Catalogue(folder), step_templates), "dashboard")


PAGES = ("/run", "/trajectories", "/groups", "/templates", "/gradients", "/templates/found", "/trajectory", "/compare", "/figure")


def look(address: str, name: str, pages: Sequence[str] = PAGES) -> None:
    """Every page about a run answers, at worst with a line."""
    with httpx.Client(base_url=address, timeout=30) as client:
        for path in pages:
            words = {"run": [name, "good"] if path == "/compare" else name, "key": "1/train/0/0", "step": 1, "name": "success"}
            answer = client.get(path, params=words, headers={"accept": "application/json"})
            assert answer.status_code in (200, 400, 422) and "Traceback" not in answer.text, (path, answer.text)
            assert answer.status_code != 422 or "cannot read" in answer.json()["error"], (path, answer.text)


def check(tmp_path: Path, damage: list[tuple[str, bytes]], capsys: pytest.CaptureFixture[str], *, thinned: bool = False) -> None:
    """Every verb and page on every damaged file; thinned, they take turns: each meets some of the files, and each file some of them."""
    make(tmp_path / "good")
    for number, (name, content) in enumerate(damage):
        run = make(tmp_path / f"b{number}")
        (run / "trajectories.sqlite").unlink()
        (run / name).write_bytes(content)
        verbs = [["report", str(run)], ["show", str(run), "--turns"], ["doctor", str(run)]]
        if name == "config.yaml":
            verbs += [["export", str(run), "--out", str(tmp_path / "e")], ["eval", str(run)], ["train", "--resume", str(run)]]
        for words in verbs[number % 3 :: 3] if thinned else verbs:
            code, said = told(capsys, *words)
            assert code == 0 or words[0] == "doctor" or (said.startswith("tether: ") and said.count("\n") <= 2), (words, content[:80], said)
    with served(tmp_path) as address:
        page = httpx.get(f"{address}/", headers={"accept": "text/html"}, timeout=60)
        assert page.status_code == 200 and all(
            f">{name}<" in page.text for name in ("good", *(f"b{number}" for number in range(len(damage))))
        )
        for number in range(len(damage)):
            look(address, f"b{number}", PAGES[number % 3 :: 3] if thinned else PAGES)


def test_a_damaged_file_is_one_line_and_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(tmp_path, [*DAMAGE[:3], *DAMAGE[len(SETTINGS) :: 4]], capsys, thinned=True)


@pytest.mark.long
def test_all_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    signal.alarm(600)
    check(tmp_path, DAMAGE, capsys)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


PLACES: dict[str, Callable[[Path], None]] = {
    "fifo": _fifo,
    "socket": _socket,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": lambda path: path.mkdir(),
    "link to itself": lambda path: path.symlink_to(path),
}
FILES = [
    "config.yaml", "run.json", "metrics.jsonl", "timings.jsonl", "trajectories.jsonl", "trajectories.sqlite", "trajectories.sqlite-journal",
    "trajectories.sqlite-wal", "run.lock", "checkpoints/step_000001/manifest.json", "checkpoints/best/best.json", "checkpoints/best/model/tokenizer.json",
]  # fmt: skip


@pytest.mark.parametrize("kind", [kind if kind == "fifo" else pytest.param(kind, marks=pytest.mark.long) for kind in PLACES])
def test_only_plain_files_are_opened(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket has to be short
    make(tmp_path / "good")
    for number, name in enumerate(FILES):
        path = Path(f"b{number}") / name
        make(path.parents[-2])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        PLACES[kind](path)
        for words in (("doctor", f"b{number}"), ("report", f"b{number}"), ("show", f"b{number}", "--turns")):
            code, said = told(capsys, *words)
            assert code in (0, 1, 2) and "Traceback" not in said
        assert lock_holder(Path(f"b{number}")) is None
        try:
            store = RunStore.open(Path(f"b{number}"))
            store.append(StepRecord(3, {}))
            store.append_trajectories([{"step": 3, "split": "train", "turns": []}])
            store.close()
        except TetherError:
            continue
    with served(tmp_path) as address:
        for number in range(len(FILES)):
            look(address, f"b{number}", PAGES[number % 3 :: 3] if kind == "fifo" else PAGES)  # all of them in the long tests
        assert httpx.get(f"{address}/health", timeout=5).json()["status"] == "ok"
        page = httpx.get(f"{address}/", timeout=30)
        assert page.status_code == 200 and ">good<" in page.text and ">b0<" in page.text


def test_a_database_of_somebody_runs_no_query_of_theirs(tmp_path: Path) -> None:
    """A view in the place of a table could compute for ever."""
    import sqlite3

    run = make(tmp_path / "run")
    index = sqlite3.connect(run / "trajectories.sqlite")
    index.executescript(
        "DROP TABLE rows; CREATE VIEW rows AS WITH RECURSIVE n(x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM n) "
        "SELECT x AS offset, 1 AS length, 1 AS step, 'train' AS split, 0 AS attempt, 0 AS grp, 0 AS member, 0 AS reward, '' AS stop_reason, 0 AS success, 0 AS kept FROM n;"
    )
    index.close()
    assert sum(1 for _ in RunStore.open(run).trajectories()) == 3


@pytest.mark.parametrize(
    "content", [b"", b'{"version": "1.0"', b"\xff\xfe", b"{}", b"[" * 100_000], ids=["empty", "cut", "bytes", "other", "deep"]
)
def test_a_damaged_tokenizer_leaves_tokens_uncoloured(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run")
    (run / "checkpoints/best/model").mkdir(parents=True)
    (run / "checkpoints/best/model/tokenizer.json").write_bytes(content)
    with pytest.raises(SystemExit) as end:
        main(["show", str(run), "--turns"])
    assert not end.value.code
    assert "Tokens are not coloured: the tokenizer of checkpoint best is damaged" in " ".join(capsys.readouterr().out.split())
    with served(tmp_path) as address:
        page = httpx.get(f"{address}/trajectory", params={"run": "run", "key": "1/train/0/0"}, headers={"accept": "text/html"}, timeout=30)
        assert page.status_code == 200 and "the tokenizer of checkpoint best is damaged" in page.text


def test_doctor_names_episodes_that_are_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make(tmp_path / "run")
    for name in ("trajectories.jsonl", "trajectories.sqlite"):
        (run / name).write_bytes(b"")
    with pytest.raises(SystemExit) as end:
        main(["doctor", str(run)])
    assert end.value.code == 1 and "trajectories.jsonl has lost its episodes" in capsys.readouterr().out


RESULTS = [
    b"\xff",
    b"[" * 100_000,
    b'{"kind": "tether evaluation", "schema": 1}',
    b'{"kind": "tether evaluation", "schema": ' + b"1" * 5001 + b"}",
]


@pytest.mark.parametrize("content", RESULTS)
def test_a_damaged_result_is_one_line(tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_bytes(content)
    code, said = told(capsys, "leaderboard", str(tmp_path))
    assert code == 2 and said.startswith("tether: ") and "a.json" in said and said.count("\n") == 1


@pytest.mark.parametrize("kind", PLACES)
def test_a_result_that_is_no_file_is_one_line(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    PLACES[kind](Path("a.json"))
    code, said = told(capsys, "leaderboard", ".")
    assert code in (1, 2) and said.startswith("tether: ") and said.count("\n") == 1


def test_what_is_not_as_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(TetherError, match=r"is not what Tether writes \(KeyError: 'x'\); restore it or take it away"), as_written(tmp_path):
        {}["x"]


def test_a_database_with_damaged_pages_is_not_asked(tmp_path: Path) -> None:
    """Also one that is damaged while a reader has it open."""
    run = make(tmp_path / "run")
    path = run / "trajectories.sqlite"
    before, data = path.stat(), bytearray(path.read_bytes())
    size = len(data)
    index = RunStore.open(run).trajectory_index()
    assert index.is_complete and index.count() == 3
    for start in range(4096, size, 64):
        data[start : start + 48] = os.urandom(48)
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert index.count(step=1) == 1 and [row.step for row in index.select()] == [0, 1, 2]
    assert sum(1 for _ in RunStore.open(run).trajectories()) == 3
