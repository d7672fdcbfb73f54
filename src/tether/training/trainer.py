"""The trainer: one step reads like the data flow.

    seeds -> collect -> select -> advantages -> pack -> update          and, beside it, groups -> monitor -> store

Step 0 is the untrained policy, evaluated; steps 1..N train. Everything about a step is on disk before the next begins, so a run can be
stopped at any time and continued from its last checkpoint with the same result.
"""

import dataclasses
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tether.algorithms.advantages import trajectory_advantages
from tether.algorithms.batch import Batch
from tether.algorithms.filters.auto import AUTO, auto_strategy
from tether.algorithms.filters.select import Selection, select_groups
from tether.algorithms.presets import Algorithm, preset
from tether.core.errors import BadInput, CheckpointError
from tether.core.metrics import StepMetrics
from tether.core.seeding import generator, seed_everything
from tether.core.types import Group
from tether.diagnostics.monitor import Health, Monitor
from tether.envs.vector import make_envs
from tether.models.chat import ChatFormat
from tether.models.decoder import max_positions
from tether.models.head import SplitModel
from tether.models.load import load_model
from tether.models.scorer import PrefixScorer
from tether.rollout.collect import collect, training_plan
from tether.rollout.engines.native import NativeEngine
from tether.rollout.episode import EpisodeRules
from tether.rollout.pack import pack
from tether.rollout.summary import group_summary, rollout_summary
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore
from tether.training.checkpoint import list_checkpoints, load_checkpoint, load_state, save_checkpoint
from tether.training.early_stop import reason_to_stop
from tether.training.evaluate import evaluate
from tether.training.interrupts import Interrupts
from tether.training.learner import Learner
from tether.training.settings import AlgorithmSettings, RunSettings
from tether.training.watch import Unwatched, Watcher

LOSS_SCALES = {"kept_ratio": lambda ratio: ratio, "sqrt": lambda ratio: ratio**0.5, "none": lambda ratio: 1.0}


