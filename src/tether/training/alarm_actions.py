"""Alarm actions: what a run does about the alarms of a step.

Which alarms stand follows from the records alone, and which actions are due follows from the alarms (diagnostics/alarms), so a resumed run
decides the same. The actions leave two things behind: the filter's share and the steps that were rolled back. They are state, and every
checkpoint holds them. Steps that were rolled back no longer count for alarms, early stopping and the automatic filter.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tether.core.alarms import Alarm
from tether.diagnostics.alarms.actions import AlarmAction, change_filter, due_actions, evidence_start, reason_to_stop
from tether.diagnostics.settings import Action
from tether.runs.checkpoints import checkpoint_name, list_checkpoints, step_of
from tether.runs.schema import StepRecord
from tether.training.batch import FilterInputs
from tether.training.checkpoint import rollback
from tether.training.hooks import Hook, Run, write_record
from tether.training.settings import RunSettings

FIRST_SCORE, RECENT_STEPS = "groups/first_score/", 10
"""Early decision compares a prompt with the mean of these metrics, by environment, over so many steps."""


class AlarmActions(Hook):
    """The state that alarm actions change, and the actions themselves."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings, self._filter = settings.alarms, settings.filter
        self.keep = settings.filter.keep
        """The share that the filter keeps."""
        self.rolled_back: list[tuple[int, int]] = []
        """First and last step of each stretch whose updates were undone."""

    def on_step(self, run: Run, record: StepRecord) -> StepRecord:
        """Carry out what is due and put it on the record; a checkpoint of this step includes it."""
        due = self.due(record)
        done = [f"{entry.action} for {entry.alarm.name}: {self._act(run, entry, due)}" for entry in due]
        if not done:
            return record
        record = write_record(run, dataclasses.replace(record, notes=[*record.notes, *done]))
        if any(entry.action is Action.CHECKPOINT for entry in due):  # last: it holds what the others changed
            run.save()
        return record

    def stop_reason(self, run: Run) -> str | None:
        """Why the alarms of the last step end the run, or None."""
        if not run.records:
            return None
        record = run.records[-1]
        now = self._rolled_back_at(record.step)
        return reason_to_stop(self.due(record), self._settings, roll_backs=len(self.rolled_back), rolled_back_now=now)

    def due(self, record: StepRecord) -> list[AlarmAction]:
        """The actions that the alarms on a record set off."""
        return due_actions([Alarm.from_json(data) for data in record.alarms], record.step, self._settings)

    def counting(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """The records whose steps were not rolled back."""
        if not self.rolled_back:  # nearly always, and asked several times a step
            return list(records)
        return [record for record in records if not any(first <= record.step <= last for first, last in self.rolled_back)]

    def filter_inputs(self, records: Sequence[StepRecord]) -> FilterInputs:
        """What the filter of the next batch is told: the share to keep, and the ratios of the recent steps that count."""
        counting = self.counting(records)
        ratios = [record.metrics["groups/rv_ratio"] for record in counting if "groups/rv_ratio" in record.metrics]
        scores: dict[str, list[float]] = {}
        for record in counting[-RECENT_STEPS:]:
            for name, value in record.metrics.items():
                if name.startswith(FIRST_SCORE):
                    scores.setdefault(name.removeprefix(FIRST_SCORE), []).append(value)
        recent = {env: sum(values) / len(values) for env, values in scores.items()}
        return FilterInputs(self.keep, tuple(ratios[len(ratios) - min(self._filter.auto_steps - 1, len(ratios)) :]), recent)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {"keep": self.keep, "rolled_back": self.rolled_back}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take back what `state` gave, or what tether 0.1 wrote as `undone`."""
        stretches = state["rolled_back"] if "rolled_back" in state else state["undone"]
        self.keep, self.rolled_back = float(state["keep"]), [(int(first), int(last)) for first, last in stretches]

    def _rolled_back_at(self, step: int) -> bool:
        return any(last == step for _, last in self.rolled_back)

    def _act(self, run: Run, entry: AlarmAction, due: Sequence[AlarmAction]) -> str:
        if entry.action in (Action.TIGHTEN_FILTER, Action.LOOSEN_FILTER):
            self.keep, sentence = change_filter(self.keep, entry.action, self._settings)
            return sentence
        if entry.action is Action.CHECKPOINT:
            return f"written to {checkpoint_name(run.step)}"
        if entry.action is Action.STOP:
            return "the run ends here"
        if self._rolled_back_at(run.step):
            return "done already in this step"
        if len(self.rolled_back) >= self._settings.roll_backs:
            return "all rollbacks are used up, the run ends here"
        asking = [other.alarm for other in due if other.action is Action.ROLL_BACK]
        run.saver.finish()  # which checkpoints there are must not depend on how fast the disk is
        healthy = run.ranks.broadcast_object(lambda: last_healthy(run.store.checkpoints, asking, self.rolled_back))
        if healthy is None:
            return "no checkpoint from before the decline is left, continuing without; raise checkpoint.keep or lower checkpoint.every"
        # Steps keep counting: nothing is replayed.
        run.ranks.barrier(lambda: rollback(healthy, run.learner))
        run.rollouts.replace_weights(run.step)
        self.rolled_back.append((step_of(healthy) + 1, run.step))
        run.monitor.forget(step_of(healthy) + 1, run.step)
        return f"continuing with the weights of step {step_of(healthy)}"


def last_healthy(checkpoints: Path, alarms: Sequence[Alarm], rolled_back: Sequence[tuple[int, int]]) -> Path | None:
    """The newest checkpoint from before the windows in which the numbers of these alarms are bad, or None if none of them is left.

    The weights of a step play the next one, so that one must lie before the windows too. Checkpoints of rolled-back steps do not count,
    except for the last of a stretch: it was written after the rollback.
    """
    bad_since = evidence_start(alarms)
    healthy = [path for path in list_checkpoints(checkpoints) if step_of(path) + 1 < bad_since]
    return next((path for path in reversed(healthy) if not any(first <= step_of(path) < last for first, last in rolled_back)), None)
