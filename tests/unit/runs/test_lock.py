"""One process at a time writes a run folder; a lock that was left behind holds nobody up, and readers need none."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tether.core.errors import BadInput, StorageError
from tether.runs import lock as locking
from tether.runs.lock import LOCK, RunLock, RunLocked, lock_holder, own_record, process_start
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore

HOLD = """
import sys, time
from pathlib import Path
from tether.runs.lock import RunLock
lock = RunLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    store = RunStore.create(tmp_path / "run", "", {})
    store.close()
    return store.folder


def _leave(folder: Path, **changes: object) -> Path:
    """A record as a kill leaves it: nobody holds the flock."""
    (folder / LOCK).write_text(json.dumps({**own_record(), **changes}))
    return folder / LOCK


def test_another_process_is_refused_while_the_run_is_written_and_let_in_after_a_kill(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunLocked, match=rf"is being written by process {other.pid} on .*; wait for it or stop it") as refused:
            RunStore.open(folder).append(StepRecord(1, {}))
        assert isinstance(refused.value, BadInput) and refused.value.exit_code == 2
        assert not (folder / "metrics.jsonl").exists()
        assert RunStore.open(folder).steps() == []  # reading goes on
        assert lock_holder(folder) is not None and str(other.pid) in str(lock_holder(folder))
        other.kill()
    assert (folder / LOCK).exists() and lock_holder(folder) is None
    store = RunStore.open(folder)
    store.append(StepRecord(1, {}))
    assert json.loads((folder / LOCK).read_text())["pid"] == os.getpid()
    store.close()
    assert not (folder / LOCK).exists()


def test_reading_makes_no_lock(folder: Path) -> None:
    store = RunStore.open(folder)
    assert (store.steps(), list(store.trajectories()), store.finished) == ([], [], None)
    assert not (folder / LOCK).exists()


def test_one_process_shares_its_lock_and_the_last_user_gives_it_back(folder: Path) -> None:
    first, second = RunStore.open(folder), RunStore.open(folder)
    first.lock()
    second.lock()
    first.close()
    first.close()
    assert (folder / LOCK).exists()
    second.close()
    assert not (folder / LOCK).exists()
    first.append(StepRecord(1, {}))  # a write after `close` locks again
    assert (folder / LOCK).exists()
    del first
    assert not (folder / LOCK).exists()  # nobody writes any more


@pytest.mark.parametrize("started", ["another boot/17", None])
def test_without_flock_the_record_decides(folder: Path, monkeypatch: pytest.MonkeyPatch, started: str | None) -> None:
    """A file system without locks: the number of a process that lives counts, unless the process is a younger one."""
    monkeypatch.setattr(locking, "_flock", lambda handle, path: False)
    assert process_start(1) is not None
    _leave(folder, pid=1, process_started=started)
    if started is None:  # not known: the number alone decides, on the safe side
        with pytest.raises(RunLocked, match="process 1 on"):
            RunLock.acquire(folder)
    else:
        RunLock.acquire(folder).release()
    _leave(folder, pid=1, process_started=process_start(1))
    with pytest.raises(RunLocked, match="process 1 on"):
        RunLock.acquire(folder)
    _leave(folder, pid=2**22 + 1)
    RunLock.acquire(folder).release()


def test_the_record_of_another_host_counts_while_its_time_moves(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _leave(folder, host="elsewhere", pid=7)
    real, naps = time.sleep, []

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            os.utime(path)
        real(0.01)

    monkeypatch.setattr(time, "sleep", nap)
    with pytest.raises(RunLocked, match="process 7 on elsewhere"):
        RunLock.acquire(folder, patience=60.0)
    assert len(naps) == 2
    with pytest.raises(RunLocked, match="process 7 on elsewhere"):
        RunLock.acquire(folder, patience=0.0)  # nobody waits, and it was alive a moment ago
    assert "elsewhere" in str(lock_holder(folder))
    os.utime(path, (time.time() - 100, time.time() - 100))
    assert lock_holder(folder) is None
    RunLock.acquire(folder, patience=0.0).release()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b"[" * 4000], ids=["empty", "cut", "list", "bytes", "deep"])
def test_a_record_that_is_no_record_holds_nobody_up(folder: Path, content: bytes) -> None:
    (folder / LOCK).write_bytes(content)
    RunLock.acquire(folder, patience=0.0).release()
    assert not (folder / LOCK).exists()


def test_a_link_in_the_place_of_the_lock_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    (folder / LOCK).symlink_to(tmp_path / "precious")
    with pytest.raises(BadInput, match="is a symbolic link"):
        RunStore.open(folder).append(StepRecord(1, {}))
    assert (tmp_path / "precious").read_text() == "mine"


def test_the_owner_moves_the_time_of_its_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locking, "BEAT_SECONDS", 0.02)
    held = RunLock.acquire(folder)
    before = (folder / LOCK).stat().st_mtime_ns
    end = time.monotonic() + 5
    while (folder / LOCK).stat().st_mtime_ns == before and time.monotonic() < end:
        time.sleep(0.01)
    assert (folder / LOCK).stat().st_mtime_ns > before
    held.release()


@pytest.mark.parametrize("change", ["deleted", "replaced", "a file in its place"])
def test_a_folder_that_is_no_longer_the_one_that_was_locked_is_not_written(change: str, tmp_path: Path) -> None:
    """A run whose folder was moved away must not write into whatever lies in its place."""
    store = RunStore.create(tmp_path / "run", "steps: 3\n", {})
    store.append(StepRecord(1, {"rollout/success": 0.5}))
    (tmp_path / "run").rename(tmp_path / "moved")
    if change == "replaced":
        (tmp_path / "run").mkdir()
    elif change == "a file in its place":
        (tmp_path / "run").write_text("mine")
    words = "is gone: it was deleted or moved" if change == "deleted" else "is another folder now"
    for write in (lambda: store.append(StepRecord(2, {"rollout/success": 0.5})), lambda: store.append_trajectories([])):
        with pytest.raises(StorageError, match=words):
            write()
    store.close()
    if change == "replaced":
        assert not list((tmp_path / "run").iterdir())
    assert len((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_lock_with_a_time_of_the_future_is_not_held_for_ever(tmp_path: Path) -> None:
    """A clock that was set back: the record of another host, which is gone, lies hours ahead."""
    (tmp_path / LOCK).write_text(json.dumps({"host": "elsewhere", "pid": 1, "since": "now"}) + "\n")
    assert lock_holder(tmp_path) is not None
    os.utime(tmp_path / LOCK, (time.time() + 7200,) * 2)
    assert lock_holder(tmp_path) is None
