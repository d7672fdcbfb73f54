"""Trackers: the costs of a step go to the run folder, and record and costs to the callbacks (terminal, a user's own tracker)."""

from typing import TYPE_CHECKING

from tether.runs.schema import StepRecord
from tether.training.hooks import Hook

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class Trackers(Hook):
    """Runs last: the timings of the step then include checkpoint and evaluation."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        timings = run.timer.timings()
        run.store.append_timings(record.step, timings.to_json())
        run.callbacks.on_step_end(record, timings)
        return record
