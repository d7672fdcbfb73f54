"""Where each episode lies in trajectories.jsonl, with what one filters by: a dashboard answers from it without reading the file.

    index = TrajectoryIndex(Path("runs/my-run"))
    index.refresh()                                     # picks up what a run has written since; a few milliseconds
    rows = index.select(step=40, success=False)         # a numpy array with the columns of ROW, in the order of the file
    episodes = list(index.read(rows[:20]))              # the records themselves: only their bytes are read

`trajectories.index` is 16 bytes that say what it is, then one row of fixed size for every line of trajectories.jsonl, in order; a line that a
kill tore has a row, too. So row n+1 begins where row n ends, and a break in that, a row that was half written or an index that is shorter than
the file shows by itself: rows up to there count, and the rest of the file is scanned. An index that is older than the file, or does not fit
its lines, is made anew. The run writes its rows as it goes (`IndexWriter`); a reader writes nothing unless it calls `save`.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tether.runs.files import DRAFT, append_whole, storage_error

TRAJECTORIES, INDEX = "trajectories.jsonl", "trajectories.index"

ROW = np.dtype(
    [
        ("offset", "<i8"),
        ("length", "<i8"),
        ("step", "<i8"),
        ("attempt", "<i4"),
        ("group", "<i8"),
        ("member", "<i4"),
        ("reward", "<f8"),
        ("split", "S16"),
        ("stop_reason", "S16"),
        ("flags", "u1"),
    ]
)
"""A line of the file: its bytes, its block (step, split, attempt), group and member (-1 where unknown), reward (nan where it was not finite),
why the episode ended, and flags."""
TORN, SUCCESS, FAILURE, KEPT = 1, 2, 4, 8
"""Flags: the line is incomplete; solved; not solved (neither where that is not known); its group was in the update."""

Rows = NDArray[np.void]

_HEADER = b"tether rows 1\n\0\0"
_NAME_BYTES = 16
_TOLERANCE_NS = 2_000_000_000
"""A file that is newer than its index by less was written in the same moment: file systems round their times."""
_PROBES = 16
"""Rows that are compared with the file when an index is opened."""

# Trajectory lines are long (they hold every token id), so what a line is about is read from its first bytes.
_BLOCK = re.compile(rb'\{"step": (\d{1,18}), "split": "([^"\\]*)", "attempt": (\d{1,9})[,}]')
_TURNS = b', "turns": ['


class TrajectoryIndex:
    """The index of one run folder, held in memory and brought up to date by `refresh`."""

    def __init__(self, folder: Path) -> None:
        self._data, self._path = folder / TRAJECTORIES, folder / INDEX
        self._rows: Rows = np.zeros(0, ROW)
        self._last: NDArray[np.bool_] = np.zeros(0, bool)
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of the file at the last refresh."""
        self._on_disk = -1
        """How many rows the index file holds that are these rows; -1 where it must be written anew."""
        self.scanned_bytes = 0
        """How much of the file had to be read for rows that the index lacked."""
        self.unfinished_line: int | None = None
        """The number of the last line, if it has no end yet: it is being written, or a kill tore it."""

    # ------------------------------------------------------------------------------------------------------------- reading

    def refresh(self) -> None:
        """Take in what was written since the last time, from the index where it has it, else from the file."""
        try:
            stat = self._data.stat()
        except FileNotFoundError:
            self._forget()
            self._seen = None
            return
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error
        seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if seen == self._seen:
            return
        grown = self._seen is not None and stat.st_ino == self._seen[0] and stat.st_size >= self.covered and self._fits(self._rows[-1:])
        if not grown:
            self._load(stat)
        self._scan(stat.st_size)
        self._seen = seen

    @property
    def covered(self) -> int:
        """Bytes of the file that have rows."""
        return int(self._rows["offset"][-1] + self._rows["length"][-1]) if len(self._rows) else 0

    @property
    def torn_lines(self) -> list[int]:
        """The numbers of incomplete lines, from 1."""
        torn = (np.flatnonzero(self._rows["flags"] & TORN) + 1).tolist()
        return [*torn, self.unfinished_line] if self.unfinished_line is not None else torn

    def line_number(self, row: np.void) -> int:
        """The number of a row's line, from 1."""
        return int(np.searchsorted(self._rows["offset"], row["offset"])) + 1

    def attempts(self) -> dict[tuple[int, str], int]:
        """The highest attempt of every (step, split): the one that readers take."""
        rows = self._rows[self._last]
        starts = rows[_block_starts(rows)]
        return {(int(row["step"]), row["split"].decode()): int(row["attempt"]) for row in starts}

    def select(
        self,
        *,
        step: int | None = None,
        split: str | None = None,
        group: int | None = None,
        success: bool | None = None,
        stop_reason: str | None = None,
        kept: bool | None = None,
        reward_at_least: float | None = None,
        reward_at_most: float | None = None,
    ) -> Rows:
        """The rows of each step's last attempt that fit, in the order of the file; None takes all."""
        rows, fits = self._rows, self._last.copy()
        for name, wanted in (("step", step), ("group", group)):
            if wanted is not None:
                fits &= rows[name] == wanted
        for name, text in (("split", split), ("stop_reason", stop_reason)):
            if text is not None:
                fits &= rows[name] == text.encode()
        if success is not None:
            fits &= (rows["flags"] & (SUCCESS if success else FAILURE)) > 0
        if kept is not None:
            fits &= ((rows["flags"] & KEPT) > 0) == kept
        if reward_at_least is not None:
            fits &= rows["reward"] >= reward_at_least
        if reward_at_most is not None:
            fits &= rows["reward"] <= reward_at_most
        return rows[fits]

    def read(self, rows: Rows) -> Iterator[dict[str, Any] | None]:
        """The records of some rows, one at a time; None for a line that turns out to be torn."""
        if not len(rows):
            return
        try:
            with self._data.open("rb") as file:
                for row in rows:
                    file.seek(int(row["offset"]))
                    yield parsed_line(file.read(int(row["length"])))
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error

    def save(self) -> None:
        """Write the rows that the index file lacks; for whoever holds the lock of the run."""
        if self._on_disk < 0:
            draft = self._path.with_name(f".{self._path.name}.{os.getpid()}{DRAFT}")
            try:
                draft.unlink(missing_ok=True)
                append_whole(draft, _HEADER + self._rows.tobytes(), own_line=False)
                draft.replace(self._path)
            except OSError as error:
                raise storage_error(self._path, error) from error
        elif self._on_disk < len(self._rows):
            append_whole(self._path, self._rows[self._on_disk :].tobytes(), own_line=False)
        self._on_disk = len(self._rows)

    # -------------------------------------------------------------------------------------------------------------- inside

    def _forget(self) -> None:
        self._rows, self._last, self._on_disk, self.unfinished_line = np.zeros(0, ROW), np.zeros(0, bool), -1, None

    def _load(self, data: os.stat_result) -> None:
        """The rows of the index file, as far as they can be those of the file."""
        self._forget()
        try:
            content, written = self._path.read_bytes(), self._path.stat().st_mtime_ns
        except OSError:  # not there, or not to be read: the file itself is scanned
            return
        if not content.startswith(_HEADER):
            return
        num_rows, rest = divmod(len(content) - len(_HEADER), ROW.itemsize)
        rows = np.frombuffer(content, ROW, num_rows, len(_HEADER))
        ends = rows["offset"] + rows["length"]
        follows = (rows["offset"] == np.concatenate(([0], ends[:-1]))) & (rows["length"] > 0) & (ends <= data.st_size)
        rows = rows[: int(np.argmin(follows)) if not follows.all() else num_rows]
        is_older = data.st_mtime_ns > written + _TOLERANCE_NS
        if not len(rows) or (is_older and int(ends[len(rows) - 1]) == data.st_size):
            return
        if not self._fits(rows[np.unique(np.linspace(0, len(rows) - 1, _PROBES).astype(int))]):
            return
        self._extend(rows)
        self._on_disk = len(rows) if len(rows) == num_rows and not rest else -1

    def _fits(self, rows: Rows) -> bool:
        """Whether the file has these lines where the rows say."""
        try:
            with self._data.open("rb") as file:
                for row in rows:
                    file.seek(int(row["offset"]))
                    head = file.read(min(int(row["length"]), 128))
                    file.seek(int(row["offset"] + row["length"]) - 1)
                    found = _BLOCK.match(head)
                    same = found is not None and (int(found[1]), found[2], int(found[3])) == (row["step"], row["split"], row["attempt"])
                    if file.read(1) != b"\n" or not (same or row["flags"] & TORN):
                        return False
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error
        return True

    def _scan(self, until: int) -> None:
        """Make rows of the lines that have none, up to a place in the file."""
        start = self.covered
        found: list[Rows] = []
        self.unfinished_line = None
        try:
            with self._data.open("rb") as file:
                file.seek(start)
                while start < until and (line := file.readline(until - start)):
                    if not line.endswith(b"\n"):
                        self.unfinished_line = len(self._rows) + len(found) + 1
                        break
                    row = np.zeros(1, ROW)
                    _fill(row[0], start, len(line), _head_of(line))
                    found.append(row)
                    start += len(line)
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error
        self.scanned_bytes += start - self.covered
        if found:
            self._extend(np.concatenate(found))

    def _extend(self, rows: Rows) -> None:
        self._rows = np.concatenate((self._rows, rows)) if len(self._rows) else rows
        self._last = _last_attempts(self._rows)


