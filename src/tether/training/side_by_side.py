"""Runs side by side: each a `tether train` process of its own, as many as the device takes, resumed where they were.

A trial's run lies in OUT/ID, its log and its settings beside it. While its process lives, the process holds a lock on ID.lock (it inherits
the locked file), so two schedulers, or a scheduler and the orphan of a killed one, never run a trial twice. A run whose scheduler is killed stops with
a checkpoint, as after SIGTERM. A run that failed is put on
record, with the last line of its log, and does not stop the others. Ctrl-C, SIGTERM and the deadline end the processes as Ctrl-C would: they
write a checkpoint, and the next start resumes them.

How many go side by side is measured on a GPU, the number of cores on a CPU, or what the user says. On a GPU the number is doubled while it
pays: one run is started, and when every run has made a few steps, their summed steps a second are compared with those of half as many. The
number grows while the sum rises by at least a quarter and memory for as many more runs, each as large as the largest so far, is free. It never
exceeds the cores, which every run needs one of. What was found is kept in a file, so a later start on the same device begins with it.
"""

import fcntl
import json
import math
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
from typing import IO, Any

import yaml

from tether.core.child import PARENT_VARIABLE, SHARES_CARD_VARIABLE
from tether.core.errors import BadInput, TetherError
from tether.runs.files import parsed_line, write_whole
from tether.runs.store import ABOUT, METRICS, TIMINGS
from tether.training.sweep import Trial, is_finished

POLL_SECONDS = 1.0
GRACE_SECONDS = 120.0
"""How long an interrupted run may take to finish its step and write its checkpoint."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
"""Of every run: threads of several runs would only compete for the cores."""
CAPACITY = "side_by_side.json"
"""In the folder of the runs: how many go side by side."""
RECENT_STEPS = 7
"""Steps whose median cost is a run's present pace: evaluations and checkpoints fall on fewer than half of them."""
STEPS_TO_MEASURE = 4
"""Steps of every run before its pace counts: the first ones compile kernels."""
GAIN = 1.25
"""What doubling the runs must bring, at least."""
SPARE = 1.2
"""Memory that must be free for each further run, over the largest one so far."""


@dataclass(slots=True)
class Job:
    """A trial whose process is running, or has ended and was not looked at yet."""

    trial: Trial
    folder: Path
    process: subprocess.Popen[bytes] | None
    """None where the run had ended before, and its scheduler was killed."""
    lock: IO[bytes]
    step: int = 0
    success: float | None = None
    step_seconds: float | None = None

    def look(self) -> None:
        """Read how far the run is."""
        self.step, self.success, self.step_seconds = progress(self.folder)


