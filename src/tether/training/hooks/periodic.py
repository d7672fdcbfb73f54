"""What happens at its own cadence: checkpoints, evaluations on the fixed validation prompts, the best checkpoint, and tracking."""

import dataclasses
from typing import TYPE_CHECKING

from tether.core.metrics import StepMetrics
from tether.rollout.sampler import check_resets, error_note
from tether.runs.schema import StepRecord
from tether.training.build import env_specs
from tether.training.evaluate import evaluate
from tether.training.hooks import Hook

if TYPE_CHECKING:
    from tether.training.loop import Trainer


class Checkpoints(Hook):
    """Writes a checkpoint every `checkpoint.every` steps and at the last step, unless `checkpoint.last` is off."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        chosen = run.settings.checkpoint
        if record.step and (chosen.last if record.step == run.settings.steps else record.step % chosen.every == 0):
            run.callbacks.on_stage_begin("checkpoint", 1)
            run.save()
        return record


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
        run.stages.settle_engine(run.step)
        with run.timer.stage("validation"):
            result = evaluate(
                run.sampler,
                chosen.prompts,
                run.settings.evaluation_sampling(),
                samples=chosen.samples,
                specs=env_specs([chosen.env]) if chosen.env is not None else None,
            )
        check_resets(result.groups, f"the validation of step {record.step}")
        metrics = StepMetrics(record.metrics)
        metrics.put("validation", result.metrics)
        errors = [f"validation: {note}"] if (note := error_note(result.groups)) else []
        notes = [*record.notes, *run.sampler.take_notes(), *errors]
        run.append_trajectories(record.step, "validation", result.groups, set())
        return run.amend(dataclasses.replace(record, metrics=dict(metrics), notes=notes))


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
            if not run.is_saved(record.step):
                run.save()
            run.saver.keep_best(record.step, success)
        return record


class Trackers(Hook):
    """Writes the costs of the step and notifies the callbacks. It runs last: the timings then include checkpoint and evaluation."""

    def on_step(self, run: "Trainer", record: StepRecord) -> StepRecord:
        run.timer.count_background("checkpoint", run.saver.take_seconds())
        timings = run.timer.timings()
        run.store.append_timings(record.step, timings.to_json())
        run.callbacks.on_step_end(record, timings)
        return record