class IndexWriter:
    """Keeps the index of a run up to date while the run writes; holds no rows, so a long run costs it no memory."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._covered = folder, 0
        self.attempts: dict[tuple[int, str], int] = {}
        """The highest attempt of every (step, split) so far."""
        self._catch_up()

    def add(self, start: int, lines: Sequence[bytes], records: Sequence[Mapping[str, Any]]) -> None:
        """The run has appended these lines, which begin at `start`: write their rows."""
        if start != self._covered:  # a write that failed half-way, or a kill, left something before them
            self._catch_up()
            return
        rows = np.zeros(len(lines), ROW)
        for row, line, record in zip(rows, lines, records, strict=True):
            _fill(row, start, len(line), record)
            start += len(line)
        append_whole(self._folder / INDEX, rows.tobytes(), own_line=False)
        self._covered = start

    def _catch_up(self) -> None:
        """Bring the index file up to the end of the file, whatever state it is in."""
        index = TrajectoryIndex(self._folder)
        index.refresh()
        index.save()
        self._covered = index.covered
        self.attempts = {**self.attempts, **index.attempts()}


def _head_of(line: bytes) -> dict[str, Any]:
    """What a line says before its turns, which are nearly all of it; empty if it is torn."""
    if _BLOCK.match(line) is None or not line.rstrip().endswith(b"}"):
        return {}
    turns = line.find(_TURNS)
    return parsed_line(line[:turns] + b"}" if turns > 0 else line) or {}


def parsed_line(line: bytes) -> dict[str, Any] | None:
    """The object on a line; None if the line is torn."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested without end
        return None
    return data if isinstance(data, dict) else None


