"""Alarm actions: when a run stops, which checkpoint is healthy, what is kept in a checkpoint, and which settings are refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from tether.core.alarms import Alarm, AlarmName, Evidence, Severity
from tether.core.config import dump_yaml, parse_overrides, validate
from tether.core.errors import ConfigError
from tether.diagnostics.monitor import Health, Monitor
from tether.diagnostics.settings import Action
from tether.runs.schema import StepRecord
from tether.training.alarm_actions import AlarmActions, last_healthy
from tether.training.settings import RunSettings

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING


def _settings(**sections: Any) -> RunSettings:
    return validate(RunSettings, {"env": {"name": "frozen_lake"}, **sections})


def _alarm(name: str, began: int, severity: Severity = CRITICAL, *windows: tuple[int, int]) -> Alarm:
    evidence = tuple(Evidence("groups/rv_mean", 0.0, window, "tested") for window in windows or ((began, began),))
    return Alarm(AlarmName(name), severity, began, evidence, "a cause", "a remedy")


def _record(step: int, *alarms: Alarm) -> StepRecord:
    return StepRecord(step, {}, alarms=[alarm.to_json() for alarm in alarms])


# What a run does about an alarm is decided in diagnostics/alarms/actions.py; here is what the hook adds.


@dataclass
class _Run:
    """As much of a run as stopping looks at."""

    records: list[StepRecord]


def _stops(actions: AlarmActions, *records: StepRecord) -> str | None:
    return actions.stop_reason(cast(Any, _Run(list(records))))


def test_without_being_configured_nothing_acts() -> None:
    record = _record(5, _alarm("length_collapse", 5), _alarm("information_falls", 5, WARNING))
    assert AlarmActions(_settings()).due(record) == [] and _stops(AlarmActions(_settings()), record) is None


def test_stop() -> None:
    """The alarms of the last record decide."""
    actions = AlarmActions(_settings(alarms={"actions": {"length_collapse": ["checkpoint", "stop"]}}))
    stops = _record(3, _alarm("repeated_text", 3), _alarm("length_collapse", 3))
    assert _stops(actions) is None
    assert _stops(actions, _record(3, _alarm("repeated_text", 3))) is None
    assert _stops(actions, stops) == "alarm length_collapse"
    assert _stops(actions, stops, _record(4, _alarm("length_collapse", 3))) is None, "it acted when it began"


def test_a_run_that_asks_for_one_rollback_too_many_stops() -> None:
    actions = AlarmActions(_settings(alarms={"actions": {"critical": "roll_back"}, "roll_backs": 2}))
    record = _record(20, _alarm("length_collapse", 20))
    actions.rolled_back = [(3, 9)]
    assert _stops(actions, record) is None
    actions.rolled_back = [(3, 9), (3, 20)]
    assert _stops(actions, record) is None, "the second one is what this step did"
    actions.rolled_back = [(3, 9), (3, 12)]
    assert _stops(actions, record) == "alarm length_collapse after 2 rollbacks (alarms.roll_backs)"


# Rolling back.


def _checkpoints(folder: Path, *steps: int) -> Path:
    for step in steps:
        (folder / f"step_{step:06d}").mkdir()
        (folder / f"step_{step:06d}" / "state.pt").touch()
    return folder


def _healthy(folder: Path, rolled_back: list[tuple[int, int]], *alarms: Alarm) -> str | None:
    path = last_healthy(folder, alarms, rolled_back)
    return None if path is None else path.name.lstrip("step_0")


def test_the_last_healthy_checkpoint(tmp_path: Path) -> None:
    """Weights of step 6 play step 7: with step 7 in the window they are not healthy."""
    folder = _checkpoints(tmp_path, 2, 4, 5, 6, 8)
    assert _healthy(folder, [], _alarm("length_collapse", 9, CRITICAL, (7, 9))) == "5"
    assert _healthy(folder, [], _alarm("length_collapse", 9, CRITICAL, (7, 9), (6, 9))) == "4", "every window counts"
    assert _healthy(folder, [], _alarm("length_collapse", 9, CRITICAL, (7, 9)), _alarm("repeated_text", 9, CRITICAL, (4, 9))) == "2"
    assert _healthy(folder, [], _alarm("length_collapse", 9, CRITICAL, (3, 9))) is None
    assert _healthy(folder, [], _alarm("length_collapse", 9, CRITICAL, (100, 109))) == "8"


def test_checkpoints_of_rolled_back_steps_are_not_healthy(tmp_path: Path) -> None:
    """Step 6 ended with a rollback to step 2: 3 to 5 are what was wrong, 6 holds the weights of 2."""
    folder = _checkpoints(tmp_path, 2, 3, 4, 5, 6, 7)
    assert _healthy(folder, [(3, 6)], _alarm("length_collapse", 9, CRITICAL, (8, 9))) == "6"
    assert _healthy(folder, [(3, 6)], _alarm("length_collapse", 9, CRITICAL, (7, 9))) == "2"
    assert _healthy(folder, [(3, 6), (3, 8)], _alarm("length_collapse", 11, CRITICAL, (9, 11))) == "2"


def test_rolled_back_steps_do_not_count() -> None:
    """Two steps in a row without reward variance are an alarm here; they are 4 and 5, or 3 and 6 where 4 and 5 were rolled back."""
    settings = _settings(alarms={"rules": {"start_steps": 8, "recent_steps": 2, "step_p": 0.03}})
    actions = AlarmActions(settings)
    records = [StepRecord(step, {"groups/rv_mean": 0.5 if step < 4 else 0.0}) for step in range(1, 7)]
    assert [alarm.name for alarm in _observed(settings, actions.counting(records)).alarms] == ["reward_variance_collapse"]
    actions.rolled_back = [(4, 5)]
    assert [record.step for record in actions.counting(records)] == [1, 2, 3, 6]
    assert _observed(settings, actions.counting(records)).alarms == []


def _observed(settings: RunSettings, records: Sequence[StepRecord]) -> Health:
    """What a resumed run's monitor says of the last record, after it has replayed those before it."""
    monitor = Monitor(None, every=0, rules=settings.alarms.rules)
    monitor.replay((record.step, record.metrics) for record in records[:-1])
    return monitor.observe(records[-1].step, prompts=[], reasonings=[], groups=[], metrics=records[-1].metrics)


