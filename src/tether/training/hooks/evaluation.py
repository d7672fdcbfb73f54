"""Evaluation on the fixed validation prompts, at its cadence, at the start and at the end."""

import dataclasses
from typing import TYPE_CHECKING

from tether.core.metrics import StepMetrics
from tether.rollout.sampler import error_note
from tether.runs.schema import StepRecord
from tether.training.evaluate import evaluate
from tether.training.hooks import Hook

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class Evaluations(Hook):
    """Plays the validation prompts and amends the record with the result; readers take the last record of a step."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        return self.evaluate(run, record) if self.is_due(run, record.step) else record

    @staticmethod
    def is_due(run: "Trainer", step: int) -> bool:
        every = run.settings.evaluation.every
        return step in (0, run.settings.steps) or (every > 0 and step % every == 0)

    @staticmethod
    def evaluate(run: "Trainer", record: StepRecord) -> StepRecord:
        """The record with the numbers of the validation prompts."""
        chosen = run.settings.evaluation
        with run.timer.stage("validation"):
            result = evaluate(run.sampler, chosen.prompts, run.settings.evaluation_sampling(), samples=chosen.samples)
        metrics = StepMetrics(record.metrics)
        metrics.put("validation", result.metrics)
        errors = [f"validation: {note}"] if (note := error_note(result.groups)) else []
        notes = [*record.notes, *run.sampler.take_notes(), *errors]
        run.append_trajectories(record.step, "validation", result.groups, set())
        return run.amend(dataclasses.replace(record, metrics=dict(metrics), notes=notes))