def _fill(row: np.void, start: int, length: int, record: Mapping[str, Any]) -> None:
    """Put a line's place and what its record says into a row; a record that lacks its block is a torn line."""
    row["offset"], row["length"] = start, length
    split = str(record.get("split", "")).encode()
    if not isinstance(record.get("step"), int) or not isinstance(record.get("attempt"), int) or not 0 < len(split) <= _NAME_BYTES:
        row["flags"] = TORN
        return
    reward, success = record.get("reward"), record.get("success")
    row["step"], row["split"], row["attempt"] = record["step"], split, record["attempt"]
    row["group"], row["member"] = (_whole(record.get(name), bits) for name, bits in (("group", 63), ("member", 31)))
    row["reward"] = float(reward) if isinstance(reward, int | float) and math.isfinite(reward) else math.nan
    row["stop_reason"] = str(record.get("stop_reason") or "").encode()[:_NAME_BYTES]
    row["flags"] = (0 if success is None else SUCCESS if success else FAILURE) | (KEPT if record.get("kept") else 0)


def _whole(value: Any, bits: int) -> int:
    return value if isinstance(value, int) and 0 <= value < 2**bits else -1


def _block_starts(rows: Rows) -> NDArray[np.intp]:
    """The first row of each stretch of rows of one block."""
    if not len(rows):
        return np.zeros(0, np.intp)
    changes = np.zeros(len(rows) - 1, bool)
    for name in ("step", "split", "attempt"):
        changes |= rows[name][1:] != rows[name][:-1]
    return np.concatenate(([0], np.flatnonzero(changes) + 1))


def _last_attempts(rows: Rows) -> NDArray[np.bool_]:
    """Which rows belong to the last attempt of their (step, split); torn lines belong to none."""
    whole = (rows["flags"] & TORN) == 0
    held = rows if whole.all() else rows[whole]  # a copy only where it must be: this is most of what opening an index costs
    starts = _block_starts(held)
    blocks = [(int(row["step"]), bytes(row["split"]), int(row["attempt"])) for row in held[starts]]
    highest: dict[tuple[int, bytes], int] = {}
    for step, split, attempt in blocks:
        highest[step, split] = max(attempt, highest.get((step, split), 0))
    lasts = np.array([attempt == highest[step, split] for step, split, attempt in blocks], bool)
    mask = np.zeros(len(rows), bool)
    mask[whole] = np.repeat(lasts, np.diff(np.append(starts, len(held)))) if len(held) else False
    return mask
