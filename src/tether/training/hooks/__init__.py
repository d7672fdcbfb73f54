"""Hooks: what happens after a step beside training. One small protocol; the loop calls them in order.

| hook | does |
|---|---|
| `alarms.AlarmActions` | acts on the alarms of a step: filter, checkpoint, rollback, stop. It belongs to the step itself and runs before the others |
| `periodic.Checkpoints` | writes a checkpoint when one is due |
| `periodic.Evaluations` | plays the validation prompts when an evaluation is due |
| `periodic.BestCheckpoint` | keeps the checkpoint that validated best |
| `early_stop.EarlyStop` | ends a run in which further training is a waste |
| `periodic.Trackers` | writes the costs of the step and notifies the callbacks |

A hook gets the trainer and the record of the complete step, and returns the record, amended where it added something.
"""

from typing import TYPE_CHECKING

from tether.runs.schema import StepRecord

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class Hook:
    """Runs after every complete step. Both methods do nothing by default."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        """The step is complete and on disk; returns its record, which a hook may amend with `run.amend`."""
        return record

    def stop_reason(self, run: "Trainer") -> str | None:
        """Why the run should end now, or None."""
        return None


__all__ = ["Hook"]
