"""Callbacks: what a trainer reports while it runs. The command line shows it live; library callers pass their own to `tether.train`."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from tether.runs.schema import StepRecord
from tether.runs.timings import StepTimings


class Callback:
    """A view of a run. Every method does nothing by default; override those you need."""

    def on_stage_begin(self, name: str, total: int) -> None:
        """A stage of the step begins, with `total` units of work."""

    def on_stage_progress(self) -> None:
        """One unit of the stage is done."""

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        """A step is complete and on disk; `timings` are its costs."""

    def on_note(self, text: str) -> None:
        """Something worth knowing before the first step."""

    def running(self) -> AbstractContextManager[None]:
        """Entered while the run trains."""
        return nullcontext()


class CallbackList(Callback):
    """Passes every call on to several callbacks, in order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)

    def on_stage_begin(self, name: str, total: int) -> None:
        for callback in self._callbacks:
            callback.on_stage_begin(name, total)

    def on_stage_progress(self) -> None:
        for callback in self._callbacks:
            callback.on_stage_progress()

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        for callback in self._callbacks:
            callback.on_step_end(record, timings)

    def on_note(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_note(text)

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.running())
            yield
