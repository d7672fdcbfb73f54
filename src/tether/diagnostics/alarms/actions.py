"""Decisions about the actions of alarms: which are due, how the filter changes, whether the run stops. Training carries them out.

An alarm acts at the step at which it begins, and again every `alarms.cooldown` steps while it stands. Both follow from the alarms
themselves, so nothing needs to be remembered for a resumed run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tether.core.alarms import Alarm
from tether.diagnostics.settings import Action, AlarmSettings


@dataclass(frozen=True, slots=True)
class AlarmAction:
    """An action that is due, and the alarm that asks for it."""

    alarm: Alarm
    action: Action


def due_actions(alarms: Sequence[Alarm], step: int, settings: AlarmSettings) -> list[AlarmAction]:
    """The actions that the alarms of a step set off, in the order of the alarms."""
    acting = [alarm for alarm in alarms if (step - alarm.began) % settings.cooldown == 0]
    return [AlarmAction(alarm, action) for alarm in acting for action in settings.of(alarm.name, alarm.severity)]


def change_filter(keep: float, action: Action, settings: AlarmSettings) -> tuple[float, str]:
    """The filter's new share after a tightening or loosening action, and a sentence for the record.

    Tightening ends at `settings.least_keep`, loosening at 1. A run that begins below `least_keep` stays where it is.
    """
    least = min(settings.least_keep, keep)
    changed = max(least, keep - settings.filter_step) if action is Action.TIGHTEN_FILTER else min(1.0, keep + settings.filter_step)
    if changed == keep:
        return keep, f"the filter still keeps {keep:g}: its limit is reached"
    return changed, f"the filter keeps {changed:g} from now on, instead of {keep:g}"


def reason_to_stop(due: Sequence[AlarmAction], settings: AlarmSettings, *, roll_backs: int, rolled_back_now: bool) -> str | None:
    """Why the due actions of a step end the run, or None.

    Args:
        due: the result of `due_actions`.
        roll_backs: rollbacks of the run so far.
        rolled_back_now: whether this step itself was rolled back; its request for a rollback was then fulfilled.
    """
    for each in due:
        if each.action is Action.STOP:
            return f"alarm {each.alarm.name}"
        if each.action is Action.ROLL_BACK and roll_backs >= settings.roll_backs and not rolled_back_now:
            return f"alarm {each.alarm.name} after {settings.roll_backs} rollbacks (alarms.roll_backs)"
    return None


def evidence_start(alarms: Sequence[Alarm]) -> int:
    """The first step of the windows in which the numbers of these alarms are bad; a healthy checkpoint lies before it.

    The weights of a step play the next step, so the next step must lie before the windows as well.
    """
    return min(evidence.steps[0] for alarm in alarms for evidence in alarm.evidence)
