"""The run folder: append-only files that a kill cannot spoil.

    run.json            schema, Tether's version, what the run is (environment, model, algorithm, seed, start), its machine, further attempts, how it
                        ended
    config.yaml         the resolved settings; training from it repeats the run
    metrics.jsonl       one StepRecord a line; equal bytes for equal seeds
    timings.jsonl       everything measured by the clock, and memory
    trajectories.jsonl  one episode a line
    trajectories.sqlite where each of them lies: index.py
    images/DIGEST.png   what the agent saw, each picture once: images.py
    run.lock            while a process writes the run: lock.py
    checkpoints/        written by the trainer
    report.html         written by `tether report`

Nothing is ever deleted. A run resumed from an earlier checkpoint writes its steps again, and readers take the last record of a step;
each block of trajectories carries an `attempt`, the number of earlier blocks of that step and split, and readers take the highest.
A kill can tear the last line: readers skip it and remember it in `torn_lines`, and the next append starts on a line of its own.
"""

import errno
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import yaml

from tether.core.config import MAX_FILE, load_yaml
from tether.core.errors import BadInput
from tether.core.files import open_to_read, read_plain
from tether.core.images import Image
from tether.core.text import shortened
from tether.core.version import __version__
from tether.runs.checkpoints import MODEL, find_checkpoint
from tether.runs.files import DRAFT, append_whole, is_draft, parsed_line, read_object, remove_drafts, storage_error, write_whole
from tether.runs.images import IMAGES, sync_images, write_images
from tether.runs.index import INDEX, TRAJECTORIES, IndexWriter, TrajectoryIndex
from tether.runs.lock import LOCK, RunLock, RunLocked
from tether.runs.mirror import Mirror
from tether.runs.remote import fetched
from tether.runs.schema import SCHEMA_VERSION, StepRecord, check_schema

ABOUT, CONFIG, METRICS, TIMINGS = "run.json", "config.yaml", "metrics.jsonl", "timings.jsonl"
CHECKPOINTS, REPORT = "checkpoints", "report.html"

INDEX_WORTH_SAVING = 2**24
"""Bytes of trajectories: a reader that had to scan more keeps what it found, where nobody writes the run."""


MOST_RECORDS = 2**32
"""Bytes of a file of records that is read whole."""

PRIVATE = 0o700
"""The mode of a new run folder: what environments and models say may hold secrets of whoever runs them."""


V = TypeVar("V")


