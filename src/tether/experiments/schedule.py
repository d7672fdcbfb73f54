"""Running cells side by side: each a `tether train` process of its own, as many as the device takes, resumed where they were.

A cell's run lies in RUNS/SCALE/ID, its log and its settings beside it. While its process lives, the process holds a lock on ID.lock (it
inherits the locked file), so two schedulers, or a scheduler and the orphan of a killed one, never run a cell twice. A finished run is
harvested at once into a small file; its checkpoints, trajectories and report are then deleted, unless they are asked to stay. A run that failed is put on record, with the
last line of its log, and does not stop the others. Ctrl-C, SIGTERM and the deadline end the processes as Ctrl-C would: they write a
checkpoint, and the next start resumes them.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

import yaml

from tether.core.errors import TetherError
from tether.experiments.capacity import Capacity
from tether.experiments.cells import Cell, CellFiles, CellRecord
from tether.experiments.harvest import harvest, progress
from tether.runs.store import ABOUT, RunStore

POLL_SECONDS = 1.0
GRACE_SECONDS = 120.0
"""How long an interrupted run may take to finish its step and write its checkpoint."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of every run: threads of several runs would only compete for the cores."""
LEFTOVERS = ("checkpoints", "trajectories.jsonl", "report.html")
"""Of a harvested run; metrics, timings and settings stay."""


@dataclass(slots=True)
class Job:
    """A cell whose process is running."""

    cell: Cell
    folder: Path
    process: subprocess.Popen[bytes]
    lock: IO[bytes]
    step: int = 0
    success: float | None = None
    step_seconds: float | None = None

    def look(self) -> None:
        """Read how far the run is."""
        self.step, self.success, self.step_seconds = progress(self.folder)


@dataclass(frozen=True, slots=True)
class Ended:
    """A cell whose run is over and waits to be harvested."""

    cell: Cell
    folder: Path
    code: int
    """Of its process."""
    lock: IO[bytes]


