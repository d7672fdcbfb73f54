"""The stages of a step as functions of the run: diagnose, advantages, check the sampler, update, record. `loop.py` puts them in order; batch.py samples."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.scores import sample_variance
from tether.algorithms.filters.select import loss_scale
from tether.algorithms.presets import Algorithm
from tether.core.errors import BadInput, EngineUnavailable, OutOfMemory, RankFailure, TetherError
from tether.core.metrics import StepMetrics
from tether.core.seeding import derive_seed, generator
from tether.core.types import Group
from tether.diagnostics.alarms.repetition import rollout_repetition
from tether.diagnostics.gradients import NO_MEMORY, decompose_gradients, gradient_metrics
from tether.diagnostics.monitor import Health, step_work
from tether.diagnostics.pairs import ProbeRows, differing_prompts_note, probe_rows, rollout_rows
from tether.diagnostics.summary import COUNTS, rollout_summary
from tether.models.hardware import memory_boundary
from tether.models.policy import Policy
from tether.rollout.engines.connection import default_tolerance
from tether.rollout.pack import pack
from tether.rollout.prompt_memory import PromptMemory
from tether.rollout.sampler import error_note, training_plan
from tether.runs.causes import CauseKind, find_causes
from tether.runs.schema import StepRecord
from tether.training.alarm_actions import AlarmActions
from tether.training.batch import SampledBatch, reweight_batch
from tether.training.estimate import AdvantageEstimator
from tether.training.evaluate import play_validation
from tether.training.hooks import Run, write_record, write_trajectories
from tether.training.learner import Rates
from tether.training.optim import learning_rate
from tether.training.replies import replies_note
from tether.training.sampler_check import CHECKED_EPISODES, FLOAT8_TOLERANCE, Comparison, compare, is_current
from tether.training.throughput import release_unused_memory

GRADIENT_GROUPS = 1_000_000
"""Index of the first group that is played for the gradient decomposition alone; no round of refill gets there."""


class TrainedRun(Run, Protocol):
    """What stages see of a run, beside what hooks see."""

    policy: Policy
    algorithm: Algorithm
    estimator: AdvantageEstimator
    alarm_actions: AlarmActions
    prompt_memory: PromptMemory | None
    monitor_state: dict[str, Any]
    """Of the last complete step: an interrupted step may already have observed."""
    notes: list[str]
    """For the record of the next step."""


@contextmanager
def timed(run: Run, stage: str) -> Iterator[None]:
    """Report a stage, and count its time and memory."""
    run.callbacks.on_stage_begin(stage, 1)
    with run.timer.stage(stage):
        yield


def diagnose(run: TrainedRun, step: int, sampled: SampledBatch) -> Health:
    """Information, alarms and gradients, always on the unfiltered groups and before the update: the model that scores the reasoning is
    the one that wrote it. A diagnosis that fails is on the record with its cause, and training continues."""
    settings, monitor = run.settings, run.monitor
    rows: dict[str, Any] = rollout_rows(sampled.first_round)
    unselected = sampled.unselected
    rollout = rollout_summary(unselected, mixed=len(settings.environments()) > 1)
    if settings.rollout.first_members:  # counts are of all that was played, shares and means of what no choice was made on
        rollout |= {name: value for name, value in rollout_summary(sampled.groups).items() if name in COUNTS}
    if not run.sampler.engine.capabilities.shares_weights:
        versions = [version for group in sampled.groups for t in group.trajectories for turn in t.turns for version in turn.versions]
        rollout["staleness"] = sum(step - 1 - version for version in versions) / max(1, len(versions))  # updates behind, on average
        earlier = run.alarm_actions.counting(run.records)
        if earlier and "update/mismatch" in earlier[-1].metrics:
            rollout["mismatch_before"] = earlier[-1].metrics["update/mismatch"]
    rollout |= rollout_repetition(unselected, settings.alarms.rules.repeated_part)
    metrics = StepMetrics()
    metrics.put("rollout", rollout)
    metrics.put("groups", sampled.summary)
    work = step_work(sampled.groups, sampled.kept, settings.learner.epochs)
    probe = partial(_sample_probe, run, step - 1) if settings.diagnosis.probe_prompts else None
    with timed(run, "diagnosis") if monitor.is_due(step) else nullcontext():
        health = monitor.observe(step, **rows, metrics=metrics, work=work, probe=probe)
    if monitor.is_due(step) and (note := differing_prompts_note(sampled.first_round)) is not None:
        health.notes.append(note)
    health.metrics.setdefault("rollout", {}).update(rollout)
    every = settings.diagnosis.gradients.every
    if every and (step - 1) % every == 0:
        with timed(run, "gradients"):
            try:
                with _memory_bounded(run, "gradients", NO_MEMORY):
                    health.metrics["gradients"] = _gradients(run, step, sampled.first_round)
            except TetherError as error:
                health.metrics["gradients"] = {"failed": 1}
                health.notes.append(f"gradient decomposition failed: {error}")
    return health


def _sample_probe(run: TrainedRun, version: int, samples: int) -> ProbeRows:
    """The first turns of the fixed validation prompts, sampled as in training. The seeds are the same at every measurement, so that two
    measurements differ by the policy alone."""
    settings = run.settings
    run.rollouts.settle(version)
    with run.timer.stage("probe"):
        groups = play_validation(
            run.sampler,
            settings.diagnosis.probe_prompts,
            settings.sampling(),
            samples=samples,
            stage="probe",
            first_turn_only=True,
        )
    run.callbacks.on_stage_begin("diagnosis", 1)  # what follows is scoring
    errors = [f"probe: {note}"] if (note := error_note(groups)) else []
    return dataclasses.replace(probe_rows(groups), notes=errors)


def _gradients(run: TrainedRun, step: int, groups: Sequence[Group]) -> dict[str, float]:
    """The "gradients/" metrics of these groups, or of prompts played for that, on the policy that sampled them; nothing is trained."""
    settings, chosen, sampler = run.settings, run.settings.diagnosis.gradients, run.sampler
    if chosen.prompts:
        run.rollouts.settle(step - 1)
        size = settings.rollout.group_size
        plan = training_plan(settings.seed, step, chosen.prompts, size, GRADIENT_GROUPS, sampler.pool.weights)
        with run.timer.stage("rollout"):
            groups = sampler.collect(plan, settings.sampling())
        run.timer.count_engine(sampler.statistics)
    batch = pack([trajectory for group in groups for trajectory in group.trajectories], run.policy.module.device)
    if not len(batch):
        num_episodes = sum(len(group.trajectories) + len(group.errored) for group in groups)
        raise BadInput(f"none of {num_episodes} episodes holds a response; look at their errors")
    batch, _ = run.estimator.complete(batch)
    present = {int(group) for group in torch.unique(batch.groups_B)}
    found = decompose_gradients(
        run.policy,
        batch,
        run.algorithm,
        {group.index: sample_variance(np.array(group.rewards)) for group in groups if group.index in present},
        temperature=settings.rollout.temperature,
        micro_tokens=settings.learner.micro_tokens,
        max_tokens=settings.rollout.max_tokens,
        parameters=chosen.parameters,
        num_buckets=chosen.buckets,
        with_bound=chosen.bound,
        seed=derive_seed("gradients", settings.seed, step),
        ranks=run.ranks,
    )
    return gradient_metrics(found)


def advantages(run: TrainedRun, sampled: SampledBatch) -> tuple[Batch, dict[str, float]]:
    """The kept groups as a batch with advantages. Baselines come from whole groups; reweighting afterwards does not change them."""
    batch = pack([t for group in sampled.kept for t in group.trajectories], run.policy.module.device)
    if not len(batch):
        return batch, {}
    with timed(run, "advantages"), _memory_bounded(run, "advantages"):
        batch, estimates = run.estimator.complete(batch)
    chosen = run.settings.rollout
    return reweight_batch(batch, sampled, run.settings.filter, 1 / chosen.explore if chosen.reweight_explored else 1.0), estimates


def check_sampler(run: TrainedRun, step: int, sampled: SampledBatch, batch: Batch) -> dict[str, float]:
    """Recompute what servers sampled with the present weights (sampler_check.py). What rounding does not explain ends the run."""
    settings = run.settings
    if not (current := _current(run, step, sampled)):
        return {}
    is_computed = batch.old_logprobs_BT is not None
    known = sampled.kept_ids if is_computed else set()
    others = [t for group in sampled.groups if group.index in current - known for t in group.trajectories if t.has_trained]
    drawn = generator("check", settings.seed, step).permutation(len(others))[:CHECKED_EPISODES]
    batches = [batch] if is_computed else []
    if len(drawn):
        with run.timer.stage("advantages"), _memory_bounded(run, "advantages"):
            checked = pack([others[index] for index in sorted(drawn)], run.policy.module.device)
            batches.append(dataclasses.replace(checked, old_logprobs_BT=run.estimator.policy_logprobs(checked)))
    found = compare(batches, current)
    if found is None:
        return {}
    _refuse_wrong(run, step, found)
    return found.metrics()


def _current(run: TrainedRun, step: int, sampled: SampledBatch) -> set[int]:
    """The groups that were sampled with a copy of the weights of the step before: as a server says, or in the native engine's own precision."""
    if run.sampler.engine.capabilities.shares_weights:
        return set()
    if run.settings.rollout.precision is not None:  # it samples in turn with the updates
        return {group.index for group in sampled.groups}
    return {group.index for group in sampled.groups if is_current(group, step - 1)}