class RunStore:
    """One run's folder. Make it with `create` or `open`. The first write locks it, until `close`; reading needs no lock."""

    def __init__(self, folder: Path, *, writes: bool = True) -> None:
        """`writes` False: whatever is to be written is dropped, for the ranks of a run that are not the first."""
        self.folder, self.writes = folder, writes
        self.torn_lines: dict[str, list[int]] = {}
        """File name to the numbers of the incomplete lines that its latest reading skipped."""
        self._metrics = _LinesByStep(folder / METRICS, _step_record)
        self._timings = _LinesByStep(folder / TIMINGS, _step_timings)
        self._index: TrajectoryIndex | None = None
        self._index_writer: IndexWriter | None = None
        self._held: RunLock | None = None
        self._lock: weakref.finalize | None = None
        self._new_images: list[Path] = []
        """Not yet forced to the disk."""
        self._made: list[Path] = []
        """Folders that `create` made, the innermost first."""
        self.is_new = False
        """`create` made it."""
        self.mirror: Mirror | None = None
        """What uploads the run while it is written, where it lies at an address."""

    @classmethod
    def create(cls, folder: Path, config_yaml: str, about: Mapping[str, Any]) -> "RunStore":
        """A new run folder; a folder that holds anything is never touched."""
        store = cls(folder)
        dangling = next((path for path in (folder, *folder.parents) if path.is_symlink() and not path.exists()), None)
        if dangling is not None:
            raise BadInput(f"'{dangling}' is a symbolic link to nothing; make the folder that it names, or choose another --out")
        try:
            if folder.exists() and (not folder.is_dir() or (any(folder.iterdir()) and not _is_unborn(folder))):
                raise BadInput(f"run folder '{folder}' exists; resume it with --resume or choose another --out")
            store._made = [path for path in (folder / CHECKPOINTS, folder, *folder.parents) if not path.exists()]
            is_new = not folder.exists()
            (folder / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
            if is_new:
                folder.chmod(PRIVATE)
        except OSError as error:
            raise storage_error(folder, error) from error
        store._replace(CONFIG, config_yaml)
        # Last, because run.json is what makes a folder a run.
        store._replace(ABOUT, _pretty({"schema": SCHEMA_VERSION, "tether": __version__, "about": dict(about), "finished": None}))
        store.is_new = True
        return store

    @classmethod
    def open(cls, folder: Path, *, writes: bool = True) -> "RunStore":
        """An existing run folder; `writes` as in the constructor."""
        if not os.path.isdir(folder):
            raise BadInput(f"run folder '{folder}' does not exist; check the path")
        missing = [name for name in (ABOUT, CONFIG) if not os.path.lexists(folder / name)]
        if missing:
            raise BadInput(
                f"'{folder}' is not a run folder: {' and '.join(missing)} missing; give the folder that `tether train --out` wrote"
            )
        store = cls(folder, writes=writes)
        check_schema(store._run_json().get("schema"), f"'{folder / ABOUT}'")
        return store

    def lock(self) -> None:
        """Keep other processes from writing this folder; RunLocked where one does, StorageError where it is another folder than the one that was
        locked. A store that does not write needs none."""
        if not self.writes:
            return
        if self.mirror is not None:
            self.mirror.check()
        if self._held is not None:
            self._held.check(self.folder)
            return
        for name in (CHECKPOINTS, LOCK, IMAGES):
            if (self.folder / name).is_symlink():
                raise BadInput(
                    f"'{self.folder / name}' is a symbolic link, and a run writes only into its own folder; move what it names there"
                )
        self._held = RunLock.acquire(self.folder)
        self._lock = weakref.finalize(self, self._held.release)
        remove_drafts(self.folder)
        remove_drafts(self.folder / IMAGES)
        for draft in self.folder.glob(f".{INDEX}.*{DRAFT}*"):  # a kill left it; only the holder of the lock writes one
            draft.unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing more is written: another process may."""
        if self._index_writer is not None:
            self._index_writer.close()
            self._index_writer = None
        try:
            if self.mirror is not None:
                self.mirror.close()
        finally:
            self.mirror = None
            if self._lock is not None:
                self._lock()
                self._lock = self._held = None

    def discard(self) -> None:
        """Take back what `create` made, for a run that could not start: nothing else that lies in the folder is touched."""
        if self.mirror is not None:
            self.mirror.discard()
            self.mirror = None
        for path in (*(self.folder / name for name in (ABOUT, CONFIG, METRICS, TIMINGS, TRAJECTORIES, INDEX)), *self._new_images):
            path.unlink(missing_ok=True)
        self.close()
        for folder in (*([self.folder / IMAGES] if self._new_images else []), *self._made):
            try:
                folder.rmdir()
            except OSError:  # it holds something that is not the run's
                break

    @property
    def checkpoints(self) -> Path:
        return self.folder / CHECKPOINTS

    @property
    def place(self) -> str:
        """What continues the run as --out."""
        return str(self.folder) if self.mirror is None else self.mirror.address

    @property
    def finished(self) -> str | None:
        """The note of `finish`; None while the run is in progress, and after a kill."""
        note = self._run_json().get("finished")
        return None if note is None else str(note)

    @property
    def version(self) -> str:
        """The version of Tether that began the run."""
        return str(self._run_json().get("tether", "unknown"))

    def about(self) -> dict[str, Any]:
        """The description of the run that `create` was given."""
        return dict(self._run_json().get("about") or {})

    def machine(self) -> dict[str, Any]:
        """The machine that `computed_on` recorded last; empty for runs of older versions."""
        return dict(self._run_json().get("machine") or {})

    def computed_on(self, machine: Mapping[str, Any]) -> None:
        """Record the machine of the run; a run that continues on another machine records it again."""
        self._replace(ABOUT, _pretty({**self._run_json(), "machine": dict(machine)}))

    def attempts(self) -> list[dict[str, Any]]:
        """The further attempts of the run that a supervisor or torchrun started, as `began_again` recorded them."""
        return list(self._run_json().get("attempts") or [])

    def began_again(self, attempt: int, cause: str, step: int) -> None:
        """Record a further attempt: its number, why there is one, and the step that it continues from."""
        entry = {"attempt": attempt, "cause": cause, "from_step": step, "at": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        self._replace(ABOUT, _pretty({**self._run_json(), "attempts": [*self.attempts(), entry]}))

    def config_text(self) -> str:
        """The resolved settings, as written."""
        path = self.folder / CONFIG
        try:
            return read_plain(path, MAX_FILE).decode("utf-8")
        except OSError as error:
            raise storage_error(path, error, doing="read") from error
        except UnicodeDecodeError as error:
            raise BadInput(
                f"'{path}' is not UTF-8 text ({error.reason} at byte {error.start}); restore it or choose another run"
            ) from error

    def config(self) -> dict[str, Any]:
        """The resolved settings; names are text at every level."""
        path, text = self.folder / CONFIG, self.config_text()
        try:
            data = load_yaml(text) or {}
        except (yaml.YAMLError, ValueError) as error:
            words = shortened(" ".join(str(error).split()), 500)
            raise BadInput(f"'{path}' does not parse: {words}; restore it or choose another run") from error
        _check_sections(path, {"settings": data})
        _check_sections(path, {name: data.get(name) for name in ("env", "evaluation", "filter", "model", "algorithm")})
        return dict(_with_names(data))

    def replace_config(self, config_yaml: str) -> None:
        """Write other settings in place of the old ones, for a run that continues for longer than first configured."""
        self._replace(CONFIG, config_yaml)

    def append(self, record: StepRecord) -> None:
        """Add the numbers of a step."""
        self._append(METRICS, [record.to_json()])

    def append_timings(self, step: int, timings: Mapping[str, Any]) -> None:
        """Add the timings of a step, such as {"seconds": {"rollout": 3.1}, "tokens_per_second": 900.0}."""
        self._append(TIMINGS, [{"step": step, **timings}])

    def append_trajectories(self, records: Sequence[Mapping[str, Any]], *, joins: bool = False, images: Iterable[Image] = ()) -> None:
        """Add the trajectories of a step, all of one split in one call: a later call for that step and split replaces them for readers, unless it
        `joins` them. `images`: the pictures of these, which are on disk before a record names them."""
        if not self.writes:
            return
        self.lock()
        self._new_images += write_images(self.folder, images)
        if self._index_writer is None:
            self._index_writer = IndexWriter(self.folder)
        known = self._index_writer.attempts
        attempts = {
            block: max(0, known.get(block, -1) + (not joins))
            for block in {(int(record["step"]), str(record["split"])) for record in records}
        }
        written = []
        for record in records:
            block = (int(record["step"]), str(record["split"]))
            head = {"step": block[0], "split": block[1], "attempt": attempts[block]}  # first: the index reads the beginning of a line
            written.append({**head, **record, **head})
        # Counted even if the write fails half-way: what it left behind is then an earlier attempt.
        known.update(attempts)
        lines = _lines_of(written)
        self._index_writer.add(append_whole(self.folder / TRAJECTORIES, b"".join(lines)), lines, written)

    def sync(self) -> None:
        """Force what was appended to the disk, so that no checkpoint outlives a power cut that the records of its steps do not."""
        if not self.writes:
            return
        sync_images(self._new_images)
        self._new_images = []
        for path in (self.folder / METRICS, self.folder / TRAJECTORIES):
            if path.exists():
                try:
                    with open_to_read(path) as file:
                        os.fsync(file.fileno())
                except OSError as error:
                    raise storage_error(path, error) from error

    def steps(self) -> list[StepRecord]:
        """The last record of every step, in order of the steps. Of a file that has grown since the last call only the new lines are read."""
        self.torn_lines[METRICS] = self._metrics.read()
        return self._metrics.in_order()

    def timings(self) -> list[dict[str, Any]]:
        """The last timings of every step, in order of the steps."""
        self.torn_lines[TIMINGS] = self._timings.read()
        return self._timings.in_order()

    def trajectory_index(self) -> TrajectoryIndex:
        """Where the episodes lie, up to date: filter and read them without reading the file."""
        if self._index is None:
            self._index = TrajectoryIndex(self.folder)
        index, before = self._index, self._index.scanned_bytes
        index.refresh()
        if index.scanned_bytes - before > INDEX_WORTH_SAVING:
            try:
                lock = RunLock.acquire(self.folder, patience=0.0)
            except (RunLocked, OSError):  # a run is being written, or the folder cannot be: it stays in memory
                return index
            try:
                index.save()
            finally:
                lock.release()
        return index

    def trajectory_blocks(self) -> list[tuple[int, str]]:
        """Every (step, split) that has trajectories, in order."""
        return sorted(self.trajectory_index().attempts())

    def trajectories(self, step: int | None = None, split: str | None = None) -> Iterator[dict[str, Any]]:
        """The trajectories of each step's last attempt, one at a time, in the order they were written."""
        index = self.trajectory_index()
        torn = self.torn_lines[TRAJECTORIES] = index.torn_lines
        rows = index.select(step=step, split=split)
        for row, data in zip(rows, index.read(rows), strict=True):
            if data is None:
                torn.append(index.line_number(row))
            else:
                yield data

    def finish(self, note: str) -> None:
        """Record how the run ended."""
        self._replace(ABOUT, _pretty({**self._run_json(), "finished": note}))

    def reopen(self) -> None:
        """The run continues: it is no longer finished."""
        self._replace(ABOUT, _pretty({**self._run_json(), "finished": None}))

    def _run_json(self) -> dict[str, Any]:
        path = self.folder / ABOUT
        data = read_object(path)
        _check_sections(path, {key: data.get(key) for key in ("about", "machine")})
        return data

    def _append(self, name: str, records: Sequence[Mapping[str, Any]]) -> None:
        """Write all records in one go, on lines of their own."""
        if self.writes:
            self.lock()
            append_records(self.folder / name, records)

    def _replace(self, name: str, text: str) -> None:
        """Write a small file whole: a reader sees the old one or the new one, never half of it."""
        if self.writes:
            self.lock()
            write_whole(self.folder / name, text)


class _LinesByStep(Generic[V]):
    """The last record of every step in a JSONL file that is appended to."""

    def __init__(self, path: Path, parse: Callable[[dict[str, Any]], tuple[int, V]]) -> None:
        """`parse` makes the step and the record of a line; a BadInput from it says what the line is instead."""
        self._path, self._parse = path, parse
        self._records: dict[int, V] = {}
        self._whole: dict[int, V] = {}
        """Those of `_records` and of a last line that has no end yet."""
        self._torn: list[int] = []
        self._count, self._end, self._file = 0, 0, (0, 0)
        """Lines and bytes that were read, and the inode and device of the file."""

    def read(self) -> list[int]:
        """Read what was added since the last time; returns the numbers of the lines that a kill tore, or that have no end yet."""
        try:
            with open_to_read(self._path) as file:
                stat = os.fstat(file.fileno())
                if stat.st_size > MOST_RECORDS:
                    raise OSError(errno.EFBIG, f"it has {stat.st_size:,} bytes, and no run writes more than {MOST_RECORDS:,}")
                if (stat.st_ino, stat.st_dev) != self._file or stat.st_size < self._end:  # another file than before
                    self._forget()
                    self._file = (stat.st_ino, stat.st_dev)
                file.seek(self._end)
                *lines, unfinished = file.read().split(b"\n")
        except FileNotFoundError:
            self._forget()
            return []
        except OSError as error:
            raise storage_error(self._path, error, doing="read") from error
        for line in lines:
            self._count, self._end = self._count + 1, self._end + len(line) + 1
            self._take(line, self._records, self._torn)
        self._whole, torn = dict(self._records), list(self._torn)
        if unfinished:
            self._count += 1
            self._take(unfinished, self._whole, torn)
            self._count -= 1  # it is read again when it has an end
        return torn

    def in_order(self) -> list[V]:
        return [self._whole[step] for step in sorted(self._whole)]

    def _take(self, line: bytes, records: dict[int, V], torn: list[int]) -> None:
        if not line.strip():
            return
        data = parsed_line(line)
        if data is None:
            torn.append(self._count)
            return
        try:
            step, record = self._parse(data)
        except BadInput as error:
            number = self._count
            self._forget()
            raise BadInput(f"line {number} of '{self._path}' {error}") from error
        records[step] = record

    def _forget(self) -> None:
        self._records, self._whole, self._torn = {}, {}, []
        self._count, self._end, self._file = 0, 0, (0, 0)


def _step_record(data: dict[str, Any]) -> tuple[int, StepRecord]:
    try:
        record = StepRecord.from_json(data)
    except BadInput as error:
        raise BadInput(f"is {error}") from error
    return record.step, record


def _step_timings(data: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if type(data.get("step")) is not int:
        raise BadInput("has no whole number as step; delete that line")
    return data["step"], data


class Run:
    """A read-only view of a run folder.

    Example: `run = tether.train("frozen_lake", steps=20); run.metrics("validation/success")` gives {0: 0.4453125, 20: 0.8125}.
    """

    def __init__(self, path: Path | str) -> None:
        """`path`: a run folder, or the address of one, such as s3://bucket/run."""
        self._given = path
        self.store = RunStore.open(fetched(path, weights=False))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.store.folder

    @property
    def records(self) -> list[StepRecord]:
        """One record per step, in order; step 0 is the untrained policy."""
        return self.store.steps()

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings; training from them repeats the run."""
        return self.store.config()

    @property
    def finished(self) -> str | None:
        """How the run ended; None while it can be resumed."""
        return self.store.finished

    def metrics(self, name: str) -> dict[int, float]:
        """The values of a metric, by step; docs/metrics.md lists the names."""
        return {record.step: record.metrics[name] for record in self.records if name in record.metrics}

    def model(self, *, best: bool = False, step: int | None = None) -> Path:
        """The model folder of the newest checkpoint, of the best by validation, or of a step; `tether.load_model` reads it."""
        return find_checkpoint(fetched(self._given) / CHECKPOINTS, best=best, step=step)[0] / MODEL

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={len(self.records)}, finished={self.finished!r})"


def append_records(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """Add records to a JSONL file in one go, on lines of their own: what a kill tore stays alone on its line."""
    append_whole(path, b"".join(_lines_of(records)))


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL file; torn lines are left out, and a file that is not there has none."""
    try:
        lines = read_plain(path, MOST_RECORDS).split(b"\n") if os.path.lexists(path) else []
    except OSError as error:
        raise storage_error(path, error, doing="read") from error
    return [record for line in lines if (record := parsed_line(line)) is not None]


def _is_unborn(folder: Path) -> bool:
    """Whether a folder holds nothing but what `create` had made when a kill came before `run.json`, which makes it a run."""
    names = {path.name for path in folder.iterdir() if not is_draft(path.name)}
    return CHECKPOINTS in names <= {CHECKPOINTS, CONFIG, LOCK} and not any((folder / CHECKPOINTS).iterdir())


def _check_sections(path: Path, sections: Mapping[str, Any]) -> None:
    """Refuse a file in which one of these is something else than an object."""
    for name, value in sections.items():
        if not isinstance(value or {}, dict):
            raise BadInput(f"'{path}' has a {type(value).__name__} as {name}; expected an object; restore it or choose another run")


def _with_names(value: Any) -> Any:
    """Settings whose names are all text: YAML has numbers and dates as names, too."""
    if isinstance(value, dict):
        return {str(name): _with_names(inner) for name, inner in value.items()}
    return [_with_names(inner) for inner in value] if isinstance(value, list) else value


def _lines_of(records: Sequence[Mapping[str, Any]]) -> list[bytes]:
    return [json.dumps(record, allow_nan=False).encode() + b"\n" for record in records]


def _pretty(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"
