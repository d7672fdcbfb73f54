"""The runs of a folder, kept up to date while they train.

A run is a folder with a run.json, at most `DEEPEST` folders below the root; its name is its path from there. Requests name runs, and a name is
looked up among the runs that were found, so no request reaches another file. What was read is kept until its file changes: records by the inode,
size and time of metrics.jsonl. Nothing is written, except for the index of trajectories that `RunStore` keeps beside a large file that lacks it.

Whether a run is training is read from the time of its lock file, which its owner moves every few seconds. Testing the lock itself would take it
for a moment, and a run that starts in that moment would be refused.
"""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, StorageError, did_you_mean
from tether.core.files import read_plain
from tether.core.text import shortened, visible
from tether.runs.checkpoints import MODEL
from tether.runs.compare import evaluation_prompts
from tether.runs.index import TRAJECTORIES, TrajectoryIndex
from tether.runs.lock import LOCK, STALE_SECONDS
from tether.runs.schema import StepRecord
from tether.runs.store import ABOUT, CONFIG, METRICS, TIMINGS, RunStore

DEEPEST = 4
LONGEST_TOKENIZER = 2**28
RESCAN_SECONDS = 2.0
"""A folder that was looked through more recently is not looked through again."""

Stamp = tuple[tuple[int, int, int], ...]
"""Inode, size and time of some files; zeros for a file that is not there."""


class LiveRun:
    """One run folder, read as often as its files change. Its methods may be called from several threads."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.store = RunStore.open(folder, writes=False)
        self._guard = threading.RLock()
        self._kept: dict[str, tuple[Stamp, Any]] = {}
        self._computing: dict[str, threading.RLock] = {}

    @property
    def folder(self) -> Path:
        return self.store.folder

    def stamp(self) -> Stamp:
        """Differs whenever something about the run has changed."""
        return file_stamp(*(self.folder / name for name in (ABOUT, METRICS, TRAJECTORIES)))

    def records(self) -> list[StepRecord]:
        """The last record of every step. Of a file that has grown only the new lines are read."""
        return self.once("records", (METRICS,), self.store.steps)

    def timings(self) -> list[dict[str, Any]]:
        """The last timings of every step."""
        return self.once("timings", (TIMINGS,), self.store.timings)

    def about(self) -> dict[str, Any]:
        """What the run is: environment, model, algorithm, seed, start."""
        return self.once("about", (ABOUT,), self.store.about)

    def config(self) -> dict[str, Any]:
        """The resolved settings."""
        return self.once("config", (CONFIG,), self.store.config)

    def machine(self) -> dict[str, Any]:
        """The machine it computes on."""
        return self.once("machine", (ABOUT,), self.store.machine)

    def finished(self) -> str | None:
        """How it ended; None where it did not say."""
        return self.once("finished", (ABOUT,), lambda: self.store.finished)

    def evaluation_prompts(self) -> frozenset[str]:
        """The prompts of its last validation on record."""
        with self._guard:
            return self.once("prompts", (METRICS, TRAJECTORIES), lambda: evaluation_prompts(self.store, self.records()))

    def index(self) -> TrajectoryIndex:
        """Where its episodes lie, up to date."""
        with self._guard:
            return self.store.trajectory_index()

    def tokenizer(self) -> tuple[Any | None, str]:
        """The tokenizer of its checkpoints, which turns the token ids of episodes into text; None and the reason where none holds a whole one."""
        from tokenizers import Tokenizer

        def load() -> tuple[Any | None, str]:
            reason = "no checkpoint in the run folder holds a tokenizer"
            for path in sorted(self.store.checkpoints.glob(f"*/{MODEL}/tokenizer.json")):
                try:
                    return Tokenizer.from_str(read_plain(path, LONGEST_TOKENIZER).decode("utf-8")), ""
                except Exception as error:
                    if not isinstance(error, OSError | ValueError) and type(error) is not Exception:  # that of the tokenizers package
                        raise
                    said = shortened(" ".join(str(error).split()))
                    reason = f"the tokenizer of checkpoint {path.parent.parent.name} is damaged ({said}); `tether doctor` checks the run"
            return None, reason

        return self.once("tokenizer", ("checkpoints",), load)

    def is_training(self) -> bool:
        """Whether a process writes it; up to half a minute late where that process was killed."""
        try:
            age = abs(time.time() - (self.folder / LOCK).stat().st_mtime)  # a clock that was set back leaves times of the future
            return age < STALE_SECONDS
        except OSError:
            return False

    def state(self) -> str:
        """`training`, `finished` or `stopped`: ended without saying so, by a kill or another error."""
        return "training" if self.is_training() else "finished" if self.finished() else "stopped"

    def tags(self) -> list[str]:
        """The `tags` of the run's description or of its settings; runs that name none have none."""
        tags = self.about().get("tags") or self.config().get("tags") or []
        return [str(tag) for tag in tags] if isinstance(tags, list) else []

    def once(self, key: str, files: tuple[str, ...], compute: Any) -> Any:
        """What `compute()` gives, computed again only after one of these files has changed; by one thread, while others wait for it."""
        stamp = file_stamp(*(self.folder / name for name in files))
        kept = self._kept.get(key)
        if kept is None or kept[0] != stamp:
            with self._computing.setdefault(key, threading.RLock()):
                kept = self._kept.get(key)
                if kept is None or kept[0] != stamp:
                    kept = self._kept[key] = (stamp, compute())
        return kept[1]


