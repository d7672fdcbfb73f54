"""The index of trajectories says what the file says, whatever state either is in."""

import contextlib
import json
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tether.core.seeding import generator
from tether.runs.index import INDEX, TRAJECTORIES, IndexRow, TrajectoryIndex
from tether.runs.store import RunStore

STOPS = ("success", "failure", "turn_limit", "env_error")


def episodes(step: int, count: int, split: str = "train", seed: int = 0) -> list[dict[str, Any]]:
    draw = generator("index test", step, seed)
    return [
        {
            "step": step,
            "split": split,
            "env": 'a "turns": [ of words',
            "group": number // 2,
            "member": number % 2,
            "seed": 7,
            "reward": None if draw.random() < 0.1 else float(draw.normal()),
            "success": [True, False, None][int(draw.integers(3))],
            "stop_reason": STOPS[int(draw.integers(4))],
            "error": 'a note with \\", "turns": [' if number == 1 else None,
            "kept": bool(draw.random() < 0.5),
            "turns": [{"response": "é" * int(draw.integers(40))}],
        }
        for number in range(count)
    ]


@pytest.fixture
def store(tmp_path: Path) -> RunStore:
    made = RunStore.create(tmp_path / "run", "", {})
    for step in (1, 2, 3):
        made.append_trajectories(episodes(step, 6))
        made.append_trajectories(episodes(step, 3, "validation"))
    made.append_trajectories(episodes(2, 4, seed=1))  # a second attempt
    return made


def by_reading(folder: Path) -> list[dict[str, Any]]:
    """What the last attempts are, found the slow way."""
    found = []
    for line in (folder / TRAJECTORIES).read_bytes().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    last = {(one["step"], one["split"]): one["attempt"] for one in found}  # later lines have higher attempts
    return [one for one in found if one["attempt"] == last[one["step"], one["split"]]]


def opened(folder: Path) -> TrajectoryIndex:
    index = TrajectoryIndex(folder)
    index.refresh()
    return index


def test_the_index_that_was_written_is_the_one_that_scanning_makes(store: RunStore) -> None:
    written = opened(store.folder)
    assert written.scanned_bytes == 0
    rows = written.select()
    (store.folder / INDEX).unlink()
    scanned = opened(store.folder)
    assert scanned.scanned_bytes == (store.folder / TRAJECTORIES).stat().st_size
    assert rows == scanned.select() and rows
    assert not (store.folder / INDEX).exists()  # a reader writes nothing


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({}, lambda one: True),
        ({"step": 2}, lambda one: one["step"] == 2),
        ({"step": 2, "split": "train"}, lambda one: (one["step"], one["split"]) == (2, "train")),
        ({"group": 1}, lambda one: one["group"] == 1),
        ({"success": True}, lambda one: one["success"] is True),
        ({"success": False, "split": "train"}, lambda one: one["success"] is False and one["split"] == "train"),
        ({"stop_reason": "env_error"}, lambda one: one["stop_reason"] == "env_error"),
        ({"kept": False}, lambda one: not one["kept"]),
        ({"reward_at_least": 0.0, "reward_at_most": 1.0}, lambda one: one["reward"] is not None and 0 <= one["reward"] <= 1),
        ({"split": "nowhere"}, lambda one: False),
    ],
)
def test_rows_are_selected_by_what_the_records_say(store: RunStore, wanted: dict[str, Any], fits: Any) -> None:
    index = opened(store.folder)
    expected = [one for one in by_reading(store.folder) if fits(one)]
    assert list(index.read(index.select(**wanted))) == expected
    assert index.torn_lines == []


def test_what_a_run_writes_on_is_picked_up(store: RunStore) -> None:
    index = opened(store.folder)
    for step in (4, 5):
        store.append_trajectories(episodes(step, 5))
        index.refresh()
        assert list(index.read(index.select())) == by_reading(store.folder)
    assert index.attempts()[2, "train"] == 1 and index.attempts()[5, "train"] == 0