def test_state() -> None:
    actions, other = AlarmActions(_settings()), AlarmActions(_settings())
    actions.keep = 0.8
    actions.rolled_back.append((3, 6))
    other.restore(json.loads(json.dumps(actions.state())))
    assert (other.keep, other.rolled_back) == (0.8, [(3, 6)]) and other.state() == actions.state()


def test_the_state_of_a_checkpoint_of_tether_0_1_restores() -> None:
    actions = AlarmActions(_settings())
    actions.restore({"keep": 0.7, "undone": [[3, 6]]})
    assert actions.state() == {"keep": 0.7, "rolled_back": [(3, 6)]}


# Settings, by the names they have in a run.


def test_one_action_needs_no_brackets_and_survives_a_dump() -> None:
    settings = _settings(alarms={"actions": {"critical": "stop", "repeated_text": ["checkpoint", "roll_back"]}})
    assert settings.alarms.actions == {"critical": [Action.STOP], "repeated_text": [Action.CHECKPOINT, Action.ROLL_BACK]}
    assert validate(RunSettings, yaml.safe_load(dump_yaml(settings))) == settings


def test_from_the_command_line() -> None:
    pairs = ["alarms.actions.retrieval_at_chance=stop", "alarms.actions.critical=[checkpoint,roll_back]", "alarms.cooldown=4"]
    alarms = _settings(**parse_overrides(pairs)).alarms
    assert alarms.actions == {"retrieval_at_chance": [Action.STOP], "critical": [Action.CHECKPOINT, Action.ROLL_BACK]}
    assert alarms.cooldown == 4


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"alarms": {"actions": {"retrieval_at_chanse": "stop"}}},
            "holds 'retrieval_at_chanse', which is not an alarm: did you mean 'retrieval_at_chance'?",
        ),
        ({"alarms": {"actions": {"criticall": "stop"}}}, "did you mean 'critical'?"),
        ({"alarms": {"actions": {"critical": "explode"}}}, "explode"),
        ({"alarms": {"actions": {"critical": ["stop", "rollback"]}}}, "rollback"),
        ({"alarms": {"actions": "stop"}}, "alarms.actions"),
        ({"alarms": {"actions": {"critical": None}}}, "alarms.actions"),
        ({"alarms": {"cooldown": 0}}, "alarms.cooldown': got 0"),
        ({"alarms": {"roll_backs": 0}}, "alarms.roll_backs': got 0"),
        ({"alarms": {"least_keep": 1.0}}, "alarms.least_keep"),
        ({"alarms": {"rules": {"step_p": 1e-9}}}, "step_p is 1e-09, but windows of 10 and 8 reach"),
        (
            {"alarms": {"actions": {"critical": "tighten_filter"}}, "filter": {"strategy": "all"}},
            "asks for tighten_filter, but filter.strategy 'all' has no share to change; choose top_p",
        ),
        (
            {"alarms": {"actions": {"warning": "loosen_filter"}}, "filter": {"strategy": "band", "band": [0.2, 0.8]}},
            "asks for loosen_filter, but filter.strategy 'band'",
        ),
        ({"diagnosis": {"scopes": ["turn"]}}, "name first_turn"),
        ({"diagnosis": {"scopes": ["first_turn", "turn", "turn"]}}, "each scope once"),
        ({"diagnosis": {"scopes": ["first_turn", "turns"]}}, "diagnosis.scopes"),
        ({"diagnosis": {"budget": 0}}, "diagnosis.budget"),
        ({"diagnosis": {"budget": 1.1}}, "diagnosis.budget"),
        ({"diagnosis": {"contexts": 7}}, "diagnosis.contexts': got 7"),
        ({"diagnosis": {"gradients": {"buckets": 0}}}, "diagnosis.gradients.buckets': got 0"),
        ({"diagnosis": {"gradients": {"evry": 2}}}, "did you mean 'diagnosis.gradients.every'"),
    ],
)
def test_what_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _settings(**sections)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_other_actions_leave_the_filter_free() -> None:
    assert _settings(alarms={"actions": {"critical": "roll_back"}}, filter={"strategy": "all"}).filter.strategy == "all"
