"""The state of a run between steps: its parts, its records in memory and on disk, its checkpoints, and what makes a step atomic.

Records are kept in memory, in order, one per step; the disk is read once, when a run is resumed. A checkpoint holds the weights of the last
complete step and everything else that training changes.

Of several ranks the first reads and writes the run folder. The others get from it which checkpoint counts and what the records say, so what
follows from records (alarms, early stopping, the automatic filter) is decided alike.
"""

import math
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tether.core.seeding import seed_everything
from tether.core.types import Group
from tether.models.hardware import device_name
from tether.runs.checkpoints import check_checkpoint, newest_checkpoint
from tether.runs.schema import StepRecord, trajectory_record
from tether.runs.store import RunStore
from tether.training.async_rollouts import AsyncRollouts
from tether.training.build import build
from tether.training.callbacks import Callback, CallbackList
from tether.training.checkpoint import restore, sweep
from tether.training.distributed.ranks import Ranks
from tether.training.hooks.alarms import AlarmActions
from tether.training.saver import CheckpointSaver
from tether.training.settings import RunSettings
from tether.training.throughput import StartTimer, StepTimer

HEARTBEAT = 60.0
"""Seconds after which rank 0 tells the others that it is still writing."""


class RunState:
    """What hooks and the loop share."""

    def __init__(
        self,
        settings: RunSettings,
        store: RunStore,
        callbacks: Sequence[Callback] = (),
        start: StartTimer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """`start` measures how long the start of the run takes; it may have measured parts already. `ranks` share the work of the run."""
        self._start_timer = start or StartTimer()
        self.ranks = ranks or Ranks()
        seed_everything(settings.seed)
        checkpoint = self.ranks.broadcast_object(lambda: _last_checkpoint(store))
        self.settings, self.store, self.callbacks = settings, store, CallbackList(callbacks)
        beside = self.ranks.subgroup() if settings.rollout.max_staleness else self.ranks
        self.parts = self.ranks.barrier(
            lambda: build(settings, checkpoint, self.callbacks, self._start_timer, store.folder, self.ranks, beside)
        )
        self.policy, self.learner, self.sampler, self.monitor = (
            self.parts.policy,
            self.parts.learner,
            self.parts.sampler,
            self.parts.monitor,
        )
        with self._start_timer.part("peak"):
            self.timer = StepTimer(self.policy.module, self.learner.critic, num_devices=self.ranks.size, dtype=self.policy.dtype)
        plan = self.parts.plan
        self.saver = CheckpointSaver(
            store.checkpoints,
            self.policy,
            settings.checkpoint.keep,
            self.callbacks,
            background=plan is None or plan.background,
            writes=store.writes,
        )
        self.alarm_actions = AlarmActions(settings)
        self.interrupts = self.ranks.interrupts
        self.step = 0
        """The last complete step."""
        self.whole = True
        """The weights are those of `step`. A second Ctrl-C can interrupt an update; such weights must not be saved."""
        self.ahead: AsyncRollouts | None = None
        """Samples later batches while a step trains; set by the trainer of a run with asynchronous rollouts."""
        self.batches_ahead: str | None = None
        """What the checkpoint holds of them."""
        if checkpoint is not None:
            with self._start_timer.part("checkpoint"):
                restored = self.ranks.barrier(lambda: restore(checkpoint, self.learner, self.monitor, self.alarm_actions))
                self.step, self.batches_ahead = restored
        with self._start_timer.part("publish"):
            self.published = self.sampler.engine.sync(self.step)  # a server may hold the weights of another step, or of another run
        self._monitor_state = self.monitor.state()  # of `step`: an interrupted step may already have observed
        self.records = self.ranks.broadcast_object(lambda: [record for record in store.steps() if record.step <= self.step])
        """The records of all complete steps, in order."""
        self.monitor.replay((record.step, record.metrics) for record in self.alarm_actions.counting(self.records))

    def save(self) -> None:
        """Write a checkpoint of the last complete step, from a copy that is taken now; it is in its place after `finish_saving`."""
        if self.saver.saved_step == self.step:  # a step's checkpoint holds the same, whatever asked for it
            return
        self.finish_saving()  # one at a time; outside the shield, which is for what must not be interrupted
        ahead = self._ahead_state()
        with self.timer.stage("checkpoint"), self.interrupts.shield(), self.learner.full_precision() as model:
            self.store.sync()  # after a power cut no checkpoint may be newer than the records of its steps
            state = {"learner": self.learner.state(), "monitor": self._monitor_state, "alarm_actions": self.alarm_actions.state()} | ahead
            self.saver.save(self.step, model, state)

    def _ahead_state(self) -> dict[str, str]:
        """Waits for batches that are being sampled."""
        if self.ahead is None:
            return {}
        with self.timer.stage("wait"):
            return {"batches_ahead": self.ahead.state(self.step)}

    def is_saved(self, step: int) -> bool:
        """Whether the checkpoint of a step is in its place or on its way there."""
        return self.ranks.broadcast_object(lambda: self.saver.has(step))

    def finish_saving(self) -> None:
        """Wait until every checkpoint is in its place; raises what writing one failed with."""
        with self.timer.stage("checkpoint"):
            patience = HEARTBEAT if self.ranks.size > 1 else math.inf
            while not self.ranks.broadcast_object(lambda: self.saver.wait(patience)):  # a word now and then: other ranks take silence for a failure
                pass

    def log(self, record: StepRecord, groups: Sequence[Group], kept: set[Hashable]) -> StepRecord:
        """Write down what the step did; from here on it is complete."""
        with self.timer.stage("record"):
            self.append_trajectories(record.step, "train", groups, kept)
            record = self.amend(record)
        self.step, self._monitor_state = record.step, self.monitor.state()
        return record

    def amend(self, record: StepRecord) -> StepRecord:
        """Write a record, or again with something added: readers take the last record of a step. Rank 0's is that of every rank."""
        record = self.ranks.broadcast_object(lambda: record)
        if self.records and self.records[-1].step == record.step:
            self.records.pop()
        self.records.append(record)
        self.store.append(record)
        return record

    def append_trajectories(self, step: int, split: str, groups: Sequence[Group], kept: set[Hashable]) -> None:
        if not self.store.writes:
            return
        self.store.append_trajectories(
            [trajectory_record(t, step, split, g.index in kept and not t.error) for g in groups for t in (*g.trajectories, *g.errored)]
        )

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Hold back Ctrl-C until weights and record belong to the same step again."""
        with self.interrupts.shield():
            self.whole, before, self.learner.updates_applied = False, self.step, 0
            try:
                yield
            except Exception:
                self.whole = self.step == before and not self.learner.updates_applied  # nothing was changed yet
                raise
            self.whole = True

    def how_to_resume(self) -> str:
        """Keep the last complete step, if the weights are still its own, and say where a resumed run begins."""
        if self.whole and not self.is_saved(self.step):
            self.save()
        self.finish_saving()
        checkpoint = self.ranks.broadcast_object(lambda: newest_checkpoint(self.store.checkpoints))
        return f"--resume continues from {checkpoint.name}" if checkpoint else "--resume starts from scratch, as there is no checkpoint yet"

    def introduce(self) -> None:
        """Put on record what the run is computed on, and report what is worth knowing before the first step."""
        with self._start_timer.part("probe"):
            report = self.policy.report()
        machine = {
            "device": device_name(self.policy.device),
            "dtype": str(self.policy.dtype).removeprefix("torch."),
            "peak": self.timer.peak,
            "engine": self.sampler.engine.backend,
            "ranks": self.ranks.size,
            "fast_path": report.to_json(),
            "start": {name: round(seconds, 2) for name, seconds in self._start_timer.seconds.items()},
        }
        self.store.computed_on(machine)
        self.saver.prepare(self.learner.saved_sizes())
        divided = [f"weights are divided among {self.ranks.size} ranks, none holds all of them"] if self.policy.divided else []
        for note in (*(self.parts.plan.notes if self.parts.plan else ()), *divided, *report.lines(), *self.sampler.chat.notes):
            self.callbacks.on_note(note)


def _last_checkpoint(store: RunStore) -> Path | None:
    """The checkpoint to continue from, found whole, once what a kill left unfinished is cleared away."""
    store.lock()  # before anything is cleared away: it could be another process's
    sweep(store.checkpoints)
    checkpoint = newest_checkpoint(store.checkpoints)
    if checkpoint is not None:
        check_checkpoint(checkpoint)
    return checkpoint