def _older(folder: Path) -> None:
    """The file was edited after the index was written: a reward of the same length."""
    data = (folder / TRAJECTORIES).read_bytes()
    assert data.count(b'"kept": true') > 3
    (folder / TRAJECTORIES).write_bytes(data.replace(b'"kept": true', b'"kept": null'))
    os.utime(folder / INDEX, (time.time() - 60, time.time() - 60))


def _cut(folder: Path) -> None:
    path = folder / TRAJECTORIES
    os.truncate(path, path.stat().st_size - 30)


def _another_file(folder: Path) -> None:
    lines = (folder / TRAJECTORIES).read_bytes().splitlines(keepends=True)
    (folder / TRAJECTORIES).write_bytes(b"".join(lines[8:] + lines))


def _index_cut(folder: Path) -> None:
    os.truncate(folder / INDEX, (folder / INDEX).stat().st_size // 2)


def _a_page_of_zeros(folder: Path) -> None:
    """As a power cut leaves pages that never reached the disk."""
    content = bytearray((folder / INDEX).read_bytes())
    content[4096:8192] = bytes(4096)
    (folder / INDEX).write_bytes(content)


def _changed(command: str) -> Callable[[Path], None]:
    """The database says something else than the file."""

    def change(folder: Path) -> None:
        with contextlib.closing(sqlite3.connect(folder / INDEX)) as database, database:
            database.execute(command)

    return change


def _broken_off(folder: Path) -> None:
    """A kill in the middle of a change: some pages are written, and the journal that would take them back lies beside the database."""
    database = sqlite3.connect(folder / INDEX, isolation_level=None)
    database.execute("PRAGMA cache_size = 1")  # so that changed pages go to the disk before the end
    database.execute("BEGIN")
    database.executemany("INSERT INTO rows (offset, length) VALUES (?, 1)", [(10**9 + number,) for number in range(2000)])
    content, journal = (folder / INDEX).read_bytes(), (folder / f"{INDEX}-journal").read_bytes()
    database.execute("ROLLBACK")
    database.close()
    (folder / INDEX).write_bytes(content)
    (folder / f"{INDEX}-journal").write_bytes(journal)


DAMAGE = {
    "the index is older": _older,
    "the file was cut": _cut,
    "another file": _another_file,
    "the index was cut": _index_cut,
    "a page of zeros": _a_page_of_zeros,
    "a row is missing": _changed("DELETE FROM rows WHERE offset > 0 AND step = 1"),
    "another step": _changed("UPDATE rows SET step = 77"),
    "another version": _changed("PRAGMA user_version = 99"),
    "a change was broken off": _broken_off,
    "the index of an earlier version": lambda folder: (folder / INDEX).rename(folder / "trajectories.index"),
    "no index": lambda folder: (folder / INDEX).unlink(),
    "another kind of file": lambda folder: (folder / INDEX).write_bytes(b"something else altogether"),
    "an empty index": lambda folder: (folder / INDEX).write_bytes(b""),
    "no file": lambda folder: (folder / TRAJECTORIES).write_bytes(b""),
    "a torn line in the middle": lambda folder: (folder / TRAJECTORIES).write_bytes(
        (folder / TRAJECTORIES).read_bytes() + b'{"step": 9, "split": "train", "attempt": 0, "group"\n'
    ),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_or_foreign_index_never_changes_what_is_read(store: RunStore, what: str) -> None:
    store.close()
    DAMAGE[what](store.folder)
    index = opened(store.folder)
    assert list(index.read(index.select())) == by_reading(store.folder)
    resumed = RunStore.open(store.folder)
    resumed.append_trajectories(episodes(3, 2, seed=5))
    assert list(resumed.trajectories()) == by_reading(store.folder)
    again = opened(store.folder)
    assert again.scanned_bytes == 0  # whoever writes has put the index in order
    assert list(again.read(again.select())) == by_reading(store.folder)


def test_a_write_that_failed_half_way_is_indexed_by_the_next_one(store: RunStore) -> None:
    with (store.folder / TRAJECTORIES).open("ab") as file:
        file.write(b'{"step": 4, "split": "train", "attempt": 0, "env": "f')
    store.append_trajectories(episodes(4, 2))
    index = opened(store.folder)
    assert index.scanned_bytes == 0 and list(index.read(index.select())) == by_reading(store.folder)
    assert len(index.torn_lines) == 1


def test_a_reader_keeps_a_long_scan_where_nobody_writes(store: RunStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tether.runs.store.INDEX_WORTH_SAVING", 1000)
    store.close()
    (store.folder / INDEX).unlink()
    rows = RunStore.open(store.folder).trajectory_index().select()
    assert opened(store.folder).scanned_bytes == 0
    assert opened(store.folder).select() == rows


def test_rows_are_ordered_paged_and_counted(store: RunStore) -> None:
    index = opened(store.folder)
    every = index.select()
    assert index.count() == len(every) == len(by_reading(store.folder))
    assert index.select(order="newest") == every[::-1]
    assert [*index.select(limit=4), *index.select(start=4)] == every
    rewards = [row.reward for row in index.select(order="reward_high")]
    known = [reward for reward in rewards if reward is not None]
    assert known == sorted(known, reverse=True) and rewards[len(known) :] == [None] * (len(rewards) - len(known)) and None in rewards
    assert index.count(steps=[1, 3], member=0) == sum(row.step in (1, 3) and row.member == 0 for row in every)


def test_a_reader_follows_a_run_without_reading_what_the_run_has_indexed(store: RunStore) -> None:
    """The reader and the run have the database open at the same time; what the reader scanned itself is not counted twice."""
    index = opened(store.folder)
    with (store.folder / TRAJECTORIES).open("ab") as file:  # as a run that could not write its index
        file.write(json.dumps({"step": 9, "split": "train", "attempt": 0, "group": 0, "member": 0, "turns": []}).encode() + b"\n")
    index.refresh()
    assert index.scanned_bytes > 0 and index.count(step=9) == 1
    store.append_trajectories(episodes(10, 4))  # takes the line of step 9 in
    index.refresh()
    assert index.count(step=9) == 1 and index.count(step=10) == 4
    assert list(index.read(index.select())) == by_reading(store.folder)


def test_readers_in_several_threads_while_a_run_writes(store: RunStore) -> None:
    index, counts, done = opened(store.folder), [], threading.Event()

    def read() -> None:
        while not done.is_set():
            index.refresh()
            counts.append(index.count(split="train"))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(4, 34):
        store.append_trajectories(episodes(step, 5))
    done.set()
    for thread in threads:
        thread.join()
    index.refresh()
    assert index.count(split="train") == 6 + 4 + 6 + 30 * 5 and counts
    assert list(index.read(index.select())) == by_reading(store.folder)


def test_a_folder_that_cannot_be_written_is_read(store: RunStore) -> None:
    store.close()
    (store.folder / INDEX).chmod(0o444)
    store.folder.chmod(0o555)
    try:
        index = opened(store.folder)
        assert index.scanned_bytes == 0 and list(index.read(index.select())) == by_reading(store.folder)
    finally:
        store.folder.chmod(0o755)


def test_a_torn_line_has_a_row_without_a_step(store: RunStore) -> None:
    with (store.folder / TRAJECTORIES).open("ab") as file:
        file.write(b"half a li\n")
    index = opened(store.folder)
    assert index.torn_lines == [len(by_reading(store.folder)) + 6 + 1]  # and the six lines of the first attempt
    assert isinstance(index.select()[0], IndexRow)


def test_a_run_that_was_never_resumed_has_only_last_attempts(tmp_path: Path) -> None:
    store = RunStore.create(tmp_path / "run", "", {})
    store.append_trajectories(episodes(1, 5))
    with (store.folder / TRAJECTORIES).open("ab") as file:
        file.write(b"half a li\n")
    store.append_trajectories(episodes(2, 5))
    index = opened(store.folder)
    assert index.count() == 10 and list(index.read(index.select())) == by_reading(store.folder) and len(index.torn_lines) == 1
