"""Where each episode lies in trajectories.jsonl, with what one filters by: an SQLite database beside it, so that nobody reads the whole file.

    index = TrajectoryIndex(Path("runs/my-run"))
    index.refresh()                                     # takes in what a run has written since; a few milliseconds
    rows = index.select(step=40, success=False)         # in the order of the file
    episodes = list(index.read(rows[:20]))              # the records themselves: only their bytes are read

`trajectories.sqlite` has a row for every line of trajectories.jsonl; a line that a kill tore has a row, too. The file is the record and the
database a copy of what it says: the run adds rows as it writes (`IndexWriter`), a reader opens the database read-only and keeps rows of lines
that the database lacks in a temporary table. A database that is missing, damaged, older than the file or of another file is not used, and made
anew by whoever writes next. So nothing is forced to the disk, and a reader works on a folder that it cannot write.
"""

import errno
import os
import re
import sqlite3
import stat
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from tether.core.files import open_to_read
from tether.core.text import visible
from tether.runs.files import DRAFT, parsed_line, storage_error

TRAJECTORIES, INDEX = "trajectories.jsonl", "trajectories.sqlite"
ORDERS = {
    "oldest": "offset",
    "newest": "offset DESC",
    "reward_high": "reward IS NULL, reward DESC, offset",
    "reward_low": "reward IS NULL, reward, offset",
}
"""How rows may be ordered; episodes without a reward come last."""

_VERSION = 2
"""Of the database's form; one of another version is made anew. Version 1 was a file of another kind, trajectories.index."""
_BUSY_SECONDS = 10.0
_TOLERANCE_NS = 2_000_000_000
"""A file that is newer than its index by less was written in the same moment: file systems round their times."""
_LONGEST_LINE = 2**28
"""Bytes of an episode's line; what is longer is no episode."""
_PROBES = 16
"""Rows that are compared with the file when an index is opened."""
_COLUMNS = "offset, length, step, split, attempt, grp, member, reward, stop_reason, success, kept"
_TABLES = """
CREATE TABLE {schema}.rows (
    offset INTEGER PRIMARY KEY, length INTEGER NOT NULL, step INTEGER, split TEXT, attempt INTEGER, grp INTEGER, member INTEGER,
    reward REAL, stop_reason TEXT, success INTEGER, kept INTEGER
);
CREATE INDEX {schema}.by_block ON rows (step, split);
CREATE TABLE {schema}.blocks (step INTEGER, split TEXT, attempt INTEGER, PRIMARY KEY (step, split)) WITHOUT ROWID;
"""
_COMPARISONS = {"group": "grp = ?", "reward_at_least": "reward >= ?", "reward_at_most": "reward <= ?"}
"""What a row is asked for, where it is not that a column has the value."""
# While the run adds rows to the database, the lines that a reader has scanned itself are in both: those of the database count.
_VIEWS = """
CREATE TEMP VIEW all_rows AS SELECT * FROM main.rows UNION ALL
    SELECT * FROM temp.rows WHERE offset >= (SELECT ifnull(max(offset + length), 0) FROM (SELECT * FROM main.rows ORDER BY offset DESC LIMIT 1));
CREATE TEMP VIEW last AS SELECT step, split, max(attempt) AS attempt
    FROM (SELECT * FROM main.blocks UNION ALL SELECT * FROM temp.blocks) GROUP BY step, split;
"""

# Trajectory lines are long (they hold every token id), so what a line is about is read from its first bytes.
_BLOCK = re.compile(rb'\{"step": (\d{1,18}), "split": "([^"\\]*)", "attempt": (\d{1,9})[,}]')
_TURNS = b', "turns": ['
_JOURNALS = ("journal", "wal", "shm")


class IndexRow(NamedTuple):
    """A line of the file: its bytes, its block, and what its episode was. A torn line has no step."""

    offset: int
    length: int
    step: int
    split: str
    attempt: int
    group: int
    """-1 where it is not on record; so is `member`."""
    member: int
    reward: float | None
    """None where it was not finite."""
    stop_reason: str
    success: bool | None
    """None where that is not known."""
    kept: bool
    """Whether its group was in the update."""

    @property
    def key(self) -> str:
        """The address of its episode in the run. Example: "40/train/3/0"."""
        return f"{self.step}/{self.split}/{self.group}/{self.member}"