def _refuse_wrong(run: TrainedRun, step: int, found: Comparison) -> None:
    settings = run.settings
    rounded = settings.rollout.precision
    tolerance = settings.server.tolerance or (default_tolerance(run.policy) if rounded is None else FLOAT8_TOLERANCE)
    if (complaint := found.complaint(tolerance)) is None:
        return
    if rounded is not None:
        raise EngineUnavailable(
            f"step {step}: rounding to {rounded} does not explain the log-probs of what was sampled: {complaint}; no weights that learned from them are kept. "
            "Leave rollout.precision out"
        )
    failure = EngineUnavailable(
        f"step {step}: tokens or log-probs from {settings.rollout.engine} are not those of the weights that it says it sampled with: {complaint}; "
        "no weights that learned from them are kept. Look for what changes answers on their way, serve in the learner's precision (model.dtype), "
        f"leave rollout.top_k, top_p and min_p at their defaults with vLLM, or raise server.tolerance (now {tolerance:g})"
    )
    failure.common = True  # every rank compared the same
    raise failure


def update(run: TrainedRun, step: int, batch: Batch, sampled: SampledBatch) -> dict[str, float]:
    """Train on the batch and give the engine the new weights."""
    if not len(batch):
        return {"skipped": 1}
    settings, learner = run.settings, run.learner
    orders = [
        torch.from_numpy(generator("order", settings.seed, step, epoch).permutation(batch.num_trajectories)).to(batch.ids_BT.device)
        for epoch in range(settings.learner.epochs)
    ]
    scale = loss_scale(settings.filter.loss_scale, sampled.fill_ratio)
    streak, current = learner.nonfinite_streak, _current(run, step, sampled)
    release_unused_memory(run.policy.module.device)
    try:
        with timed(run, "update"), _memory_bounded(run, "update"):
            metrics = learner.update(batch, orders, scale, _rates(run, step))
            if current.issuperset(sampled.kept_ids):
                compared = Comparison(int(metrics["mismatch_tokens"]), 0, metrics["mismatch"], 0.0, metrics["mismatch_max"])
                _refuse_wrong(run, step, compared)
            metrics |= run.rollouts.publish(step)
    except Exception:
        if not learner.updates_applied:  # the weights are still those of the last step
            learner.nonfinite_streak = streak
        raise
    run.timer.count_update(settings.learner.epochs * int(batch.lengths_B.sum()), learner.work)
    return {**metrics, "skipped": 0}


