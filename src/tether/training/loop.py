"""The training loop: a step reads like the data flow, with hooks around it.

    seeds -> sample (rollout, filter) -> advantages -> update          and beside it: groups -> diagnosis -> record

Step 0 is the untrained policy, evaluated; steps 1..N train. Everything about a step is on disk before the next begins, so a run can be
stopped at any time and continued from its last checkpoint with the same result. Of several ranks all run this program. The first reads and
writes the run folder; the others get its records, so whatever follows from records is decided in the same way on every rank.
"""

from collections.abc import Sequence

from tether.core.seeding import seed_everything
from tether.runs.store import RunStore
from tether.training import lifecycle, stages
from tether.training.alarm_actions import AlarmActions
from tether.training.async_rollouts import AsyncRollouts
from tether.training.batch import Rollouts
from tether.training.build import build, build_prompt_memory
from tether.training.callbacks import Callback, CallbackList
from tether.training.checkpoint import last_checkpoint
from tether.training.distributed.ranks import Ranks
from tether.training.early_stop import EarlyStop
from tether.training.hooks import BestCheckpoint, Checkpoints, Evaluations, Hook, Trackers
from tether.training.saver import CheckpointSaver
from tether.training.settings import RunSettings
from tether.training.throughput import StartTimer, StepTimer


class Trainer:
    """A run: its parts, its records, its loop, its hooks. Stages and hooks see it as `stages.TrainedRun` and `hooks.Run`."""

    def __init__(
        self,
        settings: RunSettings,
        store: RunStore,
        callbacks: Sequence[Callback] = (),
        start: StartTimer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`start` measures how long the start of the run takes; it may have measured parts already. `ranks` share the work of the run."""
        self.settings, self.store, self.ranks = settings, store, ranks or Ranks()
        self.callbacks: Callback = CallbackList(callbacks)
        self.start_timer = start or StartTimer()
        seed_everything(settings.seed)
        checkpoint = self.ranks.broadcast_object(lambda: last_checkpoint(store))
        self.prompt_memory = self.ranks.barrier(lambda: build_prompt_memory(settings))
        sampling_ranks = self.ranks.subgroup() if settings.rollout.max_staleness else self.ranks
        built = self.ranks.barrier(
            lambda: build(settings, checkpoint, self.callbacks, self.start_timer, store.folder, self.ranks, sampling_ranks)
        )
        self.policy, self.algorithm, self.estimator, self.learner, self.sampler, self.monitor, self.plan, self.disk = built
        with self.start_timer.part("peak"):
            self.timer = StepTimer(self.policy.module, self.learner.critic, num_devices=self.ranks.size, dtype=self.policy.dtype)
        background = self.plan is None or self.plan.background
        moments = settings.checkpoint.moments or (self.disk.moments if self.disk is not None else "float32")
        self.saver = CheckpointSaver(store, self.learner, self.timer, self.callbacks, settings, background=background, moments=moments)
        rollouts = AsyncRollouts if settings.rollout.max_staleness else Rollouts
        self.rollouts = rollouts(settings, self.sampler, self.timer, self.callbacks, self.prompt_memory)
        self.alarm_actions = AlarmActions(settings)
        self.hooks: Sequence[Hook] = (Checkpoints(), Evaluations(), BestCheckpoint(), Trackers(), EarlyStop(self.alarm_actions))
        self.step, self.whole, batches_ahead = 0, True, None
        self.notes: list[str] = []
        if checkpoint is not None:
            with self.start_timer.part("checkpoint"):
                batches_ahead = self.ranks.barrier(lambda: lifecycle.resume(self, checkpoint))
        with self.start_timer.part("publish"):
            self.rollouts.begin(self.step, batches_ahead)
        self.monitor_state = self.monitor.state()  # of `step`: an interrupted step may already have observed
        self.records = self.ranks.broadcast_object(lambda: [record for record in store.steps() if record.step <= self.step])
        self.monitor.replay((record.step, record.metrics) for record in self.alarm_actions.counting(self.records))

    def run(self) -> None:
        """Train to the last step, or until a hook ends the run."""
        with lifecycle.running(self):  # whatever ends this block, the last complete step is kept
            lifecycle.begin(self)
            self.rollouts.prefetch(self.step, self.alarm_actions.filter_inputs(self.records))
            while (reason := lifecycle.stop_reason(self)) is None and self.step < self.settings.steps:
                self.train_step(self.step + 1)
            lifecycle.finish(self, reason)
        self.store.finish(f"stopped early after step {self.step}: {reason}" if reason else f"all {self.settings.steps} steps done")
        lifecycle.check_evidence(self.records)

    def train_step(self, step: int) -> None:
        """One pass through the data flow; each line is a stage."""
        self.saver.check()
        self.timer.begin()
        sampled = self.rollouts.sample(step, self.alarm_actions.filter_inputs(self.records))  # groups, and what the filter kept of them
        health = stages.diagnose(self, step, sampled)  # always on unfiltered groups, by the policy that wrote the reasoning
        batch, estimates = stages.advantages(self, sampled)  # masks and log-probs carried from the rollout
        estimates |= stages.check_sampler(self, step, sampled, batch)  # a server must have sampled with these weights
        with lifecycle.atomic(self):  # weights and record change together
            update = {**estimates, **stages.update(self, step, batch, sampled)}
            record = stages.record(self, step, sampled, batch, update, health)  # on disk: from here on the step is complete
            record = self.alarm_actions.on_step(self, record)
        self.rollouts.prefetch(
            step, self.alarm_actions.filter_inputs(self.records)
        )  # asynchronous: the weights of this step sample a later batch
        for hook in self.hooks:  # checkpoint, evaluation, best checkpoint, trackers
            record = hook.on_step(self, record)

    def save(self, *, last: bool = False) -> None:
        """Write a checkpoint of the last complete step, from a copy that is taken now; it is in its place after `saver.finish`. `last`: training ended."""
        if self.saver.saved_step != self.step:  # a step's checkpoint holds the same, whatever asked for it
            state = {"monitor": self.monitor_state, "alarm_actions": self.alarm_actions.state(), **self.rollouts.state(self.step)}
            if self.prompt_memory is not None:
                state["prompt_memory"] = self.prompt_memory.state()
            self.saver.save(self.step, state, last=last)
