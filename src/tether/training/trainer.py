"""The trainer: one step reads like the data flow.

    seeds -> gather (collect, select) -> pack -> advantages -> update          and, beside it, groups -> monitor -> store

Step 0 is the untrained policy, evaluated; steps 1..N train. Everything about a step is on disk before the next begins, so a run can be
stopped at any time and continued from its last checkpoint with the same result.
"""

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.rules import loss_scale
from tether.core.errors import OutOfMemory, TetherError
from tether.core.metrics import StepMetrics
from tether.core.seeding import generator, seed_everything
from tether.core.types import Group
from tether.diagnostics.monitor import Health, Monitor
from tether.models.hardware import device_name
from tether.rollout.pack import pack
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore
from tether.training.checkpoint import checkpoint_name, keep_best, list_checkpoints, save_checkpoint, step_of, sweep
from tether.training.diagnosis_settings import Action
from tether.training.early_stop import reason_to_stop
from tether.training.emphasis import reweight_batch
from tether.training.gather import SampledBatch, gather
from tether.training.interrupts import Interrupts
from tether.training.judge import build_scorer
from tether.training.learner import Rates
from tether.training.memory import memory_boundary
from tether.training.parts import build
from tether.training.player import Player
from tether.training.reactions import AlarmAction, AlarmActions, last_healthy
from tether.training.resume import restore, rollback
from tether.training.schedule import learning_rate
from tether.training.settings import RunSettings
from tether.training.step_record import step_record
from tether.training.throughput import StepTimer, give_back_unused
from tether.training.watch import Callback, NullCallback
from tether.training.watching import gradient_metrics, step_work

APART = 1_000_000
"""Index of the first group that is played for the gradients alone; no round of refill gets there."""


