"""The training loop: a step reads like the data flow, with hooks around it.

    seeds -> sample (rollout, filter) -> advantages -> update          and beside it: groups -> diagnosis -> record

Step 0 is the untrained policy, evaluated; steps 1..N train. Everything about a step is on disk before the next begins, so a run can be
stopped at any time and continued from its last checkpoint with the same result.
"""

import dataclasses
from collections.abc import Sequence
from contextlib import nullcontext

from tether.core.errors import EngineUnavailable, EnvironmentFailure, OutOfMemory, TetherError
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.verdict import every_episode_failed
from tether.training.callbacks import Callback
from tether.training.distributed.ranks import Ranks
from tether.training.hooks.early_stop import EarlyStop
from tether.training.hooks.periodic import BestCheckpoint, Checkpoints, Evaluations, Trackers
from tether.training.settings import RunSettings
from tether.training.stages import Stages
from tether.training.state import RunState
from tether.training.throughput import StartTimer


class Trainer(RunState):
    """A run: its state, its loop, its hooks."""

    def __init__(
        self,
        settings: RunSettings,
        store: RunStore,
        callbacks: Sequence[Callback] = (),
        start: StartTimer | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        super().__init__(settings, store, callbacks, start, ranks)
        self.stages = Stages(settings, self.parts, self.callbacks, self.timer)
        self.ahead = self.stages.ahead
        if self.ahead is not None:
            self.ahead.begin(self.published, self.batches_ahead, settings.filter)
        self.best = BestCheckpoint()
        self.hooks = [Checkpoints(), Evaluations(), self.best, Trackers(), EarlyStop()]

    def run(self) -> None:
        """Train to the last step, or until a hook ends the run; whatever else ends it, write a checkpoint if the weights are whole."""
        with self.sampler.pool, self.ahead or nullcontext(), self.interrupts.listening(), self.callbacks.running():
            try:
                self._start()
                self._prefetch()
                while (reason := self._stop_reason()) is None and self.step < self.settings.steps:
                    self.train_step(self.step + 1)
                if reason is not None:
                    self._stop_early(reason)
                self._finish_saving()
            except KeyboardInterrupt:
                if self.whole:
                    self._say_what_is_waited_for()
                    self.save()
                self.finish_saving()  # a second Ctrl-C does not wait, nor does the end of the grace time
                raise
            except (OutOfMemory, EngineUnavailable, EnvironmentFailure) as error:
                ended = type(error)(f"{error}; nothing already written is lost: {self.how_to_resume()}")
                ended.common = error.common
                raise ended from error
            except Exception as error:
                self._save_after(error)
                raise
        self.store.finish(f"stopped early after step {self.step}: {reason}" if reason else f"all {self.settings.steps} steps done")
        self._check_evidence()

    def train_step(self, step: int) -> None:
        """One pass through the data flow; each line is a stage."""
        self.ranks.barrier(self.saver.check)  # a checkpoint that could not be written ends the run
        self.timer.begin()
        keep, earlier = self.alarm_actions.keep, self.alarm_actions.counting(self.records)
        sampled = self.stages.sample(step, keep, earlier)  # groups of trajectories, and what the filter kept of them
        health = self.stages.diagnose(step, sampled)  # always on unfiltered groups, by the policy that wrote the reasoning
        batch, estimates = self.stages.advantages(sampled)  # masks and log-probs carried from the rollout
        with self.atomic():  # weights and record change together
            update = {**estimates, **self.stages.update(step, batch, sampled)}
            record = self.log(self.stages.record(step, sampled, batch, update, health, sampled.keep), sampled.groups, sampled.kept_ids)
            record = self.alarm_actions.on_step(self, record)
        self._prefetch()
        for hook in self.hooks:  # checkpoint, evaluation, best checkpoint, trackers
            record = hook.on_step(self, record)

    def _check_evidence(self) -> None:
        """A run in which no episode ever ended by itself has learned nothing: that is a failure, and it has a cause."""
        causes = [every_episode_failed(record) for record in self.records if record.step]
        if causes and all(causes):
            failure = EnvironmentFailure(f"every episode of the run failed, nothing was learned; in the last step with: {causes[-1]}")
            failure.common = True
            raise failure

    def _save_after(self, error: Exception) -> None:
        """Keep the last complete step of a run that ends with an error, if its weights are whole; a failure of that is a note.

        Several ranks can do so only where all of them came here.
        """
        together = self.ranks.size == 1 or (isinstance(error, TetherError) and error.common)
        try:
            if self.whole and self.step and together and not self.is_saved(self.step):
                self.save()
            self.saver.wait()
        except (TetherError, OSError, RuntimeError) as second:  # torch's errors are RuntimeErrors
            self.callbacks.on_note(f"no checkpoint of step {self.step} could be written: {second}")

    def _say_what_is_waited_for(self) -> None:
        if self.ahead is not None and self.ahead.is_busy(self.step):
            self.callbacks.on_note("waiting for the batch that is being sampled: a resumed run trains on it; Ctrl-C again does not wait")

    def _prefetch(self) -> None:
        """With asynchronous rollouts: the weights of the last complete step sample a later batch from here on."""
        self.stages.prefetch(self.step, self.alarm_actions.keep, self.alarm_actions.counting(self.records))

    def _start(self) -> None:
        """Report the machine, then do what the last complete step still lacks: step 0 is nothing but its evaluation."""
        self.introduce()
        record = next((known for known in self.records if known.step == self.step), StepRecord(self.step, {}, None, []))
        if Evaluations.is_due(self, self.step) and "validation/success" not in record.metrics:
            self.timer.begin()
            for hook in self.hooks:
                record = hook.on_step(self, record)
        else:
            self.best.on_step(self, record)

    def _finish_saving(self) -> None:
        """Wait for the last checkpoint. Its cost belongs to the last step, whose timings are written again."""
        self.finish_saving()
        if seconds := self.saver.take_seconds():
            self.timer.count_background("checkpoint", seconds)
            self.store.append_timings(self.step, self.timer.timings().to_json())

    def _stop_reason(self) -> str | None:
        if self.step == self.settings.steps:
            return None
        return next((reason for hook in (*self.hooks, self.alarm_actions) if (reason := hook.stop_reason(self))), None)

    def _stop_early(self, reason: str) -> None:
        """Keep the weights, measure them, and put the reason on the record."""
        if self.settings.checkpoint.last:
            self.save()
        record, note = self.records[-1], f"stopped early: {reason}"
        if note in record.notes:  # a run that had stopped was resumed
            return
        record = dataclasses.replace(record, notes=[*record.notes, note])
        if "validation/success" in record.metrics:
            record = self.amend(record)
        else:
            record = self.best.on_step(self, Evaluations.evaluate(self, record))
        self.callbacks.on_step_end(record, self.timer.timings())
