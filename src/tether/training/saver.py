"""The checkpoints of a run, written while it trains on.

`save` copies model and state to host memory (snapshot.py) and returns; a thread (writer.py) then writes the copy exactly as it would be
written in the foreground (checkpoint.py). One checkpoint is in flight at most. It counts, for a resumed run and for every other reader, from
the moment its folder is in its place; whoever looks for checkpoints in the run's own process calls `wait` first. Where the copy finds no room
in host memory, the checkpoint is written in the foreground, and a note says so. Of several ranks the first writes; the others only remember
which step was saved.
"""

import copy
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tether.core.errors import OutOfMemory, TetherError
from tether.models.memory import memory_boundary
from tether.models.policy import Policy
from tether.runs.checkpoints import checkpoint_name
from tether.training.callbacks import Callback
from tether.training.checkpoint import keep_best, save_checkpoint, unfinished_bytes
from tether.training.snapshot import HostMemory, Snapshot, storage_bytes
from tether.training.writer import BackgroundWriter

GB = 1e9
QUIET_SECONDS = 0.5
"""A wait that is over by then is not worth a line."""
SHOWN_EVERY = 0.2


class CheckpointSaver:
    """Writes the checkpoints of one run, in its folder for them."""

    def __init__(self, folder: Path, policy: Policy, keep: int, callbacks: Callback, *, background: bool, writes: bool = True) -> None:
        """`background` False: the memory plan has no room for copies. `writes` False: another rank writes."""
        self._folder, self._policy, self._keep, self._callbacks = folder, policy, keep, callbacks
        self._background, self._writes = background, writes
        self._memory = HostMemory(reuse=policy.device.type != "cpu")
        self._writer = BackgroundWriter()
        self._tokenizer: Any = None
        self._size = 0
        self._seconds = 0.0
        self.saved_step: int | None = None
        """The step that was saved last, in its place or on its way there."""

    def prepare(self, sizes: Iterable[int]) -> None:
        """Take memory for copies of storages of these sizes, in the background, where a run keeps it: see snapshot.py."""
        sizes = list(sizes)
        if self._writes and self._background and self._policy.device.type != "cpu" and self._memory.fits(sum(sizes)):
            self._writer.submit(lambda: self._memory.prepare(sizes))

    def save(self, step: int, model: PreTrainedModel | None, state: dict[str, Any]) -> None:
        """Take the copy that the checkpoint of a step is written from; the model holds its float32 weights meanwhile. None: another rank has it."""
        assert not self._writer.busy  # one at a time: the run has waited
        self.saved_step = step
        if not self._writes:
            return
        tokenizer = self._policy.tokenizer
        assert tokenizer is not None and model is not None  # loaded with the model; the rank that writes has it
        self._size = storage_bytes(model, state)
        taken = self._snapshot(model, state)
        if taken is None:
            start = time.perf_counter()
            save_checkpoint(self._folder, step, model, tokenizer, state, self._keep)
            self._seconds += time.perf_counter() - start
        else:
            if self._tokenizer is None:  # a copy: the run goes on using its own, which two threads must not share
                self._tokenizer = copy.deepcopy(tokenizer)
            self._writer.submit(lambda: self._write(step, taken))

    def keep_best(self, step: int, success: float) -> None:
        """Keep the checkpoint of a step as the best, once it is in its place."""
        if self._writes:
            self._writer.submit(lambda: keep_best(self._folder, step, success))

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is in its place or on its way there."""
        return self.saved_step == step or (self._folder / checkpoint_name(step)).exists()

    def check(self) -> None:
        """Raise what writing failed with since this was asked last."""
        self._writer.check()

    def wait(self, timeout: float = math.inf) -> bool:
        """Wait until everything is in its place, or for so many seconds, with a line and a bar where that takes a while.

        Returns whether everything is in its place; raises what writing failed with.
        """
        if self._writer.wait(QUIET_SECONDS):
            return True
        end = time.monotonic() + timeout
        self._callbacks.on_note(f"waiting for the checkpoint of step {self.saved_step} ({self._size / GB:.1f} GB) to be written")
        self._callbacks.on_stage_begin("checkpoint", 100)
        shown = 0
        while not (done := self._writer.wait(SHOWN_EVERY)) and time.monotonic() < end:
            percent = min(99, int(100 * unfinished_bytes(self._folder) / max(1, self._size)))
            for _ in range(shown, percent):
                self._callbacks.on_stage_progress()
            shown = max(shown, percent)
        return done

    def close(self) -> None:
        """Let what is in flight arrive while another error ends the run; a failure of its own is a note."""
        try:
            self.wait()
        except TetherError as error:
            self._callbacks.on_note(str(error))

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

    def _write(self, step: int, taken: Snapshot) -> None:
        start = time.perf_counter()
        try:
            save_checkpoint(self._folder, step, taken.model, self._tokenizer, taken.state, self._keep)
        finally:
            self._memory.release()
        self._seconds += time.perf_counter() - start