class Trainer:
    """A run: its parts, its loop, its stops."""

    def __init__(self, settings: RunSettings, store: RunStore, watcher: Callback | None = None) -> None:
        seed_everything(settings.seed)
        sweep(store.checkpoints)
        checkpoint = next(reversed(list_checkpoints(store.checkpoints)), None)
        parts = build(settings, checkpoint)
        self.settings, self.store, self._watcher = settings, store, watcher or NullCallback()
        self.model, self.tokenizer = parts.model, parts.tokenizer
        self.algorithm, self.estimator, self.learner = parts.algorithm, parts.estimator, parts.learner
        self.player = Player(settings, parts, self._watcher)
        self.env_pool = self.player.env_pool
        chosen = settings.diagnosis
        self.monitor = Monitor(chosen.every, chosen.scopes, budget=chosen.budget, contexts=chosen.contexts, seed=settings.seed)
        self.scorer, self.reactions = build_scorer(settings, self.model, self.tokenizer), AlarmActions(settings)
        self.step = 0
        """The last complete step."""
        self._whole = True
        """The weights are those of that step; a second Ctrl-C can tear an update, whose weights must not be saved."""
        self._monitor_state = self.monitor.state()  # as of that step: an interrupted one may already have observed
        self._interrupts = Interrupts()
        self._meter = StepTimer(self.model, self.learner.critic)
        self._fit = parts.fit
        if checkpoint:
            self.step = restore(checkpoint, self.learner, self.monitor, self.reactions)
            self._monitor_state = self.monitor.state()

    def run(self) -> None:
        """Train to the last step, or until a rule says that going on is a waste; on Ctrl-C or without memory write a checkpoint and re-raise."""
        with self.env_pool, self._interrupts.listening(), self._watcher.showing():
            try:
                self._introduce()
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
            except OutOfMemory as error:
                raise OutOfMemory(f"{error}; nothing already written is lost: {self._way_on()}") from error
        self.store.finish(f"stopped early after step {self.step}: {reason}" if reason else f"all {self.settings.steps} steps done")

    def train_step(self, step: int) -> None:
        """One pass through the data flow; each line is a stage."""
        self._meter.begin()
        gathered = self._gather(step)
        health = self._diagnose(step, gathered)  # on the policy that wrote the reasoning, always on unfiltered groups
        batch, estimates = self._estimate(gathered)
        with self._interrupts.shield():  # weights and record change together
            self._whole = False
            update = {**estimates, **self._update(step, batch, gathered)}
            record = self._append(step, gathered, batch, update, health)
            record = self._react(record)
            self._whole = True
        self._follow_up(record)

    def save(self) -> Path:
        """Write a checkpoint of the last complete step."""
        state = {"learner": self.learner.state(), "monitor": self._monitor_state, "reactions": self.reactions.state()}
        with self._interrupts.shield(), self.learner.full_precision():
            self.store.sync()  # no checkpoint outlives a power cut that the records of its steps do not
            return save_checkpoint(self.store.checkpoints, self.step, self.model, self.tokenizer, state, self.settings.checkpoint.keep)

    def _introduce(self) -> None:
        """Say what the run is computed on."""
        machine = {
            "device": device_name(self.model.device),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "peak": self._meter.peak,
            "engine": self.player.engine.backend,
        }
        self.store.computed_on(machine)
        for note in (*(self._fit.notes if self._fit else ()), self.player.engine_note()):
            if note is not None:
                self._watcher.note(note)

    def _way_on(self) -> str:
        """Keep the last complete step, if the weights are still its, and say where a resumed run begins."""
        if self._whole and not (self.store.checkpoints / checkpoint_name(self.step)).exists():
            self.save()
        checkpoint = next(reversed(list_checkpoints(self.store.checkpoints)), None)
        return f"--resume goes on from {checkpoint.name}" if checkpoint else "--resume begins anew, as there is no checkpoint yet"

    def _gather(self, step: int) -> SampledBatch:
        settings = self.settings

        def sample(num_groups: int, first: int) -> list[Group]:
            count = num_groups * settings.rollout.group_size
            with self._timed("rollout", count):
                groups = self.player.within_memory("rollout", count, lambda: self._play(step, num_groups, first))
            self._meter.count(self.player.counts())
            return groups

        counting = self.reactions.counting(self._records())
        ratios = [r.metrics["groups/rv_ratio"] for r in counting if "groups/rv_ratio" in r.metrics]
        recent = ratios[len(ratios) - min(settings.filter.auto_steps - 1, len(ratios)) :]
        rules = settings.filter.model_copy(update={"keep": self.reactions.keep})
        with self._meter.stage("select"):  # less the rollouts in it
            gathered = gather(sample, settings.rollout.num_groups, rules, recent)
        self._meter.played(gathered.groups)
        return gathered

    def _play(self, step: int, num_groups: int, first: int) -> list[Group]:
        """New prompts of a step, from a place in its sequence of prompts on."""
        return self.player.train(step, num_groups, first)

    def _diagnose(self, step: int, gathered: SampledBatch) -> Health:
        """Look at what was sampled; a diagnosis that fails is on the record with its cause, and training goes on."""
        health, chosen = Health(), self.settings.diagnosis
        if self.monitor.is_due(step):
            work = step_work(gathered, self.settings.learner.epochs)
            try:
                with self._timed("diagnosis"), memory_boundary("diagnosis", "lower diagnosis.budget or set diagnosis.every=0"):
                    health = self.monitor.observe(step, gathered.first_round, self.scorer, work)
            except TetherError as error:
                health = Health(metrics={"information": {"failed": 1}}, notes=[f"diagnosis failed: {error}"])
        if chosen.gradients.every and (step - 1) % chosen.gradients.every == 0:
            try:
                with self._timed("gradients"), memory_boundary("gradients", "lower learner.micro_tokens or diagnosis.gradients.prompts"):
                    groups = self._play(step, chosen.gradients.prompts, APART) if chosen.gradients.prompts else gathered.first_round
                    health.metrics["gradients"] = gradient_metrics(step, groups, self.learner, self.estimator, self.settings)
            except TetherError as error:
                health.metrics["gradients"] = {"failed": 1}
                health.notes.append(f"gradient decomposition failed: {error}")
        return health

    def _estimate(self, gathered: SampledBatch) -> tuple[Batch, dict[str, float]]:
        """The chosen groups as a batch with advantages, each from its whole group; members left out afterwards do not change them."""
        trajectories = [t for group in gathered.chosen for t in group.trajectories]
        batch = pack(trajectories, self.model.device)
        if not len(batch):
            return batch, {}
        with self._timed("advantages"), memory_boundary("advantages", self._micro_remedy()):
            batch, estimates = self.estimator.complete(batch)
        return reweight_batch(batch, gathered, self.settings.filter), estimates

    def _update(self, step: int, batch: Batch, gathered: SampledBatch) -> dict[str, float]:
        if not len(batch):
            return {"skipped": 1}
        settings, chosen = self.settings, self.settings.learner
        orders = [
            torch.from_numpy(generator("order", settings.seed, step, epoch).permutation(batch.num_trajectories)).to(batch.ids_BT.device)
            for epoch in range(chosen.epochs)
        ]
        scale = loss_scale(settings.filter.loss_scale, gathered.fill_ratio)
        streak = self.learner.nonfinite_streak
        give_back_unused(self.model.device)
        try:
            with self._timed("update"), memory_boundary("update", self._micro_remedy()):
                update = self.learner.update(batch, orders, scale, self._rates(step))
                self.player.engine.sync()
        except OutOfMemory:
            if not self.learner.updates_applied:  # the weights are still those of the last step
                self.learner.nonfinite_streak, self._whole = streak, True
            raise
        self._meter.learned(batch.lengths_B.tolist(), chosen.epochs)
        return {**update, "skipped": 0}

    def _rates(self, step: int) -> Rates:
        chosen, critic = self.settings.learner, self.settings.critic
        assert chosen.learning_rate is not None and critic.learning_rate is not None  # filled in when the settings were resolved
        warming_up = self.algorithm.has_critic and step <= critic.warmup_steps
        policy, value = (
            learning_rate(base, step, self.settings.steps, chosen.schedule, chosen.warmup_steps, chosen.min_lr_ratio)
            for base in (chosen.learning_rate, critic.learning_rate)
        )
        return Rates(0.0 if warming_up else policy, value)

    def _micro_remedy(self) -> str:
        return f"lower learner.micro_tokens (now {self.settings.learner.micro_tokens}; the update stays the same)"

    def _append(self, step: int, gathered: SampledBatch, batch: Batch, update: dict[str, float], health: Health) -> StepRecord:
        """Write down what the step did; from here on it is complete."""
        groups = {**gathered.metrics(int(batch.loss_mask_BT.sum())), "keep": self.reactions.keep}
        with self._meter.stage("record"):
            record = step_record(
                step,
                gathered,
                update,
                health,
                mixed=len(self.settings.environments()) > 1,
                repetition=self.reactions.repetition(gathered.groups),
                groups=groups,
                notes=self.player.take_notes(),
            )
            record = self.reactions.raised(self._records(), record)
            self._append_trajectories(step, "train", gathered.groups, gathered.chosen_ids)
            self.store.append(record)
        self.step, self._monitor_state = step, self.monitor.state()
        return record

    def _react(self, record: StepRecord) -> StepRecord:
        """Do what the alarms of a step ask for, and put it on the record; a checkpoint of this step has it in it."""
        due = self.reactions.due(record)
        done = [f"{reaction.action} for {reaction.alarm.name}: {self._act(reaction, due)}" for reaction in due]
        if not done:
            return record
        record = dataclasses.replace(record, notes=[*record.notes, *done])
        self.store.append(record)
        if any(reaction.action is Action.CHECKPOINT for reaction in due):  # last: it holds what the others changed
            self.save()
        return record

    def _act(self, reaction: AlarmAction, due: Sequence[AlarmAction]) -> str:
        if reaction.action in (Action.TIGHTEN_FILTER, Action.LOOSEN_FILTER):
            return self.reactions.change_filter(reaction.action)
        if reaction.action is Action.CHECKPOINT:
            return f"written to {checkpoint_name(self.step)}"
        if reaction.action is Action.STOP:
            return "the run ends here"
        if self.reactions.rolled_back_at(self.step):
            return "done already in this step"
        if self.reactions.may_not_roll_back:
            return "all roll-backs are used up, the run ends here"
        asking = [other.alarm for other in due if other.action is Action.ROLL_BACK]
        healthy = last_healthy(self.store.checkpoints, asking, self.reactions.rolled_back)
        if healthy is None:
            return "no checkpoint from before the decline is left, went on without; raise checkpoint.keep or lower checkpoint.every"
        # Steps go on counting: nothing is replayed.
        rollback(healthy, self.model, self.learner)
        self.player.engine.sync()
        self.reactions.rolled_back.append((step_of(healthy) + 1, self.step))
        return f"went on with the weights of step {step_of(healthy)}"

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
        timings = self._meter.timings()
        self.store.append_timings(step, timings.to_json())
        self._watcher.record(record, timings)

    def _evaluation_is_due(self, step: int) -> bool:
        every = self.settings.evaluation.every
        return step in (0, self.settings.steps) or (every > 0 and step % every == 0)

    def _evaluate(self, record: StepRecord) -> StepRecord:
        """Play the validation prompts and write the record again with what they gave; readers take the last one of a step."""
        chosen = self.settings.evaluation
        count = chosen.prompts * chosen.samples
        with self._timed("validation", count):
            result = self.player.within_memory("validation", count, self.player.validate)
        metrics = StepMetrics(record.metrics)
        metrics.put("validation", result.metrics)
        record = dataclasses.replace(record, metrics=dict(metrics), notes=[*record.notes, *self.player.take_notes()])
        self._append_trajectories(record.step, "validation", result.groups, set())
        self.store.append(record)
        self._keep_if_best(record)
        return record

    def _keep_if_best(self, record: StepRecord) -> None:
        """Keep the checkpoint of an evaluated step beside the newest ones if none was better; the untrained policy does not count."""
        success = record.metrics.get("validation/success")
        if success is None or not record.step or not self.settings.checkpoint.best:
            return
        earlier = [
            r.metrics["validation/success"] for r in self._records() if 0 < r.step < record.step and "validation/success" in r.metrics
        ]
        if success > max(earlier, default=-1.0):
            if not (self.store.checkpoints / checkpoint_name(record.step)).exists():
                self.save()
            keep_best(self.store.checkpoints, record.step, success)

    def _reason_to_stop(self) -> str | None:
        if self.step == self.settings.steps:
            return None
        records = self._records()
        counting = self.reactions.counting(records)
        return reason_to_stop(counting, self.settings.early_stop) or self.reactions.reason_to_stop(records[-1] if records else None)

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
        self._watcher.record(record, self._meter.timings())

    def _records(self) -> list[StepRecord]:
        """What is on record of the steps so far, in order."""
        return [record for record in self.store.steps() if record.step <= self.step]

    def _catch_up(self) -> None:
        """Do what the last complete step still lacks: step 0 is nothing but its evaluation, and a stop may have cut one off."""
        records = {record.step: record for record in self._records()}
        record = records.get(self.step, StepRecord(self.step, {}, None, []))
        if self._evaluation_is_due(self.step) and "validation/success" not in record.metrics:
            self._meter.begin()
            self._follow_up(record)
        else:
            self._keep_if_best(record)

    @contextmanager
    def _timed(self, stage: str, total: int = 1) -> Iterator[None]:
        self._watcher.stage(stage, total)
        with self._meter.stage(stage):
            yield
