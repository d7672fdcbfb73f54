"""What must outlive a power cut is forced to the disk: records and trajectories on demand, a replaced file before it takes its place."""

import errno
import os
from pathlib import Path

import pytest

from tether.core.errors import StorageError
from tether.runs.files import write_whole
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore


def test_records_and_trajectories_are_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore.create(tmp_path / "run", "steps: 1\n", {})
    forced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: forced.append(os.fstat(handle).st_ino))
    store.sync()
    assert forced == []  # nothing is written yet
    store.append(StepRecord(1, {}))
    store.append_trajectories([{"step": 1, "split": "train"}])
    store.append_timings(1, {})
    store.sync()
    assert forced == [(store.folder / name).stat().st_ino for name in ("metrics.jsonl", "trajectories.jsonl")]


def test_a_disk_that_cannot_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore.create(tmp_path / "run", "steps: 1\n", {})
    store.append(StepRecord(1, {}))

    def fail(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(StorageError, match=r"cannot write '.*metrics.jsonl': no space left on device; nothing already written is lost"):
        store.sync()


def test_a_replaced_file_is_forced_before_it_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    seen: list[tuple[str, str]] = []

    monkeypatch.setattr(os, "fsync", lambda handle: seen.append((path.read_text(), next(tmp_path.glob(".run.json.*.part")).read_text())))
    write_whole(path, "new")
    assert seen == [("old", "new")] and path.read_text() == "new"