class Trainer:
    """A run: its parts, its loop, its stops."""

    def __init__(self, settings: RunSettings, store: RunStore, watcher: Watcher | None = None) -> None:
        seed_everything(settings.seed)
        checkpoint = next(reversed(list_checkpoints(store.checkpoints)), None)
        loaded = (
            load_checkpoint(checkpoint, settings.model.device)
            if checkpoint
            else load_model(settings.model.name, device=settings.model.device)
        )
        rollout = settings.rollout
        self.settings, self.store, self._watcher = settings, store, watcher or Unwatched()
        self.model, self.tokenizer, self.chat = loaded.model, loaded.tokenizer, ChatFormat(loaded.tokenizer)
        self.algorithm = resolve_algorithm(settings.algorithm)
        num_episodes = rollout.num_groups * rollout.group_size
        self.envs = make_envs(settings.env.name, settings.env.options, num_episodes, settings.env.step_timeout)
        self.rules = episode_rules(settings, self.model)
        self.engine = NativeEngine(self.model, self.tokenizer, max_rows=rollout.max_rows)
        self.learner = Learner(
            SplitModel(self.model), self.algorithm, settings.learner, temperature=rollout.temperature, max_tokens=rollout.max_tokens
        )
        self.monitor, self.scorer = Monitor(settings.diagnosis.every), PrefixScorer(self.model)
        self.step = 0
        """The last complete step."""
        self._whole = True
        """The weights are those of that step; a second Ctrl-C can tear an update, whose weights must not be saved."""
        self._monitor_state = self.monitor.state()  # as of that step: an interrupted one may already have observed
        self._interrupts, self._seconds = Interrupts(), dict[str, float]()
        if checkpoint:
            self._restore(checkpoint)

    def run(self) -> None:
        """Train to the last step, or until a rule says that going on is a waste; on Ctrl-C write a checkpoint and re-raise."""
        with self.envs, self._interrupts.listening(), self._watcher.showing():
            try:
                self._catch_up()
                reason = self._reason_to_stop()
                while reason is None and self.step < self.settings.steps:
                    self.train_step(self.step + 1)
                    reason = self._reason_to_stop()
                if reason is not None:
                    self._stop_early(reason)
            except KeyboardInterrupt:
                if self._whole:
                    self.save()
                raise
        self.store.finish(f"stopped early after step {self.step}: {reason}" if reason else f"all {self.settings.steps} steps done")

    def train_step(self, step: int) -> None:
        """One pass through the data flow; each line is a stage."""
        self._seconds = {}
        groups = self._collect(step)
        kept = self._select(groups)
        batch = self._pack(groups, kept)
        health = self._diagnose(step, groups)  # on the policy that wrote the reasoning, always on the unfiltered groups
        with self._interrupts.shield():  # weights and record change together
            self._whole = False
            update = self._update(step, batch, kept)
            self.engine.sync()
            record = self._append(step, groups, kept, update, health)
            self._whole = True
        self._follow_up(record)

    def save(self) -> Path:
        """Write a checkpoint of the last complete step."""
        state = {"optimizer": self.learner.optimizer.state_dict(), "monitor": self._monitor_state}
        with self._interrupts.shield():
            return save_checkpoint(self.store.checkpoints, self.step, self.model, self.tokenizer, state, self.settings.checkpoint.keep)

    def _collect(self, step: int) -> list[Group]:
        rollout = self.settings.rollout
        plan = training_plan(self.settings.seed, step, rollout.num_groups, rollout.group_size)
        with self._timed("rollout", len(plan)):
            return collect(self.envs.envs, self.engine, self.chat, plan, self.settings.sampling(), self.rules, self._watcher.advance)

    def _select(self, groups: Sequence[Group]) -> Selection:
        chosen = self.settings.filter
        rule = chosen.model_dump(exclude={"strategy", "loss_scale", "auto_ratio", "auto_steps"})
        trajectories = [t for group in groups for t in group.trajectories]
        select = partial(
            select_groups,
            [t.reward for t in trajectories],
            [t.group for t in trajectories],
            successes=[float(t.success) for t in trajectories],
            entropies=[t.mean_surprise for t in trajectories],
            lengths=[t.num_sampled for t in trajectories],
            **rule,
        )
        with self._timed("select"):
            if chosen.strategy != AUTO:
                return select(strategy=chosen.strategy)
            ratios = [r.metrics["groups/rv_ratio"] for r in self._records() if "groups/rv_ratio" in r.metrics]
            earlier = ratios[len(ratios) - min(chosen.auto_steps - 1, len(ratios)) :]
            return select(strategy=auto_strategy(select(strategy="all"), earlier, chosen.auto_ratio))

    def _pack(self, groups: Sequence[Group], kept: Selection) -> Batch:
        chosen = [group for group in groups if group.index in kept.kept]
        advantages = trajectory_advantages([group.rewards for group in chosen], self.algorithm.scale_by_std)
        return pack([t for group in chosen for t in group.trajectories], advantages, self.model.device)

    def _diagnose(self, step: int, groups: Sequence[Group]) -> Health:
        if not self.monitor.is_due(step):
            return Health()
        with self._timed("diagnosis"):
            return self.monitor.observe(step, groups, self.scorer)

    def _update(self, step: int, batch: Batch, kept: Selection) -> dict[str, float]:
        if not len(batch):
            return {"skipped": 1}
        order = torch.from_numpy(generator("order", self.settings.seed, step).permutation(len(batch)))
        with self._timed("update"):
            scale = LOSS_SCALES[self.settings.filter.loss_scale](kept.kept_ratio)
            return {**self.learner.update(batch, order, scale), "skipped": 0}

    def _append(self, step: int, groups: Sequence[Group], kept: Selection, update: dict[str, float], health: Health) -> StepRecord:
        """Write down what the step did; from here on it is complete."""
        metrics = StepMetrics()
        metrics.put("rollout", rollout_summary(groups))
        metrics.put("groups", group_summary(groups, kept))
        metrics.put("update", update)
        metrics.put("information", health.metrics)
        notes = [health.note] if health.note else []
        if update["skipped"] and kept.kept:
            notes.append("no kept episode holds a response: nothing to learn from, the update was skipped")
        if not kept.kept:
            notes.append(
                f"the filter kept none of {len(groups)} groups ({kept.zero_variance} without reward variance); the update was skipped"
            )
        record = StepRecord(step, dict(metrics), health.regime, notes)
        self._append_trajectories(step, "train", groups, set(kept.kept))
        self.store.append(record)
        self.step, self._monitor_state = step, self.monitor.state()
        return record

    def _append_trajectories(self, step: int, split: str, groups: Sequence[Group], kept: set[Hashable]) -> None:
        self.store.append_trajectories([trajectory_record(t, step, split, g.index in kept) for g in groups for t in g.trajectories])

    def _follow_up(self, record: StepRecord) -> None:
        """Checkpoint and evaluation when they are due, then the timings, then word to the watcher."""
        step, settings = record.step, self.settings
        if step and (step == settings.steps or step % settings.checkpoint.every == 0):
            with self._timed("checkpoint"):
                self.save()
        if self._evaluation_is_due(step):
            record = self._evaluate(record)
        tokens = record.metrics.get("rollout/tokens_sampled")
        rate = {"tokens_per_second": tokens / self._seconds["rollout"]} if tokens and "rollout" in self._seconds else {}
        self.store.append_timings(step, {"seconds": self._seconds, **rate})
        self._watcher.record(record)

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.settings.evaluation.every
        return step in (0, self.settings.steps) or (every > 0 and step % every == 0)

    def _evaluate(self, record: StepRecord) -> StepRecord:
        """Play the validation prompts and write the record again with what they gave; readers take the last one of a step."""
        settings, num_prompts = self.settings, self.settings.evaluation.prompts
        with self._timed("validation", num_prompts):
            result = evaluate(
                settings.env, self.engine, self.chat, num_prompts, settings.evaluation_sampling(), self.rules, self._watcher.advance
            )
        metrics = StepMetrics(record.metrics)
        metrics.put("validation", result.metrics)
        record = dataclasses.replace(record, metrics=dict(metrics))
        self._append_trajectories(record.step, "validation", result.groups, set())
        self.store.append(record)
        return record

    def _reason_to_stop(self) -> str | None:
        if self.step == self.settings.steps:
            return None
        return reason_to_stop(self._records(), self.settings.early_stop)

    def _stop_early(self, reason: str) -> None:
        """Keep the weights, measure them, and put the reason on the record."""
        self.save()
        record = self._records()[-1]
        note = f"stopped early: {reason}"
        if note in record.notes:  # a run that had stopped was asked to go on
            return
        record = dataclasses.replace(record, notes=[*record.notes, note])
        if "validation/success" in record.metrics:
            self.store.append(record)
        else:
            record = self._evaluate(record)
        self._watcher.record(record)

    def _records(self) -> list[StepRecord]:
        """What is on record of the steps so far, in order."""
        return [record for record in self.store.steps() if record.step <= self.step]

    def _catch_up(self) -> None:
        """Do what the last complete step still lacks: step 0 is nothing but its evaluation, and a stop may have cut one off."""
        records = {record.step: record for record in self._records()}
        record = records.get(self.step, StepRecord(self.step, {}, None, []))
        if self._evaluation_is_due(self.step) and "validation/success" not in record.metrics:
            self._seconds = {}
            self._follow_up(record)

    def _restore(self, checkpoint: Path) -> None:
        state = load_state(checkpoint)
        try:
            self.learner.optimizer.load_state_dict(state["optimizer"])
            self.monitor.restore(state["monitor"])
            self.step, self._monitor_state = int(state["step"]), self.monitor.state()
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint '{checkpoint}' does not fit this run: {error}; resume with the config it was made by"
            ) from error

    @contextmanager
    def _timed(self, stage: str, total: int = 1) -> Iterator[None]:
        self._watcher.stage(stage, total)
        start = time.perf_counter()
        yield
        self._seconds[stage] = self._seconds.get(stage, 0.0) + time.perf_counter() - start


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """A preset with the departures that were asked for."""
    changes = {key: value for key, value in settings.model_dump(exclude={"name"}).items() if value is not None}
    return dataclasses.replace(preset(settings.name), **changes)


def episode_rules(settings: RunSettings, model: PreTrainedModel) -> EpisodeRules:
    """The budgets of an episode, within what the model can hold."""
    max_context = min(settings.rollout.max_context, max_positions(model))
    if settings.rollout.max_tokens >= max_context:
        raise BadInput(
            f"rollout.max_tokens is {settings.rollout.max_tokens} but a conversation holds only {max_context} tokens; lower rollout.max_tokens"
        )
    return EpisodeRules(max_context, settings.rollout.max_tokens, settings.rollout.format_penalty)
