"""Hooks: what happens after a step beside training. The loop calls them in order, each with the run and the record of the complete step.

| hook | does |
|---|---|
| `alarm_actions.AlarmActions` | acts on the alarms of a step: filter, checkpoint, rollback, stop. It belongs to the step itself and runs before the others |
| `Checkpoints` | writes a checkpoint when one is due |
| `Evaluations` | plays the validation prompts when an evaluation is due |
| `BestCheckpoint` | keeps the weights that validated best |
| `Trackers` | writes the costs of the step and notifies the callbacks |
| `early_stop.EarlyStop` | ends a run in which further training is a waste |
"""

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Protocol

from tether.core.metrics import StepMetrics
from tether.core.types import Group
from tether.diagnostics.monitor import Monitor
from tether.rollout.sampler import Sampler, check_resets, error_note
from tether.runs.schema import StepRecord, images_of, trajectory_record
from tether.runs.store import RunStore
from tether.training.batch import Rollouts
from tether.training.build import env_specs
from tether.training.callbacks import Callback
from tether.training.distributed.ranks import Ranks
from tether.training.evaluate import evaluate
from tether.training.learner import Learner
from tether.training.replies import not_begun_note
from tether.training.saver import CheckpointSaver
from tether.training.settings import RunSettings
from tether.training.throughput import StepTimer


class Run(Protocol):
    """What hooks see of a run; `loop.Trainer` is one."""

    settings: RunSettings
    store: RunStore
    ranks: Ranks
    callbacks: Callback
    timer: StepTimer
    learner: Learner
    sampler: Sampler
    monitor: Monitor
    rollouts: Rollouts
    saver: CheckpointSaver
    step: int
    """The last complete step."""
    records: list[StepRecord]
    """Of all complete steps, in order."""

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint of the last complete step; it is in its place after `saver.finish`. `last`: training ends with it."""


def write_record(run: Run, record: StepRecord) -> StepRecord:
    """Write a record, or again with something added: readers take the last record of a step. Rank 0's is that of every rank."""
    record = run.ranks.broadcast_object(lambda: record)
    if run.records and run.records[-1].step == record.step:
        run.records.pop()
    run.records.append(record)
    run.store.append(record)
    return record


def write_trajectories(run: Run, step: int, split: str, groups: Sequence[Group], kept: set[Hashable]) -> None:
    """Write down every episode of these groups; `kept` are the groups that are trained on."""
    if run.store.writes:
        played = [(t, group) for group in groups for t in (*group.trajectories, *group.errored)]
        placeholder = run.learner.policy.placeholder_id
        records = [trajectory_record(t, step, split, g.index in kept and not t.error, placeholder, g.choice, g.decision) for t, g in played]
        run.store.append_trajectories(records, images=images_of(t for t, _ in played))


class Hook:
    """Runs after every complete step. Both methods do nothing by default."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        """The step is complete and on disk; returns its record, which a hook may amend with `write_record`."""
        return record

    def stop_reason(self, run: Run) -> str | None:
        """Why the run should end now, or None."""
        return None


class Checkpoints(Hook):
    """Writes a checkpoint every `checkpoint.every` steps and at the last step, unless `checkpoint.last` is off."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        chosen, last = run.settings.checkpoint, record.step == run.settings.steps
        if record.step and (chosen.last if last else record.step % chosen.every == 0):
            run.callbacks.on_stage_begin("checkpoint", 1)
            run.save(last=last)
        return record


class Evaluations(Hook):
    """Plays the validation prompts and amends the record with the result; readers take the last record of a step."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        return self.evaluate(run, record) if self.is_due(run, record.step) else record

    @staticmethod
    def is_due(run: Run, step: int) -> bool:
        every, prompts = run.settings.evaluation.every, run.settings.evaluation.prompts
        return prompts != 0 and (step in (0, run.settings.steps) or (every > 0 and step % every == 0))

    @staticmethod
    def evaluate(run: Run, record: StepRecord) -> StepRecord:
        """The record with the numbers of the validation prompts."""
        chosen = run.settings.evaluation
        run.rollouts.settle(run.step)
        with run.timer.stage("validation"):
            result = evaluate(
                run.sampler,
                chosen.prompts,
                run.settings.evaluation_sampling(),
                samples=chosen.samples,
                specs=env_specs([chosen.env], run.sampler.pool.specs[0].player) if chosen.env is not None else None,
            )
        check_resets(result.groups, f"the validation of step {record.step}")
        metrics = StepMetrics(record.metrics)
        metrics.put("validation", result.metrics)
        found = (error_note(result.groups), not_begun_note(result.groups, run.settings.rollout.max_tokens))
        errors = [f"validation: {note}" for note in found if note]
        notes = [*record.notes, *run.sampler.take_notes(), *errors]
        write_trajectories(run, record.step, "validation", result.groups, set())
        return write_record(run, dataclasses.replace(record, metrics=dict(metrics), notes=notes))


class BestCheckpoint(Hook):
    """Keeps the weights of an evaluated step if none before was better. The untrained policy does not count."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        success = record.metrics.get("validation/success")
        if success is None or not record.step or not run.settings.checkpoint.best:
            return record
        earlier = [
            other.metrics["validation/success"]
            for other in run.records
            if 0 < other.step < record.step and "validation/success" in other.metrics
        ]
        if success > max(earlier, default=-1.0):
            run.saver.keep_best(record.step, success)
        return record


class Trackers(Hook):
    """Writes the costs of the step and notifies the callbacks. It runs last: the timings then include checkpoint and evaluation."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        run.timer.count_background("checkpoint", run.saver.take_seconds())
        timings = run.timer.timings()
        run.store.append_timings(record.step, timings.to_json())
        run.callbacks.on_step_end(record, timings)
        return record
