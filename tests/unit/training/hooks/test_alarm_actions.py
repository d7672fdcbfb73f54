"""Reactions: which actions are due when, what they change, what is kept of it, and which settings are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tether.core.alarms import Alarm, AlarmName, Evidence, Severity
from tether.core.config import dump_yaml, parse_overrides, validate
from tether.core.enums import FinishReason, StopReason
from tether.core.errors import ConfigError
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.settings import Action
from tether.runs.schema import StepRecord
from tether.training.hooks.alarms import AlarmActions, last_healthy
from tether.training.settings import RunSettings

CRITICAL, WARNING = Severity.CRITICAL, Severity.WARNING


def _settings(**sections: Any) -> RunSettings:
    return validate(RunSettings, {"env": {"name": "frozen_lake"}, **sections})


def _alarm(name: str, began: int, severity: Severity = CRITICAL, *windows: tuple[int, int]) -> Alarm:
    evidence = tuple(Evidence("groups/rv_mean", 0.0, window, "tested") for window in windows or ((began, began),))
    return Alarm(AlarmName(name), severity, began, evidence, "a cause", "a remedy")


def _record(step: int, *alarms: Alarm) -> StepRecord:
    return StepRecord(step, {}, alarms=[alarm.to_json() for alarm in alarms])


def _due(reactions: AlarmActions, record: StepRecord) -> list[tuple[str, str]]:
    return [(str(reaction.alarm.name), str(reaction.action)) for reaction in reactions.due(record)]


# What is due.


def test_a_name_counts_more_than_a_severity() -> None:
    actions = {"critical": ["stop"], "warning": "checkpoint", "length_collapse": ["tighten_filter", "checkpoint"], "repeated_text": []}
    reactions = AlarmActions(_settings(alarms={"actions": actions}))
    alarms = [_alarm("length_collapse", 5), _alarm("repeated_text", 5), _alarm("information_falls", 5, WARNING)]
    assert _due(reactions, _record(5, *alarms, _alarm("retrieval_at_chance", 5))) == [
        ("length_collapse", "tighten_filter"),
        ("length_collapse", "checkpoint"),
        ("information_falls", "checkpoint"),
        ("retrieval_at_chance", "stop"),
    ]
    assert _due(AlarmActions(_settings()), _record(5, *alarms)) == [], "without being asked nothing acts"


def test_an_alarm_that_stands_acts_again_after_the_cooldown() -> None:
    reactions = AlarmActions(_settings(alarms={"actions": {"critical": "checkpoint"}, "cooldown": 3}))
    steps = [step for step in range(4, 15) if _due(reactions, _record(step, _alarm("length_collapse", 4)))]
    assert steps == [4, 7, 10, 13]


# The filter.


def test_tightening_ends_at_the_least_and_loosening_at_all() -> None:
    reactions = AlarmActions(_settings(alarms={"filter_step": 0.2, "least_keep": 0.5}))
    assert reactions.keep == 0.9
    said = [reactions.change_filter(Action.TIGHTEN_FILTER) for _ in range(3)]
    assert said == [
        "the filter keeps 0.7 from now on, instead of 0.9",
        "the filter keeps 0.5 from now on, instead of 0.7",
        "the filter keeps 0.5 as before: that is as far as it goes",
    ]
    said = [reactions.change_filter(Action.LOOSEN_FILTER) for _ in range(4)]
    assert said[2] == "the filter keeps 1 from now on, instead of 0.9" and said[3].endswith("that is as far as it goes")
    assert reactions.keep == 1


def test_tightening_never_loosens() -> None:
    """A run may begin below the end of tightening."""
    reactions = AlarmActions(_settings(filter={"keep": 0.2}))
    assert reactions.change_filter(Action.TIGHTEN_FILTER) == "the filter keeps 0.2 as before: that is as far as it goes"
    assert reactions.keep == 0.2


# Stopping.


def test_stop() -> None:
    reactions = AlarmActions(_settings(alarms={"actions": {"length_collapse": ["checkpoint", "stop"]}}))
    assert reactions.reason_to_stop(None) is None
    assert reactions.reason_to_stop(_record(3, _alarm("repeated_text", 3))) is None
    assert reactions.reason_to_stop(_record(3, _alarm("repeated_text", 3), _alarm("length_collapse", 3))) == "alarm length_collapse"
    assert reactions.reason_to_stop(_record(4, _alarm("length_collapse", 3))) is None, "it acted when it began"


def test_a_run_that_asks_for_one_roll_back_too_many_stops() -> None:
    reactions = AlarmActions(_settings(alarms={"actions": {"critical": "roll_back"}, "roll_backs": 2}))
    record = _record(20, _alarm("length_collapse", 20))
    reactions.rolled_back = [(3, 9)]
    assert not reactions.may_not_roll_back and reactions.reason_to_stop(record) is None
    reactions.rolled_back = [(3, 9), (3, 20)]
    assert reactions.may_not_roll_back and reactions.rolled_back_at(20) and not reactions.rolled_back_at(19)
    assert reactions.reason_to_stop(record) is None, "the second one is what this step did"
    reactions.rolled_back = [(3, 9), (3, 12)]
    assert reactions.reason_to_stop(record) == "alarm length_collapse after 2 roll-backs (alarms.roll_backs)"


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


def test_checkpoints_of_steps_that_were_taken_back_are_not_healthy(tmp_path: Path) -> None:
    """Step 6 ended with a roll-back to step 2: 3 to 5 are what was wrong, 6 holds the weights of 2."""
    folder = _checkpoints(tmp_path, 2, 3, 4, 5, 6, 7)
    assert _healthy(folder, [(3, 6)], _alarm("length_collapse", 9, CRITICAL, (8, 9))) == "6"
    assert _healthy(folder, [(3, 6)], _alarm("length_collapse", 9, CRITICAL, (7, 9))) == "2"
    assert _healthy(folder, [(3, 6), (3, 8)], _alarm("length_collapse", 11, CRITICAL, (9, 11))) == "2"


def test_steps_that_were_taken_back_do_not_count() -> None:
    """Two steps in a row without reward variance are an alarm here; they are 4 and 5, or 3 and 6 where 4 and 5 were taken back."""
    rules = {"start_steps": 8, "recent_steps": 2, "step_p": 0.03}
    reactions = AlarmActions(_settings(alarms={"rules": rules}))
    records = [StepRecord(step, {"groups/rv_mean": 0.5 if step < 4 else 0.0}) for step in range(1, 7)]
    raised = reactions.raised(records[:4], records[4])
    assert [alarm["name"] for alarm in raised.alarms] == ["reward_variance_collapse"]
    assert raised.metrics == {"groups/rv_mean": 0, "alarms/warning": 0, "alarms/critical": 1}
    assert len(raised.notes) == 1 and raised.notes[0].startswith("critical: reward_variance_collapse since step 5: groups/rv_mean 0 ")
    later = reactions.raised(records[:5], records[5])
    assert len(later.alarms) == 1 and later.notes == [], "it is a note where it begins"
    reactions.rolled_back = [(4, 5)]
    assert reactions.raised(records[:5], records[5]).alarms == []
    assert reactions.raised(records[:5], records[5]).metrics["alarms/critical"] == 0
    assert [record.step for record in reactions.counting(records)] == [1, 2, 3, 6]


def test_state() -> None:
    reactions, other = AlarmActions(_settings()), AlarmActions(_settings())
    reactions.change_filter(Action.TIGHTEN_FILTER)
    reactions.rolled_back.append((3, 6))
    other.restore(json.loads(json.dumps(reactions.state())))
    assert (other.keep, other.rolled_back) == (0.8, [(3, 6)]) and other.state() == reactions.state()


# Repeated text.


def _turn(text: str, observation: str = "") -> Turn:
    return Turn((1,), (2,), (-0.5,), FinishReason.STOP_TEXT, text, None, observation=observation)


def test_repetition_is_counted_over_the_reasonings() -> None:
    again = "go left go left go left go left go left go left"
    turns = [
        _turn(f"<think>{again}</think><answer>Left</answer>"),
        _turn("<think>The hole is right of me, so I walk down first.</think><answer>Down</answer>"),
        _turn("<answer>Down</answer>"),
        _turn(f"<think>{again}</think><answer>Left</answer>", observation=again),
        _turn("<think>!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!</think><answer>Up</answer>"),
    ]
    group = Group(0, 0, [Trajectory(0, 0, 0, turns[:2], StopReason.FAILURE), Trajectory(0, 1, 0, turns[2:], StopReason.FAILURE)])
    reactions = AlarmActions(_settings())
    counted = reactions.repetition([group])
    assert counted["reasonings"] == 4
    assert counted["repeated_text"] == pytest.approx(0.5), "what only repeats the observation is no repetition of its own"
    assert reactions.repetition([]) == {"reasonings": 0, "repeated_text": 0}


def test_the_token_budget_of_the_run_is_the_rules_own() -> None:
    lengths = [{"rollout/response_tokens": 10.0}] * 10 + [{"rollout/response_tokens": 95.0}] * 8
    records = [StepRecord(step, metrics) for step, metrics in enumerate(lengths, 1)]
    for max_tokens, alarms in ((100, ["length_explosion"]), (200, [])):
        raised = AlarmActions(_settings(rollout={"max_tokens": max_tokens})).raised(records[:-1], records[-1])
        assert [alarm["name"] for alarm in raised.alarms] == alarms
    own = AlarmActions(_settings(rollout={"max_tokens": 200}, alarms={"rules": {"max_tokens": 100}})).raised(records[:-1], records[-1])
    assert [alarm["name"] for alarm in own.alarms] == ["length_explosion"]


# Settings.


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