def _rates(run: TrainedRun, step: int) -> Rates:
    chosen, critic = run.settings.learner, run.settings.critic
    assert chosen.learning_rate is not None and critic.learning_rate is not None  # filled in when the settings were resolved
    warming_up = run.algorithm.has_critic and step <= critic.warmup_steps
    policy, value = (
        learning_rate(base, step, run.settings.steps, chosen.schedule, chosen.warmup_steps, chosen.min_lr_ratio)
        for base in (chosen.learning_rate, critic.learning_rate)
    )
    return Rates(0.0 if warming_up else policy, value)


def _memory_bounded(run: TrainedRun, stage: str, remedy: str | None = None) -> AbstractContextManager[None]:
    """A block that may run out of memory. One rank then ends with a checkpoint. Of several, one that fails outside the work that
    ranks report to each other fails alone, and no checkpoint can be made without it."""
    remedy = remedy or f"lower learner.micro_tokens (now {run.settings.learner.micro_tokens}; the update stays the same)"
    return memory_boundary(stage, remedy, OutOfMemory if run.ranks.size == 1 else RankFailure)


def record(run: TrainedRun, step: int, sampled: SampledBatch, batch: Batch, update: Mapping[str, float], health: Health) -> StepRecord:
    """Write down what the step did: trajectories, numbers under their catalogued names, and in words what was out of the ordinary."""
    metrics = StepMetrics()
    metrics.put("groups", {**sampled.metrics(int(batch.loss_mask_BT.sum())), "keep": sampled.keep})
    metrics.put("update", update)
    if run.prompt_memory is not None:
        metrics.put("prompts", run.prompt_memory.metrics(sampled.unselected))
    for section, values in health.metrics.items():
        metrics.put(section, values)
    notes, run.notes = run.notes, []
    notes += [
        *run.sampler.take_notes(),
        *run.learner.take_notes(),
        *health.notes,
        *_remarks(sampled, update),
        *_replies(run, step, sampled),
    ]
    if step == 1:  # what leaves nothing to learn is said before hours are spent; errors and replies have notes of their own already
        causes = [cause for cause in find_causes(metrics, notes) if cause.kind is not CauseKind.ERRORS]
        notes += [cause.sentence() for cause in causes if cause.sentence() not in notes]
    notes += [alarm.sentence() for alarm in health.new_alarms]
    regime = None if health.regime is None else str(health.regime)
    record = StepRecord(step, dict(metrics), regime, notes, [alarm.to_json() for alarm in health.alarms])
    with run.timer.stage("record"):
        write_trajectories(run, step, "train", sampled.groups, sampled.kept_ids)
        record = write_record(run, record)
    run.step, run.monitor_state = step, run.monitor.state()
    if run.prompt_memory is not None:
        run.prompt_memory.observe(step, sampled.groups)
    return record


def _replies(run: TrainedRun, step: int, sampled: SampledBatch) -> list[str]:
    """The line on the replies of the first step; of later ones where none was valid and the run may end for that."""
    settings = run.settings
    if step > 1 and not settings.early_stop.invalid_steps:
        return []
    note = replies_note(
        sampled.groups,
        first=step == 1,
        env=settings.env.name,
        model=settings.model.name,
        max_tokens=settings.rollout.max_tokens,
    )
    return [note] if note else []


def _remarks(sampled: SampledBatch, update: Mapping[str, float]) -> list[str]:
    remarks = [note] if (note := error_note(sampled.groups)) else []
    if update["skipped"] and sampled.kept:
        remarks.append("no kept episode holds a response: there is nothing to train on, the update was skipped")
    if not sampled.kept:
        flat = sampled.selection.zero_variance
        remarks.append(f"the filter kept none of {len(sampled.groups)} groups ({flat} without reward variance); the update was skipped")
    if update.get("nonfinite"):
        remarks.append(f"{update['nonfinite']:.0f} updates were skipped: their gradient was not finite")
    return remarks
