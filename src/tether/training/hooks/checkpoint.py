"""Checkpoints at their cadence, and the best one by validation beside them."""

from typing import TYPE_CHECKING

from tether.runs.checkpoints import checkpoint_name
from tether.runs.schema import StepRecord
from tether.training.checkpoint import keep_best
from tether.training.hooks import Hook

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class Checkpoints(Hook):
    """Writes a checkpoint every `checkpoint.every` steps and at the last step."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        settings = run.settings
        if record.step and (record.step == settings.steps or record.step % settings.checkpoint.every == 0):
            with run.stages.timed("checkpoint"):
                run.save()
        return record


class BestCheckpoint(Hook):
    """Keeps the checkpoint of an evaluated step if none before was better. The untrained policy does not count."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        success = record.metrics.get("validation/success")
        if success is None or not record.step or not run.settings.checkpoint.best:
            return record
        earlier = [
            other.metrics["validation/success"]
            for other in run.records
            if 0 < other.step < record.step and "validation/success" in other.metrics
        ]
        if success > max(earlier, default=-1.0):
            if not (run.store.checkpoints / checkpoint_name(record.step)).exists():
                run.save()
            keep_best(run.store.checkpoints, record.step, success)
        return record
