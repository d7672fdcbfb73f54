"""What a run does about its alarms.

Alarms follow from the record alone (diagnostics/alarms), so nothing about them is remembered: a resumed run raises them again. An alarm
acts at the step it begins, and again every `alarms.cooldown` steps while it stands. What actions leave behind, the filter's share and the
steps that were taken back, is kept here and goes into the checkpoint; steps that were taken back no longer speak for the run.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.alarms import Alarm, Severity
from tether.core.grammar import parse_response
from tether.core.types import Group
from tether.diagnostics.alarms.repetition import repeated_part
from tether.diagnostics.alarms.tracker import check
from tether.diagnostics.settings import AlarmRules
from tether.runs.schema import StepRecord
from tether.training.checkpoint import list_checkpoints, step_of
from tether.training.diagnosis_settings import Action, AlarmSettings
from tether.training.settings import RunSettings


@dataclass(frozen=True, slots=True)
class AlarmAction:
    """One action that is due, and the alarm that asks for it."""

    alarm: Alarm
    action: Action


class AlarmActions:
    """The alarms of a run, and the state that their actions change."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings: AlarmSettings = settings.alarms
        self._rules: AlarmRules = settings.alarms.rules
        if self._rules.max_tokens is None:
            self._rules = self._rules.model_copy(update={"max_tokens": settings.rollout.max_tokens})
        self.keep = settings.filter.keep
        """What the filter keeps."""
        self.rolled_back: list[tuple[int, int]] = []
        """First and last step of the stretches whose updates were taken back."""

    def repetition(self, groups: Sequence[Group]) -> dict[str, float]:
        """The "rollout/" metrics on degenerate text."""
        turns = [turn for group in groups for trajectory in group.trajectories for turn in trajectory.turns]
        written = [(thought, turn.observation) for turn in turns if (thought := parse_response(turn.text).reasoning)]
        repeating = sum(repeated_part(thought, observation) > self._rules.repeated_part for thought, observation in written)
        return {"reasonings": len(written), "repeated_text": repeating / max(1, len(written))}

    def raised(self, earlier: Sequence[StepRecord], record: StepRecord) -> StepRecord:
        """The record of a step with the alarms that stand at it; one that begins now is also a note."""
        alarms = check(self.counting([*earlier, record]), rules=self._rules)
        metrics = {**record.metrics, **{f"alarms/{severity}": float(sum(a.severity is severity for a in alarms)) for severity in Severity}}
        notes = [*record.notes, *(alarm.sentence() for alarm in alarms if alarm.began == record.step)]
        return dataclasses.replace(record, metrics=metrics, notes=notes, alarms=[alarm.to_json() for alarm in alarms])

    def counting(self, records: Sequence[StepRecord]) -> list[StepRecord]:
        """Those of the records whose steps were not taken back."""
        return [record for record in records if not any(first <= record.step <= last for first, last in self.rolled_back)]

    def due(self, record: StepRecord) -> list[AlarmAction]:
        """What the alarms of a step set off, in their order."""
        alarms = [Alarm.from_json(data) for data in record.alarms]
        acting = [alarm for alarm in alarms if (record.step - alarm.began) % self._settings.cooldown == 0]
        return [AlarmAction(alarm, action) for alarm in acting for action in self._settings.of(alarm.name, alarm.severity)]

    def change_filter(self, action: Action) -> str:
        """Move the filter's share; says what was done."""
        before, by = self.keep, self._settings.filter_step
        least = min(self._settings.least_keep, before)
        self.keep = max(least, before - by) if action is Action.TIGHTEN_FILTER else min(1.0, before + by)
        if self.keep == before:
            return f"the filter keeps {before:g} as before: that is as far as it goes"
        return f"the filter keeps {self.keep:g} from now on, instead of {before:g}"

    def reason_to_stop(self, record: StepRecord | None) -> str | None:
        """Why the alarms of the last step end the run, or None."""
        if record is None:
            return None
        for reaction in self.due(record):
            if reaction.action is Action.STOP:
                return f"alarm {reaction.alarm.name}"
            if reaction.action is Action.ROLL_BACK and self.may_not_roll_back and not self.rolled_back_at(record.step):
                return f"alarm {reaction.alarm.name} after {self._settings.roll_backs} roll-backs (alarms.roll_backs)"
        return None

    def rolled_back_at(self, step: int) -> bool:
        """Whether this step ended with a roll-back."""
        return any(last == step for _, last in self.rolled_back)

    @property
    def may_not_roll_back(self) -> bool:
        """All roll-backs are used up."""
        return len(self.rolled_back) >= self._settings.roll_backs

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {"keep": self.keep, "undone": self.rolled_back}

    def restore(self, state: dict[str, Any]) -> None:
        self.keep, self.rolled_back = float(state["keep"]), [(int(first), int(last)) for first, last in state["undone"]]


def last_healthy(checkpoints: Path, alarms: Sequence[Alarm], rolled_back: Sequence[tuple[int, int]]) -> Path | None:
    """The newest checkpoint from before the windows in which the numbers of these alarms are bad, or None if none of them is left.

    Weights of a step play the next one, so that one must lie before the windows too. Checkpoints of steps that were taken back do not
    count, except for the last of them: it was written after the roll-back.
    """
    bad_since = min(evidence.steps[0] for alarm in alarms for evidence in alarm.evidence)
    healthy = [path for path in list_checkpoints(checkpoints) if step_of(path) + 1 < bad_since]
    return next((path for path in reversed(healthy) if not any(first <= step_of(path) < last for first, last in rolled_back)), None)