@dataclass(slots=True)
class State:
    """How far the scheduler is."""

    total: int
    present: int
    """Cells whose file was there before."""
    running: list[Job] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    waiting: list[Cell] = field(default_factory=list)
    done: list[Cell] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Cell id to reason."""
    stopped: str | None = None
    """Why it ended before all cells were done."""

    def seconds_left(self) -> float | None:
        """Steps that are left over the present pace of all runs; None before there is one."""
        pace = sum(1 / job.step_seconds for job in self.running if job.step_seconds)
        steps = sum(cell.steps for cell in self.waiting) + sum(max(0, job.cell.steps - job.step) for job in self.running)
        return steps / pace if pace else None


class Observer(Protocol):
    """Follows the scheduler."""

    def on_change(self, state: State) -> None:
        """Called after every look at the runs."""

    def on_done(self, cell: Cell, record: CellRecord) -> None: ...

    def on_failed(self, cell: Cell, reason: str) -> None: ...


def run_cells(
    cells: Sequence[Cell],
    files: CellFiles,
    runs: Path,
    capacity: Capacity,
    observer: Observer,
    *,
    commit: str,
    max_seconds: float | None = None,
    command: Callable[[Cell, Path, Path], list[str]] | None = None,
    keep_runs: bool = False,
) -> State:
    """Run the cells that have no file yet.

    Args:
        cells: in the order in which they are started.
        files: where finished cells are written.
        runs: folder of the run folders.
        capacity: says how many run side by side.
        observer: follows the progress.
        commit: of the code, for the record.
        max_seconds: end cleanly after this time; runs are resumed by the next call.
        command: the process of a cell, from the cell, its run folder and its file of settings; by default `tether train`.
        keep_runs: leave run folders whole: checkpoints, trajectories and report stay.
    """
    runs.mkdir(parents=True, exist_ok=True)
    missing = [cell for cell in cells if not files.has(cell)]
    state = State(total=len(cells), present=len(cells) - len(missing), waiting=missing)
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    with _terminated_as_interrupted():
        try:
            while state.waiting or state.running or state.ended:
                if deadline is not None and time.monotonic() >= deadline:
                    state.stopped = "the time given by --max-minutes is over"
                    break
                _retire(state)
                for job in state.running:
                    job.look()
                _start(state, files, runs, capacity, command or train_command)
                observer.on_change(state)
                if state.ended:  # one at a time, and only after others were started: harvesting takes seconds
                    _harvest(state.ended.pop(0), files, state, observer, commit, keep_runs)
                elif state.running or state.waiting:
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            state.stopped = "interrupted"
        finally:
            _interrupt(state.running)
            _retire(state)
            for ended in state.ended:
                _harvest(ended, files, state, observer, commit, keep_runs, interrupted=True)
            state.ended.clear()
    return state


def train_command(cell: Cell, folder: Path, settings: Path) -> list[str]:
    """`tether train` of a cell, resumed where its run folder exists."""
    how = ["--resume"] if (folder / ABOUT).is_file() else ["--config", str(settings)]
    return [sys.executable, "-m", "tether", "train", *how, "--out", str(folder)]


def _start(state: State, files: CellFiles, runs: Path, capacity: Capacity, command: Callable[[Cell, Path, Path], list[str]]) -> None:
    """Start as many waiting cells as there is room for; those that another process runs keep waiting."""
    for cell in list(state.waiting):
        if not capacity.has_room([(job.step, job.step_seconds) for job in state.running]):
            return
        folder = runs / cell.id
        lock = _locked(runs / f"{cell.id}.lock")
        if lock is None:
            continue
        state.waiting.remove(cell)
        if files.has(cell):  # another scheduler has finished it meanwhile
            lock.close()
            state.done.append(cell)
        elif _finished(folder):  # the run ended, its scheduler was killed before it harvested
            state.ended.append(Ended(cell, folder, 0, lock))
        else:
            if folder.is_dir() and not (folder / ABOUT).is_file():
                shutil.rmtree(folder)  # a kill while the folder was being made: it holds nothing and would be refused
            settings = runs / f"{cell.id}.yaml"
            settings.write_text(yaml.safe_dump(cell.settings, sort_keys=False), encoding="utf-8")
            with (runs / f"{cell.id}.log").open("ab") as log:
                process = subprocess.Popen(
                    command(cell, folder, settings),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the scheduler alone, which passes it on once
                    pass_fds=(lock.fileno(),),
                    env=os.environ | ONE_THREAD,
                )
            state.running.append(Job(cell, folder, process, lock))


def _retire(state: State) -> None:
    """Take the runs whose process is over from the running ones."""
    for job in list(state.running):
        code = job.process.poll()
        if code is not None:
            state.running.remove(job)
            state.ended.append(Ended(job.cell, job.folder, code, job.lock))


def _harvest(
    ended: Ended, files: CellFiles, state: State, observer: Observer, commit: str, keep_runs: bool, *, interrupted: bool = False
) -> None:
    """Keep the numbers of a finished run; one that did not finish is a failure, unless it was `interrupted`."""
    cell, folder = ended.cell, ended.folder
    try:
        if _finished(folder):
            record = harvest(cell, folder, commit=commit)
            files.write(cell, record)
            if not keep_runs:
                _delete_leftovers(folder)
            state.done.append(cell)
            observer.on_done(cell, record)
        elif interrupted:
            state.waiting.append(cell)
        else:
            _fail(cell, f"exit code {ended.code}: {_last_line(folder.parent / f'{cell.id}.log')}", files, state, observer)
    except TetherError as error:
        _fail(cell, f"cannot be harvested: {error}", files, state, observer)
    finally:
        ended.lock.close()


def _delete_leftovers(folder: Path) -> None:
    for name in LEFTOVERS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _fail(cell: Cell, reason: str, files: CellFiles, state: State, observer: Observer) -> None:
    files.write_failure(cell, reason)
    state.failed[cell.id] = reason
    observer.on_failed(cell, reason)


def _interrupt(jobs: Sequence[Job]) -> None:
    """End the processes as Ctrl-C would, and kill those that do not end in time."""
    for job in jobs:
        if job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    for job in jobs:
        try:
            job.process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait()


def _finished(folder: Path) -> bool:
    return (folder / ABOUT).is_file() and RunStore.open(folder).finished is not None


def _locked(path: Path) -> IO[bytes] | None:
    """The file, locked for as long as it or a process that inherited it is open; None if another process has it."""
    file = path.open("wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, which batch systems send, ends the scheduler as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
