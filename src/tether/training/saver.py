"""The checkpoints of a run, written while it trains on.

`save` copies model and state to host memory (snapshot.py) and returns; a thread then writes the copy exactly as it would be written in the
foreground (checkpoint.py). `keep_best` does so with the weights alone, or links those of a checkpoint of the same step. One is in flight at
most. It counts, for a resumed run and for every other reader, from the moment its folder is in its place; whoever looks for checkpoints in
the run's own process calls `finish` first. Where the copy finds no room in host memory, the checkpoint is written in the foreground, and a
note says so. Of several ranks the first writes; the others only remember which step was saved.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

from tether.core.errors import OutOfMemory
from tether.models.hardware import memory_boundary
from tether.runs.checkpoints import checkpoint_name
from tether.runs.store import RunStore
from tether.training.agent import Agent
from tether.training.callbacks import Callback
from tether.training.checkpoint import TokenizerFiles, keep_best, save_best, save_checkpoint, unfinished_bytes
from tether.training.learner import Learner
from tether.training.resolve import without_secrets
from tether.training.settings import RunSettings
from tether.training.snapshot import HostMemory, Snapshot, storage_bytes
from tether.training.throughput import StepTimer

GB = 1e9
QUIET_SECONDS = 0.5
"""A wait that is over by then is not worth a line."""
SHOWN_EVERY = 0.2
HEARTBEAT = 60.0
"""Seconds after which rank 0 tells the others that it is still writing."""


class CheckpointSaver:
    """Writes the checkpoints of one run, in its folder for them."""

    def __init__(
        self,
        store: RunStore,
        learner: Learner,
        timer: StepTimer,
        callbacks: Callback,
        settings: RunSettings,
        *,
        background: bool,
        moments: str,
    ) -> None:
        """`background` False: the memory plan has no room for copies. `moments`: what they are saved in."""
        self._store, self._learner, self._timer, self._callbacks = store, learner, timer, callbacks
        self._keep, self._background, self._moments = settings.checkpoint.keep, background, moments
        self._agent = Agent.of_config(without_secrets(settings).model_dump(mode="json"))
        self._folder, self._writes, self._policy, self._ranks = store.checkpoints, store.writes, learner.policy, learner.ranks
        self._memory = HostMemory(reuse=self._policy.device.type != "cpu")
        self._writer = BackgroundWriter()
        self._tokenizer: Any = None
        self._in_flight = self._size = 0
        self._seconds = 0.0
        self.saved_step: int | None = None
        """The step that was saved last, in its place or on its way there."""

    def prepare(self, sizes: Iterable[int]) -> None:
        """Take memory for copies of storages of these sizes, in the background, where a run keeps it: see snapshot.py."""
        sizes = list(sizes)
        if self._writes and self._background and self._policy.device.type != "cpu" and self._memory.fits(sum(sizes)):
            self._writer.submit(lambda: self._memory.prepare(sizes))

    def save(self, step: int, state: dict[str, Any], *, last: bool) -> None:
        """Take the copy that the checkpoint of the last complete step is written from: weights, the learner's state, and `state`. `last`: the run ends
        with it."""
        self.finish()  # one at a time; outside the shield, which is for what must not be interrupted
        with self._timer.stage("checkpoint"), self._ranks.interrupts.shield():
            self._store.sync()  # after a power cut no checkpoint may be newer than the records of its steps
            model = self._learner.whole_model()
            state = {"learner": self._learner.state(), **state}
            self.saved_step = step
            self._put(step, model, state, lambda taken: self._write(step, taken, last=last))

    def keep_best(self, step: int, success: float) -> None:
        """Keep the weights of the last complete step as the best. All ranks call it."""
        if self.has(step):  # once that checkpoint is in its place
            if self._writes:
                self._writer.submit(lambda: keep_best(self._folder, step, success))
            return
        self.finish()
        with self._timer.stage("checkpoint"), self._ranks.interrupts.shield():
            self._store.sync()
            self._put(step, self._learner.whole_model(), {}, lambda taken: self._write_best(step, success, taken))

    def _put(self, step: int, model: PreTrainedModel | None, state: dict[str, Any], write: Callable[[Snapshot], None]) -> None:
        """Write a copy in the background, or the originals at once where there is no room for a copy."""
        if not self._writes:
            return
        assert model is not None  # the rank that writes has it
        self._in_flight, self._size = step, storage_bytes(model, state)
        if self._tokenizer is None:
            assert self._policy.tokenizer is not None  # loaded with the model
            self._tokenizer = TokenizerFiles(self._policy.tokenizer, self._folder)
        taken = self._snapshot(model, state)
        if taken is None:
            write(Snapshot(model, state))
        else:
            self._writer.submit(lambda: write(taken))

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is in its place or on its way there. All ranks ask."""
        return self._ranks.broadcast_object(lambda: self.saved_step == step or (self._folder / checkpoint_name(step)).exists())

    def check(self) -> None:
        """Raise, on all ranks, what writing failed with since this was asked last: a checkpoint that could not be written ends the run."""
        self._ranks.barrier(self._writer.check)

    def finish(self) -> None:
        """Wait until every checkpoint is in its place; raises what writing one failed with. All ranks wait."""
        with self._timer.stage("checkpoint"):
            patience = HEARTBEAT if self._ranks.size > 1 else math.inf
            while not self._ranks.broadcast_object(lambda: self.wait(patience)):  # other ranks take a long silence for a failure
                pass

    def wait(self, timeout: float = math.inf) -> bool:
        """Wait until everything is in its place, or for so many seconds, with a line and a bar where that takes a while.

        Returns whether everything is in its place; raises what writing failed with.
        """
        if self._writer.wait(QUIET_SECONDS):
            return True
        end = time.monotonic() + timeout
        self._callbacks.on_note(
            f"waiting for the checkpoint of step {self._in_flight} (from a copy of {self._size / GB:.1f} GB) to be written"
        )
        self._callbacks.on_stage_begin("checkpoint", 100)
        shown = 0
        while not (done := self._writer.wait(SHOWN_EVERY)) and time.monotonic() < end:
            percent = min(99, int(100 * unfinished_bytes(self._folder) / max(1, self._size)))
            for _ in range(shown, percent):
                self._callbacks.on_stage_progress()
            shown = max(shown, percent)
        return done

    def take_seconds(self) -> float:
        """How long the checkpoints took to write that were completed since this was asked last."""
        taken, self._seconds = self._seconds, 0.0
        return taken

    def _snapshot(self, model: PreTrainedModel, state: dict[str, Any]) -> Snapshot | None:
        """The copy; None where there is no room for it."""
        if self._background and not self._memory.fits(self._size):
            self._background = False
            self._callbacks.on_note(
                f"checkpoints are written in the foreground: a copy of {self._size / GB:.1f} GB would not fit into the host memory that is free"
            )
        if not self._background:
            return None
        try:
            with memory_boundary("checkpoint", "it is written in the foreground"):
                return self._memory.snapshot(model, state)
        except OutOfMemory as error:
            self._memory.release()
            self._callbacks.on_note(str(error))
            return None

    def _write(self, step: int, taken: Snapshot, *, last: bool) -> None:
        how = self._keep, self._agent, self._moments
        with self._writing():
            save_checkpoint(self._folder, step, taken.model, self._tokenizer, taken.state, *how, last=last)

    def _write_best(self, step: int, success: float, taken: Snapshot) -> None:
        with self._writing():
            save_best(self._folder, step, success, taken.model, self._tokenizer, self._agent)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """A block that writes from a copy, which is let go afterwards."""
        start = time.perf_counter()
        try:
            self._store.lock()  # the folder must still be the run's own
            yield
        finally:
            self._memory.release()
        self._seconds += time.perf_counter() - start


class BackgroundWriter:
    """A queue of jobs and the thread that does them.

    A job that fails is never passed over: those behind it are not done, and its error is raised in the run's own thread, by `check` at the
    border of a step or by `wait`.
    """

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: deque[Future[None]] = deque()
        self._failed = threading.Event()

    def submit(self, job: Callable[[], object]) -> None:
        """Do a job once those before it are done, unless one of them failed."""

        def do() -> None:
            if self._failed.is_set():
                return
            try:
                job()
            except BaseException:
                self._failed.set()
                raise

        self._jobs.append(self._thread.submit(do))

    def check(self) -> None:
        """Raise what a job failed with."""
        while self._jobs and self._jobs[0].done():
            failure = self._jobs.popleft().exception()
            if failure is not None:
                wait_for(self._jobs)  # those behind it end at once, having done nothing
                self._jobs.clear()
                self._failed.clear()
                raise failure

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every job is done, or for so many seconds; returns whether they are, and raises what one failed with."""
        wait_for(self._jobs, timeout)
        self.check()
        return not self._jobs
