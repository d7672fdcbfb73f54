"""The stages of a step, each timed and reported: sample, diagnose, advantages, update, record. `loop.py` puts them in order."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.rules import loss_scale
from tether.algorithms.filters.scores import sample_variance
from tether.core.errors import BadInput, OutOfMemory, RankFailure, TetherError
from tether.core.metrics import StepMetrics
from tether.core.protocols import AsyncEngine, EngineStatistics
from tether.core.seeding import derive_seed, generator
from tether.core.types import Group
from tether.diagnostics.alarms.repetition import rollout_repetition
from tether.diagnostics.gradients import NO_MEMORY, decompose_gradients, gradient_metrics
from tether.diagnostics.monitor import Health, step_work
from tether.diagnostics.pairs import ProbeRows, probe_rows, rollout_rows
from tether.diagnostics.summary import group_summary, rollout_summary
from tether.models.memory import memory_boundary
from tether.rollout.pack import pack
from tether.rollout.sampler import check_resets, error_note, training_plan
from tether.runs.causes import CauseKind, find_causes
from tether.runs.schema import StepRecord
from tether.training.async_rollouts import AsyncRollouts, FilterInputs
from tether.training.batch import SampledBatch, reweight_batch, sample_batch
from tether.training.build import Parts
from tether.training.callbacks import Callback
from tether.training.evaluate import play_validation
from tether.training.learner import Rates
from tether.training.optim import learning_rate
from tether.training.replies import replies_note
from tether.training.settings import RunSettings
from tether.training.throughput import StepTimer, release_unused_memory

GRADIENT_GROUPS = 1_000_000
"""Index of the first group that is played for the gradient decomposition alone; no round of refill gets there."""


class Stages:
    """What a step does, stage by stage, on the parts of a run."""

    def __init__(self, settings: RunSettings, parts: Parts, callbacks: Callback, timer: StepTimer) -> None:
        self._settings, self._parts, self._callbacks, self._timer = settings, parts, callbacks, timer
        self._mixed = len(settings.environments()) > 1
        self._mismatch: float | None = None
        """Of the step before."""
        self.ahead: AsyncRollouts | None = None
        """Samples the batches of later steps while a step trains, with `rollout.max_staleness`."""
        engine, staleness = parts.sampler.engine, settings.rollout.max_staleness
        if staleness:
            assert isinstance(engine, AsyncEngine)  # the settings allow no other
            self.ahead = AsyncRollouts(engine, staleness, settings.steps, self._sample_ahead)
        self._published: dict[str, float] = {}
        """Of an asynchronous run: what the publish of the weights that sampled the step's batch measured."""

    @contextmanager
    def timed(self, stage: str, total: int = 1) -> Iterator[None]:
        """Report a stage and count its time and memory."""
        self._callbacks.on_stage_begin(stage, total)
        with self._timer.stage(stage):
            yield

    def sample(self, step: int, keep: float, earlier: Sequence[StepRecord]) -> SampledBatch:
        """Play new prompts until the filter has its batch.

        Args:
            step: its number.
            keep: the filter's share, which alarm actions may have changed.
            earlier: the records that count; strategy `auto` looks at the recent ones.
        """
        self._mismatch = earlier[-1].metrics.get("update/mismatch") if earlier else None
        if self.ahead is not None:
            sampled = self._take_ahead(self.ahead, step)
            check_resets(sampled.groups, f"step {step}")
            return sampled
        inputs = self._filter_inputs(keep, earlier)
        rules, num_groups = inputs.rules(self._settings.filter), self._settings.rollout.num_groups
        with self._timer.stage("select"):  # less the rollouts in it
            sampled = sample_batch(lambda count, first: self._play(step, count, first), num_groups, rules, inputs.ratios)
        check_resets(sampled.groups, f"step {step}")
        self._timer.count_rollout(sampled.groups)
        return sampled

    def _filter_inputs(self, keep: float, earlier: Sequence[StepRecord]) -> FilterInputs:
        ratios = [record.metrics["groups/rv_ratio"] for record in earlier if "groups/rv_ratio" in record.metrics]
        return FilterInputs(keep, tuple(ratios[len(ratios) - min(self._settings.filter.auto_steps - 1, len(ratios)) :]))

    def prefetch(self, step: int, keep: float, earlier: Sequence[StepRecord]) -> None:
        """With asynchronous rollouts: let the batch be sampled that the weights of a complete step are for."""
        if self.ahead is not None:
            for number in self.ahead.prefetch(step, self._filter_inputs(keep, earlier)):
                self._callbacks.on_note(
                    f"the batch of step {number} that was sampled ahead is not there; it is sampled with the weights of step {step}"
                )

    def settle_engine(self, version: int) -> None:
        """Before the engine is used for anything but the batches of steps: it must be free, and hold the weights after this step."""
        if self.ahead is not None:
            with self._timer.stage("wait"):
                self.ahead.settle(version)

    def replace_weights(self, step: int) -> None:
        """Other weights took the place of those of a complete step: what was sampled ahead with the weights before does not count."""
        if self.ahead is None:
            self._parts.sampler.engine.sync(step)
        else:
            self.ahead.discard()

    def _sample_ahead(self, step: int, inputs: FilterInputs, statistics: list[EngineStatistics]) -> SampledBatch:
        """The batch of a later step; runs in the thread of the asynchronous rollouts, so it measures and reports nothing by itself."""
        settings, sampler = self._settings, self._parts.sampler

        def play(count: int, first: int) -> list[Group]:
            plan = training_plan(settings.seed, step, count, settings.rollout.group_size, first, sampler.pool.weights)
            groups = sampler.collect(plan, settings.sampling(), quiet=True)
            statistics.append(sampler.statistics)
            return groups

        return sample_batch(play, settings.rollout.num_groups, inputs.rules(settings.filter), inputs.ratios)

    def _take_ahead(self, ahead: AsyncRollouts, step: int) -> SampledBatch:
        with self.timed("wait"):
            batch = ahead.take(step)
        self._timer.count_background("rollout", batch.seconds)
        for statistics in batch.statistics:
            self._timer.count_engine(statistics)
        self._timer.count_rollout(batch.sampled.groups)
        self._published = batch.published
        return batch.sampled

    def _play(self, step: int, num_groups: int, first: int) -> list[Group]:
        """New prompts of a step, from a place in its sequence of prompts on."""
        settings, sampler = self._settings, self._parts.sampler
        plan = training_plan(settings.seed, step, num_groups, settings.rollout.group_size, first, sampler.pool.weights)
        with self._timer.stage("rollout"):
            groups = sampler.collect(plan, settings.sampling())
        self._timer.count_engine(sampler.statistics)
        return groups

    def diagnose(self, step: int, sampled: SampledBatch) -> Health:
        """Information, alarms and gradients, always on the unfiltered groups and before the update: the model that scores the reasoning is
        the one that wrote it. A diagnosis that fails is on the record with its cause, and training continues."""
        settings, monitor = self._settings, self._parts.monitor
        rows: dict[str, Any] = rollout_rows(sampled.first_round)
        rollout = rollout_summary(sampled.groups, mixed=self._mixed)
        if not self._parts.sampler.engine.capabilities.shares_weights:
            rollout["staleness"] = _staleness(sampled.groups, step - 1)
            if self._mismatch is not None:
                rollout["mismatch_before"] = self._mismatch
        rollout |= rollout_repetition(sampled.groups, settings.alarms.rules.repeated_part)
        metrics = StepMetrics()
        metrics.put("rollout", rollout)
        metrics.put("groups", group_summary(sampled.groups, sampled.selection))
        work = step_work(sampled.groups, sampled.kept, settings.learner.epochs)
        probe = partial(self._sample_probe, step - 1) if settings.diagnosis.probe_prompts else None
        with self.timed("diagnosis") if monitor.is_due(step) else nullcontext():
            health = monitor.observe(step, **rows, metrics=metrics, work=work, probe=probe)
        health.metrics.setdefault("rollout", {}).update(rollout)
        chosen = settings.diagnosis.gradients
        if chosen.every and (step - 1) % chosen.every == 0:
            with self.timed("gradients"):
                try:
                    with self._bounded("gradients", NO_MEMORY):
                        if chosen.prompts:
                            self.settle_engine(step - 1)
                        groups = self._play(step, chosen.prompts, GRADIENT_GROUPS) if chosen.prompts else sampled.first_round
                        health.metrics["gradients"] = self._gradients(step, groups)
                except TetherError as error:
                    health.metrics["gradients"] = {"failed": 1}
                    health.notes.append(f"gradient decomposition failed: {error}")
        return health

    def _sample_probe(self, version: int, samples: int) -> ProbeRows:
        """The first turns of the fixed validation prompts, sampled as in training. The seeds are the same at every measurement, so that two
        measurements differ by the policy alone."""
        settings, sampler = self._settings, self._parts.sampler
        self.settle_engine(version)
        with self._timer.stage("probe"):
            groups = play_validation(
                sampler,
                settings.diagnosis.probe_prompts,
                settings.sampling(),
                samples=samples,
                stage="probe",
                first_turn_only=True,
            )
        self._callbacks.on_stage_begin("diagnosis", 1)  # what follows is scoring
        errors = [f"probe: {note}"] if (note := error_note(groups)) else []
        return dataclasses.replace(probe_rows(groups), notes=errors)

    def _gradients(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """The "gradients/" metrics of these groups, on the policy that sampled them; nothing is trained."""
        settings, chosen = self._settings, self._settings.diagnosis.gradients
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        batch = pack(trajectories, self._parts.policy.module.device)
        if not len(batch):
            num_episodes = sum(len(group.trajectories) + len(group.errored) for group in groups)
            raise BadInput(f"none of {num_episodes} episodes holds a response; look at their errors")
        batch, _ = self._parts.estimator.complete(batch)
        present = {int(group) for group in torch.unique(batch.groups_B)}
        found = decompose_gradients(
            self._parts.policy,
            batch,
            self._parts.algorithm,
            {group.index: sample_variance(np.array(group.rewards)) for group in groups if group.index in present},
            temperature=settings.rollout.temperature,
            micro_tokens=settings.learner.micro_tokens,
            max_tokens=settings.rollout.max_tokens,
            parameters=chosen.parameters,
            num_buckets=chosen.buckets,
            with_bound=chosen.bound,
            seed=derive_seed("gradients", settings.seed, step),
            ranks=self._parts.ranks,
        )
        return gradient_metrics(found)

    def advantages(self, sampled: SampledBatch) -> tuple[Batch, dict[str, float]]:
        """The kept groups as a batch with advantages. Baselines come from whole groups; reweighting afterwards does not change them."""
        batch = pack([t for group in sampled.kept for t in group.trajectories], self._parts.policy.module.device)
        if not len(batch):
            return batch, {}
        with self.timed("advantages"), self._bounded("advantages", self._micro_remedy()):
            batch, estimates = self._parts.estimator.complete(batch)
        return reweight_batch(batch, sampled, self._settings.filter), estimates

    def update(self, step: int, batch: Batch, sampled: SampledBatch) -> dict[str, float]:
        """Train on the batch and give the engine the new weights."""
        if not len(batch):
            return {"skipped": 1}
        settings, learner = self._settings, self._parts.learner
        orders = [
            torch.from_numpy(generator("order", settings.seed, step, epoch).permutation(batch.num_trajectories)).to(batch.ids_BT.device)
            for epoch in range(settings.learner.epochs)
        ]
        scale = loss_scale(settings.filter.loss_scale, sampled.fill_ratio)
        streak = learner.nonfinite_streak
        release_unused_memory(self._parts.policy.module.device)
        try:
            with self.timed("update"), self._bounded("update", self._micro_remedy()):
                update = learner.update(batch, orders, scale, self._rates(step))
                update |= self._publish(step)
        except Exception:
            if not learner.updates_applied:  # the weights are still those of the last step
                learner.nonfinite_streak = streak
            raise
        self._timer.count_update(settings.learner.epochs * int(batch.lengths_B.sum()), learner.work)
        return {**update, "skipped": 0}

    def _publish(self, step: int) -> dict[str, float]:
        """Give the engine the new weights; with asynchronous rollouts that happens when it has sampled with those before them."""
        if self.ahead is not None:
            return self._published
        engine = self._parts.sampler.engine
        with nullcontext() if engine.capabilities.shares_weights else self.timed("publish"):
            return engine.sync(step)

    def _rates(self, step: int) -> Rates:
        chosen, critic = self._settings.learner, self._settings.critic
        assert chosen.learning_rate is not None and critic.learning_rate is not None  # filled in when the settings were resolved
        warming_up = self._parts.algorithm.has_critic and step <= critic.warmup_steps
        policy, value = (
            learning_rate(base, step, self._settings.steps, chosen.schedule, chosen.warmup_steps, chosen.min_lr_ratio)
            for base in (chosen.learning_rate, critic.learning_rate)
        )
        return Rates(0.0 if warming_up else policy, value)

    def _bounded(self, stage: str, remedy: str) -> AbstractContextManager[None]:
        """A block that may run out of memory. One rank then ends with a checkpoint. Of several, one that fails outside the work that
        ranks report to each other fails alone, and no checkpoint can be made without it."""
        return memory_boundary(stage, remedy, OutOfMemory if self._parts.ranks.size == 1 else RankFailure)

    def _micro_remedy(self) -> str:
        return f"lower learner.micro_tokens (now {self._settings.learner.micro_tokens}; the update stays the same)"

    def record(
        self, step: int, sampled: SampledBatch, batch: Batch, update: Mapping[str, float], health: Health, keep: float
    ) -> StepRecord:
        """The record of a step: its numbers under their catalogued names, and in words what was out of the ordinary."""
        metrics = StepMetrics()
        metrics.put("groups", {**sampled.metrics(int(batch.loss_mask_BT.sum())), "keep": keep})
        metrics.put("update", update)
        for section, values in health.metrics.items():
            metrics.put(section, values)
        notes = [*self._parts.sampler.take_notes(), *health.notes, *_remarks(sampled, update), *self._replies(step, sampled)]
        if step == 1:  # what leaves nothing to learn is said before hours are spent; errors and replies have notes of their own already
            causes = [cause for cause in find_causes(metrics, notes) if cause.kind is not CauseKind.ERRORS]
            notes += [cause.sentence() for cause in causes if cause.sentence() not in notes]
        notes += [alarm.sentence() for alarm in health.new_alarms]
        regime = None if health.regime is None else str(health.regime)
        return StepRecord(step, dict(metrics), regime, notes, [alarm.to_json() for alarm in health.alarms])

    def _replies(self, step: int, sampled: SampledBatch) -> list[str]:
        """The line on the replies of the first step; of later ones where none was valid and the run may end for that."""
        settings = self._settings
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


def _staleness(groups: Sequence[Group], newest: int) -> float:
    """By how many updates the weights that sampled the tokens are behind those after step `newest`, on average."""
    versions = [version for group in groups for t in group.trajectories for turn in t.turns for version in turn.versions]
    return sum(newest - version for version in versions) / max(1, len(versions))


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
