"""Which actions the alarms of a step set off, and what an action makes of the filter. Training carries the actions out.

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