class Catalogue:
    """The runs under a folder, by name."""

    def __init__(self, root: Path) -> None:
        if not root.is_dir():
            raise BadInput(f"folder '{root}' does not exist; give a folder of runs, such as the parent of `tether train --out`")
        self.root = root.resolve()
        self.shown = str(root)
        """The folder as it was given."""
        self.unreadable: dict[str, str] = {}
        """Name to the reason, for run folders that cannot be opened."""
        self._runs: dict[str, LiveRun] = {}
        self._guard = threading.Lock()
        self._scanned = -RESCAN_SECONDS

    def runs(self) -> dict[str, LiveRun]:
        """Every run that is there now, by name."""
        with self._guard:
            if time.monotonic() - self._scanned >= RESCAN_SECONDS:
                self._scan()
                self._scanned = time.monotonic()
            return dict(self._runs)

    def places(self) -> dict[str, int]:
        """The place of every run in the order of names: what its colour goes by on every page."""
        return {name: place for place, name in enumerate(sorted(self.runs()))}

    def get(self, name: str) -> LiveRun:
        """One run; BadInput with the nearest name where there is none."""
        runs = self.runs()
        if name not in runs:
            with self._guard:  # a run that has just begun
                self._scan()
                runs = dict(self._runs)
        if name not in runs:
            raise BadInput(f"there is no run '{name}' in '{self.shown}': {did_you_mean(name, runs)}")
        return runs[name]

    def _scan(self) -> None:
        found: dict[str, LiveRun] = {}
        unreadable: dict[str, str] = {}
        for folder in _run_folders(self.root, DEEPEST):
            name = visible(folder.name if folder == self.root else folder.relative_to(self.root).as_posix())
            while name in found or name in unreadable:  # of two names that look the same
                name += "'"
            try:
                found[name] = self._runs.get(name) or LiveRun(name, folder)
            except (BadInput, StorageError) as error:
                unreadable[name] = str(error)
        self._runs, self.unreadable = found, unreadable


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Folders with a run.json, in order of their names; links and hidden folders are not entered, nor is the inside of a run."""
    if os.path.lexists(folder / ABOUT):
        yield folder
        return
    if depth == 0:
        return
    try:
        inner = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."))
    except OSError:  # not to be read by this user: nothing in it is a run that could be shown
        return
    for name in inner:
        yield from _run_folders(folder / name, depth - 1)


def file_stamp(*paths: Path) -> Stamp:
    """Differs whenever one of the files has changed."""
    found = []
    for path in paths:
        try:
            stat = path.stat()
            found.append((stat.st_ino, stat.st_size, stat.st_mtime_ns))
        except OSError:
            found.append((0, 0, 0))
    return tuple(found)
