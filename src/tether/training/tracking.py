"""A run's trackers as a callback: the numbers of every step go to all of them, and one that fails is left out and said, and never ends the run."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tether.core.config import Settings, flattened
from tether.runs.checkpoints import newest_checkpoint, step_of
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StepTimings
from tether.runs.trackers import TrackedRun, Tracker, open_tracker, run_id
from tether.training.callbacks import Callback, CallbackList


class Tracking(Callback):
    """Sends metrics as they are in metrics.jsonl, and the times of a step as seconds/STAGE."""

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
