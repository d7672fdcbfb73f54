"""Callbacks: what a trainer reports while it runs. The command line shows it live; library callers pass their own to `tether.train`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from tether.core.config import Settings, flattened
from tether.core.protocols import EngineStatistics
from tether.runs.checkpoints import newest_checkpoint, step_of
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.runs.trackers import TrackedRun, Tracker, open_tracker, run_id


class Callback:
    """A view of a run. Every method does nothing by default; override those you need."""

    def on_stage_begin(self, name: str, total: int) -> None:
        """A stage of the step begins, with `total` units of work."""

    def on_stage_progress(self) -> None:
        """One unit of the stage is done."""

    def on_sampling_ready(self, statistics: Callable[[], EngineStatistics]) -> None:
        """What samples is built; `statistics` says at any time what its present or latest round has done so far, tokens as they come."""

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        """A step is complete and on disk; `timings` are its costs."""

    def on_note(self, text: str) -> None:
        """Something worth knowing before the first step."""

    def on_trained(self) -> None:
        """All steps are on record, and nothing is trained any more; the last checkpoint may still be on its way to the disk."""

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

    def on_sampling_ready(self, statistics: Callable[[], EngineStatistics]) -> None:
        for callback in self._callbacks:
            callback.on_sampling_ready(statistics)

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        for callback in self._callbacks:
            callback.on_step_end(record, timings)

    def on_note(self, text: str) -> None:
        for callback in self._callbacks:
            callback.on_note(text)

    def on_trained(self) -> None:
        for callback in self._callbacks:
            callback.on_trained()

    @contextmanager
    def running(self) -> Iterator[None]:
        with ExitStack() as stack:
            for callback in self._callbacks:
                stack.enter_context(callback.running())
            yield


class Tracking(Callback):
    """A run's trackers: each gets the metrics of every step as they are in metrics.jsonl, and the times of a step as seconds/STAGE.

    A tracker that fails is left out and said, and never ends the run.
    """

    def __init__(self, names: Sequence[str], settings: Settings, store: RunStore, others: Sequence[Callback]) -> None:
        """`others` get to know what is worth knowing."""
        self._names, self._settings, self._store = names, settings, store
        self._tell = CallbackList(others)
        self._trackers: dict[str, Tracker] = {}
        self._sent: tuple[int, dict[str, float]] = (-1, {})

    @contextmanager
    def running(self) -> Iterator[None]:
        checkpoint = newest_checkpoint(self._store.checkpoints)
        run = TrackedRun(
            folder=self._store.folder,
            config=flattened(self._settings.model_dump(mode="json")),
            first_step=step_of(checkpoint) + 1 if checkpoint else 0,
            id=run_id(self._store.folder),
            say=self._tell.on_note,
        )
        try:
            for name in self._names:
                self._trackers[name] = open_tracker(name, run)
            yield
        finally:
            for name in list(self._trackers):
                self._try(name, lambda tracker: tracker.close())
            self._trackers.clear()

    def on_step_end(self, record: StepRecord, timings: StepTimings) -> None:
        """A step that is reported again, because its record was amended, brings only what has changed."""
        numbers = record.metrics | {f"seconds/{stage}": seconds for stage, seconds in timings.seconds.items()}
        if timings.tokens_per_second is not None:
            numbers["rollout/tokens_per_second"] = timings.tokens_per_second
        step, before = self._sent
        changed = {name: value for name, value in numbers.items() if step != record.step or before.get(name) != value}
        self._sent = record.step, numbers
        for name in list(self._trackers):
            self._try(name, lambda tracker: tracker.log(record.step, changed))

    def _try(self, name: str, send: Callable[[Tracker], None]) -> None:
        tracker = self._trackers[name]
        try:
            send(tracker)
        except tracker.errors as error:
            del self._trackers[name]
            reason = " ".join(str(error).split()) or type(error).__name__
            self._tell.on_note(f"tracker {name} failed and gets nothing more ({reason}); metrics.jsonl holds every number")