@dataclass(slots=True)
class SweepState:
    """How far a sweep is."""

    total: int
    present: int
    """Trials that were done before."""
    running: list[Job] = field(default_factory=list)
    ended: list[Job] = field(default_factory=list)
    waiting: list[Trial] = field(default_factory=list)
    done: list[Trial] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Trial id to reason."""
    stopped: str | None = None
    """Why it ended before all trials were done."""

    def seconds_left(self) -> float | None:
        """Steps that are left over the present pace of all runs; None before there is one."""
        pace = sum(1 / job.step_seconds for job in self.running if job.step_seconds)
        steps = sum(trial.steps for trial in self.waiting) + sum(max(0, job.trial.steps - job.step) for job in self.running)
        return steps / pace if pace else None


class Observer:
    """Follows a sweep. Override what you want to hear of."""

    def on_change(self, state: SweepState) -> None:
        """Called after every look at the runs."""

    def on_finished(self, trial: Trial, folder: Path) -> None:
        """A run has ended by itself. A TetherError from here makes it a failure."""

    def on_failed(self, trial: Trial, reason: str) -> None:
        """A run has failed; the next call tries it again."""


def sweep(
    trials: Sequence[Trial],
    out: Path | str,
    *,
    jobs: int | None = None,
    at_most: int | None = None,
    max_minutes: float | None = None,
    observer: Observer | None = None,
    is_done: Callable[[Trial], bool] | None = None,
    command: Callable[[Trial, Path, Path], list[str]] | None = None,
) -> SweepState:
    """Train the trials that are not done, side by side, each with a run folder of its own.

    Args:
        trials: in the order in which they are started; see `tether.training.sweep.sweep_trials`.
        out: folder of the run folders; the same folder resumes.
        jobs: runs at a time; None: as many as the device takes, measured, and at most `at_most` of them on a CPU.
        max_minutes: end cleanly after this time; the next call continues.
        observer: follows the progress.
        is_done: whether a trial needs no run; by default, whether its run folder holds a finished run.
        command: the process of a trial, from the trial, its run folder and its file of settings; by default `tether train`.
    """
    folder, observer, command = Path(out), observer or Observer(), command or train_command
    is_done = is_done or (lambda trial: is_finished(folder / trial.id))
    capacity = Capacity.fixed(jobs) if jobs is not None else Capacity.of_device(folder / CAPACITY, at_most)
    folder.mkdir(parents=True, exist_ok=True)
    missing = [trial for trial in trials if not is_done(trial)]
    state = SweepState(total=len(trials), present=len(trials) - len(missing), waiting=missing)
    for trial in trials:
        if trial not in missing and (lock := _lock_file(folder, trial)).exists() and (left := _locked(lock)) is not None:
            _unlock(left)  # of a scheduler that was killed
    deadline = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
    with _terminated_as_interrupted():
        try:
            while state.waiting or state.running or state.ended:
                if time.monotonic() >= deadline:
                    state.stopped = "the time given by --max-minutes is over"
                    break
                _retire(state)
                for job in state.running:
                    job.look()
                _start(state, folder, capacity, is_done, command)
                observer.on_change(state)
                if state.ended:  # one at a time, and only after others were started: an observer may take seconds
                    _take_in(state.ended.pop(0), state, observer)
                elif state.running or state.waiting:
                    time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            state.stopped = "interrupted"
        finally:
            _interrupt(state.running)
            _retire(state)
            for job in state.ended:
                _take_in(job, state, observer, interrupted=True)
            state.ended.clear()
    return state


def train_command(trial: Trial, folder: Path, settings: Path) -> list[str]:
    """`tether train` of a trial, resumed where its run folder exists."""
    how = ["--resume"] if (folder / ABOUT).is_file() else ["--config", str(settings)]
    python = [sys.executable, "-P"]  # without the current folder, whose modules would take the place of others
    return [*python, "-m", "tether", "train", *how, "--out", str(folder)]


def _lock_file(out: Path, trial: Trial) -> Path:
    return out / f"{trial.id}.lock"


def _start(
    state: SweepState,
    out: Path,
    capacity: "Capacity",
    is_done: Callable[[Trial], bool],
    command: Callable[[Trial, Path, Path], list[str]],
) -> None:
    """Start as many waiting trials as there is room for; those that another process runs keep waiting."""
    for trial in list(state.waiting):
        if not capacity.has_room([(job.step, job.step_seconds) for job in state.running]):
            return
        folder = out / trial.id
        lock = _locked(_lock_file(out, trial))
        if lock is None:
            continue
        state.waiting.remove(trial)
        if is_done(trial):  # another scheduler has finished it meanwhile
            _unlock(lock)
            state.done.append(trial)
        elif is_finished(folder):  # the run ended, its scheduler was killed before it took it in
            state.ended.append(Job(trial, folder, None, lock))
        else:
            if folder.is_dir() and not (folder / ABOUT).is_file():
                shutil.rmtree(folder)  # a kill while the folder was being made: it holds nothing and would be refused
            settings = out / f"{trial.id}.yaml"
            settings.write_text(yaml.safe_dump(trial.settings, sort_keys=False), encoding="utf-8")
            with (out / f"{trial.id}.log").open("ab") as log:
                process = subprocess.Popen(
                    command(trial, folder, settings),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C in the terminal reaches the scheduler alone, which passes it on once
                    pass_fds=(lock.fileno(),),
                    env=os.environ | ONE_THREAD | {PARENT_VARIABLE: str(os.getpid()), SHARES_CARD_VARIABLE: "1"},
                )
            state.running.append(Job(trial, folder, process, lock))


def _retire(state: SweepState) -> None:
    """Take the runs whose process is over from the running ones."""
    for job in list(state.running):
        if job.process is not None and job.process.poll() is not None:
            state.running.remove(job)
            state.ended.append(job)


def _take_in(job: Job, state: SweepState, observer: Observer, *, interrupted: bool = False) -> None:
    """A run whose process is over: finished, failed, or to be continued where it was `interrupted`."""
    try:
        if is_finished(job.folder):
            observer.on_finished(job.trial, job.folder)
            state.done.append(job.trial)
            return
        log = job.folder.parent / f"{job.trial.id}.log"
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n") if log.is_file() else []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        reason = f"exit code {job.process.returncode if job.process else 0}: {last}"
    except TetherError as error:
        interrupted, reason = False, f"cannot be read: {error}"
    finally:
        _unlock(job.lock)
    if interrupted:
        state.waiting.append(job.trial)
    else:
        state.failed[job.trial.id] = reason
        observer.on_failed(job.trial, reason)


def _interrupt(jobs: Sequence[Job]) -> None:
    """End the processes as Ctrl-C would, and kill those that do not end in time."""
    processes = [job.process for job in jobs if job.process is not None]
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + GRACE_SECONDS
    for process in processes:
        try:
            process.wait(timeout=max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _locked(path: Path) -> IO[bytes] | None:
    """The file, locked for as long as it or a process that inherited it is open; None if another process has it."""
    while True:
        file = path.open("wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            return file
        file.close()  # its holder removed it just now


def _unlock(file: IO[bytes]) -> None:
    """Give a lock back, and leave no file of it behind; the process that inherited it is over."""
    Path(file.name).unlink(missing_ok=True)  # before the flock goes: whoever opened it meanwhile sees that it is another file
    file.close()


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


def progress(run: Path) -> tuple[int, float | None, float | None]:
    """Of a run in progress: its last step, its last validation success, and the seconds a recent step took; from the ends of its files."""
    metrics, timings = (_tail(run / name) for name in (METRICS, TIMINGS))
    step = max((int(record["step"]) for record in metrics), default=0)
    success = next(
        (record["metrics"]["validation/success"] for record in reversed(metrics) if "validation/success" in record["metrics"]), None
    )
    costs = [math.fsum(record["seconds"].values()) for record in timings if record.get("seconds") and record["step"] > 0][-RECENT_STEPS:]
    return step, success, (sorted(costs)[len(costs) // 2] if costs else None)


def _tail(path: Path, size: int = 1 << 17) -> list[dict[str, Any]]:
    """The whole records in the last part of a JSONL file."""
    if not path.is_file():
        return []
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - size))
        lines = file.read().split(b"\n")
    # The first line may be cut, the last may be being written.
    return [record for line in lines if (record := parsed_line(line)) is not None]


# ---------------------------------------------------------------------------------------------------------------- capacity


@dataclass(frozen=True, slots=True)
class Gpu:
    """A card as nvidia-smi shows it; memory in MiB."""

    name: str
    total: int
    used: int


def read_gpu() -> Gpu | None:
    """The first card that is visible; None where there is none."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible == "" or shutil.which("nvidia-smi") is None:
        return None
    number = (visible or "0").split(",")[0]
    query = ["nvidia-smi", f"--id={number}", "--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    name, total, used = (part.strip() for part in done.stdout.splitlines()[0].rsplit(",", 2))
    return Gpu(name, int(total), int(used))


def count_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Capacity:
    """Says whether one more run fits. Make it with `fixed`, `of_gpu` or `of_device`."""

    most: int
    """Never more than this."""
    target: int
    """At present."""
    settled: bool = True
    memory: Path | None = None
    """File in which the number that was found is kept."""
    gpu: Gpu | None = None
    """As it was before the first run."""
    rates: dict[int, float] = field(default_factory=dict)
    """Runs side by side to their summed steps a second."""

    @classmethod
    def fixed(cls, jobs: int) -> "Capacity":
        if jobs < 1:
            raise BadInput(f"--jobs is {jobs}; give at least 1")
        return cls(jobs, jobs)

    @classmethod
    def of_gpu(cls, gpu: Gpu, cores: int, memory: Path) -> "Capacity":
        """Begins with what `memory` has of this card, if anything."""
        if memory.is_file():
            found = json.loads(memory.read_text(encoding="utf-8"))
            if found["device"] == gpu.name and found["cores"] == cores:
                return cls(found["jobs"], found["jobs"], memory=memory)
        return cls(cores, 1, settled=False, memory=memory, gpu=gpu)

    @classmethod
    def of_device(cls, memory: Path, at_most: int | None = None) -> "Capacity":
        """What the GPU takes, measured; without one as many as there are cores, and never more than `at_most`."""
        gpu, cores = read_gpu(), count_cores()
        return cls.of_gpu(gpu, cores, memory) if gpu is not None else cls.fixed(min(cores, at_most or cores))

    def has_room(self, running: Sequence[tuple[int, float | None]]) -> bool:
        """Whether one more run may start beside those that run, given as (step, seconds a step)."""
        if not self.settled and len(running) == self.target:
            self._measure(running)
        return len(running) < self.target

    def _measure(self, running: Sequence[tuple[int, float | None]]) -> None:
        """Grow or settle, once every run has a pace."""
        paces = [seconds for step, seconds in running if step >= STEPS_TO_MEASURE and seconds]
        if len(paces) < len(running):
            return
        self.rates[self.target] = sum(1 / seconds for seconds in paces)
        half = self.rates.get(self.target // 2)
        if half is not None and self.rates[self.target] < GAIN * half:
            self.target //= 2  # the surplus runs end by themselves and are not replaced
            self._settle()
        elif self.target == self.most or (further := self._fitting(min(self.target, self.most - self.target))) == 0:
            self._settle()
        else:
            self.settled = further < self.target  # a number that is no doubling is the last one
            self.target += further
            if self.settled:
                self._settle()

    def _fitting(self, wanted: int) -> int:
        """How many further runs memory has room for, at most `wanted`."""
        now = read_gpu()
        if self.gpu is None or now is None:
            return wanted
        largest = max(1.0, (now.used - self.gpu.used) / self.target)
        return min(wanted, int((now.total - now.used) / (SPARE * largest)))

    def _settle(self) -> None:
        self.settled, self.most = True, self.target
        if self.memory is not None and self.gpu is not None:
            found = {"device": self.gpu.name, "cores": count_cores(), "jobs": self.target, "steps_per_second": self.rates}
            write_whole(self.memory, json.dumps(found, indent=2) + "\n")