class TrajectoryIndex:
    """The index of one run folder, brought up to date by `refresh`. Its methods may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        self._data, self._path = folder / TRAJECTORIES, folder / INDEX
        self._guard = threading.RLock()
        self._seen: tuple[int, int, int] | None = None
        """Inode, size and time of the file at the last refresh."""
        self._close: weakref.finalize | None = None
        self.scanned_bytes = 0
        """How much of the file had to be read for rows that the database lacked."""
        self.unfinished_line: int | None = None
        """The number of the last line, if it has no end yet: it is being written, or a kill tore it."""
        self.is_complete = False
        """Whether the database on the disk has all rows."""
        self._open(None)

    # ------------------------------------------------------------------------------------------------------------- reading

    def refresh(self) -> None:
        """Take in what was written since the last time, from the database where it has it, else from the file."""
        with self._guard:
            try:
                data = self._data.stat()
            except FileNotFoundError:
                self._open(None)
                return
            except OSError as error:
                raise storage_error(self._data, error, doing="read") from error
            seen = (data.st_ino, data.st_size, data.st_mtime_ns)
            if seen == self._seen:
                return
            try:
                grown = (
                    self._seen is not None
                    and data.st_ino == self._seen[0]
                    and data.st_size >= self.covered
                    and self._fits(self._rows("offset DESC LIMIT 1"))
                )
                if not grown:
                    self._open(data)
            except sqlite3.Error:  # the database was damaged while it was open
                self._open(None)
            self._scan(data.st_size)
            self._seen = seen

    @property
    def covered(self) -> int:
        """Bytes of the file that have rows."""
        return sum(row.offset + row.length for row in self._rows("offset DESC LIMIT 1"))

    @property
    def torn_lines(self) -> list[int]:
        """The numbers of incomplete lines, from 1."""
        torn = [self.line_number(row) for row in self._rows("offset", "step IS NULL")]
        return [*torn, self.unfinished_line] if self.unfinished_line is not None else torn

    def line_number(self, row: IndexRow) -> int:
        """The number of a row's line, from 1."""
        return int(self._query("SELECT count(*) FROM all_rows WHERE offset <= ?", (row.offset,))[0][0])

    def attempts(self) -> dict[tuple[int, str], int]:
        """The highest attempt of every (step, split): the one that readers take."""
        return {
            (step, split): attempt for step, split, attempt in self._query("SELECT step, split, attempt FROM last ORDER BY step, split")
        }

    def select(self, *, order: str = "oldest", start: int = 0, limit: int = -1, **wanted: Any) -> list[IndexRow]:
        """The rows of each step's last attempt that fit; see `_condition` for what can be asked."""
        condition, values = _condition(wanted)
        return self._rows(f"{ORDERS[order]} LIMIT ? OFFSET ?", condition, (*values, limit, start), source=self._last_attempts())

    def count(self, **wanted: Any) -> int:
        """How many rows `select` has."""
        condition, values = _condition(wanted)
        return int(self._query(f"SELECT count(*) FROM {self._last_attempts()} WHERE {condition}", values)[0][0])

    def stop_reasons(self) -> list[str]:
        """Why episodes of this run ended."""
        return [name for (name,) in self._query("SELECT DISTINCT stop_reason FROM all_rows WHERE stop_reason != '' ORDER BY 1")]

    def read(self, rows: Sequence[IndexRow]) -> Iterator[dict[str, Any] | None]:
        """The records of some rows, one at a time; None for a line that turns out to be torn, or to be no episode."""
        yield from map(_episode, self.read_lines(rows))

    def read_lines(self, rows: Sequence[IndexRow]) -> Iterator[bytes]:
        """The lines of some rows as they stand in the file, one at a time."""
        if not rows:
            return
        try:
            with open_to_read(self._data) as file:
                for row in rows:
                    file.seek(row.offset)
                    yield file.read(row.length)
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error

    def save(self) -> None:
        """Write a database of all rows; for whoever holds the lock of the run."""
        draft = self._path.with_name(f".{INDEX}.{os.getpid()}{DRAFT}")
        draft.unlink(missing_ok=True)
        try:
            with self._guard:
                rows = self._query("SELECT * FROM all_rows")
            made = sqlite3.connect(draft)
            made.execute("PRAGMA synchronous = OFF")
            made.executescript(_TABLES.format(schema="main") + f"PRAGMA user_version = {_VERSION};")
            with made:
                _insert(made, rows)
            made.close()
            self._path.with_name(f"{INDEX}-journal").unlink(missing_ok=True)  # of a change to the old one that a kill broke off
            draft.replace(self._path)
        except (OSError, sqlite3.Error):  # a full disk, a folder that cannot be written: the rows stay in memory
            draft.unlink(missing_ok=True)

    # -------------------------------------------------------------------------------------------------------------- inside

    def _open(self, data: os.stat_result | None) -> None:
        """Connect to the database if it can be that of the file as it is, else to an empty one."""
        if self._close is not None:
            self._close()
        self._seen, self.unfinished_line, self.is_complete, self._uses_file = None, None, False, False
        # SQLite opens its journals with the database, and would wait for a pipe in the place of one of them.
        usable = data is not None and all(map(_is_plain_or_missing, (self._path, *(Path(f"{self._path}-{end}") for end in _JOURNALS))))
        for use in (True, False) if usable else (False,):
            address = f"file:{quote(str(self._path.absolute()))}?mode=ro" if use else "file::memory:"
            try:
                found = sqlite3.connect(address, uri=True, timeout=_BUSY_SECONDS, check_same_thread=False, isolation_level=None)
            except sqlite3.Error:  # there is none, or it cannot be read
                continue
            self._close, self._connection = weakref.finalize(self, found.close), found
            try:
                found.execute("PRAGMA temp_store = MEMORY")
                if not use:
                    found.executescript(_TABLES.format(schema="main"))
                found.executescript(_TABLES.format(schema="temp") + _VIEWS)
                if not use or (data is not None and self._is_of(data)):
                    self.is_complete = self._uses_file = use
                    return
            except (sqlite3.Error, OSError):  # not a database, or one that a kill left in the middle of a change
                pass
            self._close()

    def _is_of(self, data: os.stat_result) -> bool:
        """Whether the database can be that of the file: its rows follow on each other from the beginning, and some of them are compared."""
        if self._query("PRAGMA user_version") != [(_VERSION,)] or self._query("PRAGMA quick_check(1)") != [("ok",)]:
            return False
        if self._query("SELECT count(*) FROM main.sqlite_master WHERE type IN ('view', 'trigger')") != [
            (0,)
        ]:  # it would run code of somebody
            return False
        total, end = self._query("SELECT ifnull(sum(length), 0), ifnull(max(offset + length), 0) FROM main.rows")[0]
        if total != end or end > data.st_size:
            return False
        if end == data.st_size and data.st_mtime_ns > self._path.stat().st_mtime_ns + _TOLERANCE_NS:
            return False
        probes = [row for part in range(_PROBES) for row in self._rows("offset LIMIT 1", "offset >= ?", (part * end // _PROBES,))]
        return self._fits([*probes, *self._rows("offset DESC LIMIT 1")])

    def _query(self, command: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._guard:
            try:
                return self._connection.execute(command, values).fetchall()
            except sqlite3.DatabaseError:
                if not self._uses_file:
                    raise
            self._open(None)  # the database is damaged, or a writer keeps it locked: the file itself says the same
            self._scan(self._data.stat().st_size)
            return self._connection.execute(command, values).fetchall()

    def _rows(self, order: str, condition: str = "1", values: Sequence[Any] = (), *, source: str = "all_rows") -> list[IndexRow]:
        found = self._query(f"SELECT {_COLUMNS} FROM {source} WHERE {condition} ORDER BY {order}", values)
        return [IndexRow._make((*row[:9], None if row[9] is None else bool(row[9]), bool(row[10]))) for row in found]

    def _last_attempts(self) -> str:
        """Where the rows of the last attempts are. A run that was never resumed has only these: no join, which a scan of all rows would feel."""
        resumed = self._query("SELECT 1 FROM last WHERE attempt > 0 LIMIT 1")
        return "all_rows JOIN last USING (step, split, attempt)" if resumed else "all_rows"

    def _fits(self, rows: Sequence[IndexRow]) -> bool:
        """Whether the file has these lines where the rows say."""
        for row, line in zip(rows, self.read_lines(rows), strict=True):
            found = _BLOCK.match(line[:128])
            block = (int(found[1]), found[2].decode(errors="replace"), int(found[3])) if found is not None else None
            if not line.endswith(b"\n") or (row.step is not None and block != (row.step, row.split, row.attempt)):
                return False
        return True

    def _scan(self, until: int) -> None:
        """Make rows of the lines that have none, up to a place in the file."""
        begin = start = self.covered
        found: list[tuple[Any, ...]] = []
        self.unfinished_line = None
        try:
            with open_to_read(self._data) as file:
                file.seek(start)
                while start < until and (line := file.readline(min(until - start, _LONGEST_LINE))):
                    if not line.endswith(b"\n") and len(line) == _LONGEST_LINE:
                        raise OSError(errno.EFBIG, f"the line at byte {start} is longer than {_LONGEST_LINE:,} bytes")
                    if not line.endswith(b"\n"):
                        self.unfinished_line = int(self._query("SELECT count(*) FROM all_rows")[0][0]) + len(found) + 1
                        break
                    found.append(_row(start, len(line), _head_of(line)))
                    start += len(line)
        except OSError as error:
            raise storage_error(self._data, error, doing="read") from error
        self.scanned_bytes += start - begin
        if found:
            self.is_complete = False
            with self._guard:
                _insert(self._connection, found, schema="temp")


class IndexWriter:
    """Keeps the database of a run up to date while the run writes. What it cannot write (a full disk, a locked database) readers scan."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._covered = folder, -1
        self._connection: sqlite3.Connection | None = None
        self._close: weakref.finalize | None = None
        self.attempts: dict[tuple[int, str], int] = {}
        """The highest attempt of every (step, split) so far."""
        self._catch_up()

    def add(self, start: int, lines: Sequence[bytes], records: Sequence[Mapping[str, Any]]) -> None:
        """The run has appended these lines, which begin at `start`: write their rows."""
        if start != self._covered or self._connection is None:  # a write that failed half-way, or a kill, left something before them
            self._catch_up()
            return
        rows = []
        for line, record in zip(lines, records, strict=True):
            rows.append(_row(start, len(line), record))
            start += len(line)
        try:
            with self._connection:
                _insert(self._connection, rows)
            self._covered = start
        except sqlite3.Error:
            self._covered = -1  # the next call makes it anew

    def close(self) -> None:
        """Let go of the database."""
        if self._close is not None:
            self._close()
        self._connection = None

    def _catch_up(self) -> None:
        """Bring the database up to the end of the file, whatever state it is in."""
        self.close()
        path = self._folder / INDEX
        for found in (path, *(Path(f"{path}-{end}") for end in _JOURNALS)):
            if found.is_symlink() or not _is_plain_or_missing(found):  # a run writes only into its own folder, and waits for no pipe
                try:
                    found.unlink()
                except OSError as error:
                    raise storage_error(found, error) from error
        index = TrajectoryIndex(self._folder)
        index.refresh()
        self.attempts = {**self.attempts, **index.attempts()}
        if not index.is_complete:
            index.save()
        try:
            connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, check_same_thread=False)
            connection.execute("PRAGMA synchronous = OFF")  # a power cut costs the copy, not the record
        except sqlite3.Error:
            return
        self._connection, self._close = connection, weakref.finalize(self, connection.close)
        self._covered = index.covered


def _is_plain_or_missing(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        return error.errno == errno.ENOENT


def _insert(connection: sqlite3.Connection, rows: Sequence[tuple[Any, ...]], schema: str = "main") -> None:
    """Add rows, and the (step, split, attempt) that are new with them."""
    blocks = dict.fromkeys((row[2], row[3], row[4]) for row in rows if row[2] is not None)
    connection.executemany(f"INSERT INTO {schema}.rows VALUES ({', '.join('?' * 11)})", rows)
    connection.executemany(
        f"INSERT INTO {schema}.blocks VALUES (?, ?, ?) ON CONFLICT DO UPDATE SET attempt = max(attempt, excluded.attempt)", list(blocks)
    )


def _condition(wanted: Mapping[str, Any]) -> tuple[str, list[Any]]:
    """Which rows are asked for; None and "" take all.

    step, split, group, member, success, stop_reason, kept: equal; reward_at_least, reward_at_most: of the reward; steps: one of some steps.
    """
    parts, values = ["step IS NOT NULL"], []
    for name, value in wanted.items():
        if value is None or value == "":
            continue
        if name == "steps":
            parts.append(f"step IN ({', '.join('?' * len(value))})")
            values += value
        else:
            parts.append(_COMPARISONS.get(name, f"{name} = ?"))
            values.append(value)
    return " AND ".join(parts), values


def _head_of(line: bytes) -> dict[str, Any]:
    """What a line says before its turns, which are nearly all of it; empty if it is torn."""
    if _BLOCK.match(line) is None or not line.rstrip().endswith(b"}"):
        return {}
    turns = line.find(_TURNS)
    return parsed_line(line[:turns] + b"}" if turns > 0 else line) or {}


def _episode(line: bytes) -> dict[str, Any] | None:
    record = parsed_line(line)
    turns = record.get("turns", []) if record is not None else None
    texts = ("observation", "response")
    if isinstance(turns, list) and all(
        isinstance(turn, dict) and all(isinstance(turn.get(name, ""), str) for name in texts) for turn in turns
    ):
        return record
    return None


def _row(start: int, length: int, record: Mapping[str, Any]) -> tuple[Any, ...]:
    """The row of a line, from its place and what its record says; a record that lacks its block is a torn line."""
    block = record.get("step"), record.get("split"), record.get("attempt")
    if not isinstance(block[0], int) or not isinstance(block[1], str) or not block[1] or not isinstance(block[2], int):
        return (start, length, *[None] * 9)
    reward, success = record.get("reward"), record.get("success")
    return (
        start,
        length,
        *block,
        *(value if isinstance(value := record.get(name), int) and 0 <= value < 2**63 else -1 for name in ("group", "member")),
        float(reward) if isinstance(reward, int | float) and abs(reward) <= sys.float_info.max else None,
        visible(str(record.get("stop_reason") or "")),
        None if success is None else bool(success),
        bool(record.get("kept")),
    )
