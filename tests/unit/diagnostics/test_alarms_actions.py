"""Actions of alarms: which are due when, and what they make of the filter's share."""

from tether.core.alarms import Alarm, AlarmName, Evidence, Severity
from tether.diagnostics.alarms.actions import change_filter, due_actions, evidence_start, reason_to_stop
from tether.diagnostics.settings import Action, AlarmSettings

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING
TIGHTEN, LOOSEN = Action.TIGHTEN_FILTER, Action.LOOSEN_FILTER


def _alarm(name: str, began: int, severity: Severity = CRITICAL) -> Alarm:
    return Alarm(AlarmName(name), severity, began, (Evidence("groups/rv_mean", 0.0, (began, began), "tested"),), "a cause", "a remedy")


def _due(alarms: list[Alarm], step: int, settings: AlarmSettings) -> list[tuple[str, str]]:
    return [(str(due.alarm.name), str(due.action)) for due in due_actions(alarms, step, settings)]


def test_a_name_counts_more_than_a_severity() -> None:
    actions = {"critical": ["stop"], "warning": "checkpoint", "length_collapse": ["tighten_filter", "checkpoint"], "repeated_text": []}
    alarms = [_alarm("length_collapse", 5), _alarm("repeated_text", 5), _alarm("information_falls", 5, WARNING)]
    settings = AlarmSettings.model_validate({"actions": actions})
    assert _due([*alarms, _alarm("retrieval_at_chance", 5)], 5, settings) == [
        ("length_collapse", "tighten_filter"),
        ("length_collapse", "checkpoint"),
        ("information_falls", "checkpoint"),
        ("retrieval_at_chance", "stop"),
    ]
    assert _due(alarms, 5, AlarmSettings()) == [], "no action is configured"


def test_an_alarm_that_stands_acts_again_after_the_cooldown() -> None:
    settings = AlarmSettings.model_validate({"actions": {"critical": "checkpoint"}, "cooldown": 3})
    assert [step for step in range(4, 15) if _due([_alarm("length_collapse", 4)], step, settings)] == [4, 7, 10, 13]


def test_tightening_ends_at_the_least_and_loosening_at_all() -> None:
    settings, keep, said = AlarmSettings(filter_step=0.2, least_keep=0.5), 0.9, []
    for action in [TIGHTEN] * 3 + [LOOSEN] * 4:
        keep, words = change_filter(keep, action, settings)
        said.append(words)
    assert said[:3] == [
        "the filter keeps 0.7 from now on, instead of 0.9",
        "the filter keeps 0.5 from now on, instead of 0.7",
        "the filter still keeps 0.5: its limit is reached",
    ]
    assert said[5] == "the filter keeps 1 from now on, instead of 0.9" and said[6] == "the filter still keeps 1: its limit is reached"
    assert keep == 1


def test_tightening_never_loosens() -> None:
    """A run may begin below the end of tightening."""
    assert change_filter(0.2, TIGHTEN, AlarmSettings()) == (0.2, "the filter still keeps 0.2: its limit is reached")


def test_stop() -> None:
    settings = AlarmSettings.model_validate({"actions": {"length_collapse": ["checkpoint", "stop"]}})

    def reason(step: int, *alarms: Alarm) -> str | None:
        return reason_to_stop(due_actions(alarms, step, settings), settings, roll_backs=0, rolled_back_now=False)

    assert reason(3) is None and reason(3, _alarm("repeated_text", 3)) is None
    assert reason(3, _alarm("repeated_text", 3), _alarm("length_collapse", 3)) == "alarm length_collapse"
    assert reason(4, _alarm("length_collapse", 3)) is None, "it acted when it began"


def test_a_run_that_asks_for_one_roll_back_too_many_stops() -> None:
    settings = AlarmSettings.model_validate({"actions": {"critical": "roll_back"}, "roll_backs": 2})
    due = due_actions([_alarm("length_collapse", 20)], 20, settings)
    assert reason_to_stop(due, settings, roll_backs=1, rolled_back_now=False) is None
    assert reason_to_stop(due, settings, roll_backs=2, rolled_back_now=True) is None, "the second one is what this step did"
    found = reason_to_stop(due, settings, roll_backs=2, rolled_back_now=False)
    assert found == "alarm length_collapse after 2 rollbacks (alarms.roll_backs)"


def test_the_evidence_starts_with_its_earliest_window() -> None:
    early = Alarm(AlarmName.REPEATED_TEXT, CRITICAL, 9, (Evidence("a", 0.0, (7, 9), ""), Evidence("b", 0.0, (4, 9), "")), "", "")
    assert evidence_start([_alarm("length_collapse", 9), early]) == 4 and evidence_start([_alarm("length_collapse", 9)]) == 9
