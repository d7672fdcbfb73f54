"""The settings of diagnosis: what is accepted, what is refused, and that they survive a dump."""

from typing import Any

import pytest
import yaml

from tether.core.alarms import AlarmName, Severity
from tether.core.config import Settings, dump_yaml, parse_overrides, validate
from tether.core.errors import ConfigError
from tether.diagnostics.settings import Action, AlarmSettings, DiagnosisSettings


def test_one_action_needs_no_brackets_and_survives_a_dump() -> None:
    settings = validate(AlarmSettings, {"actions": {"critical": "stop", "repeated_text": ["checkpoint", "roll_back"]}})
    assert settings.actions == {"critical": [Action.STOP], "repeated_text": [Action.CHECKPOINT, Action.ROLL_BACK]}
    assert validate(AlarmSettings, yaml.safe_load(dump_yaml(settings))) == settings
    assert settings.of(AlarmName.REPEATED_TEXT, Severity.CRITICAL) == [Action.CHECKPOINT, Action.ROLL_BACK]
    assert settings.of(AlarmName.LENGTH_COLLAPSE, Severity.CRITICAL) == [Action.STOP]
    assert settings.of(AlarmName.LENGTH_COLLAPSE, Severity.WARNING) == []
    assert settings.asks_for(Action.STOP, Action.CHECKPOINT, Action.LOOSEN_FILTER) == "checkpoint, stop"


def test_from_the_command_line() -> None:
    pairs = ["actions.retrieval_at_chance=stop", "actions.critical=[checkpoint,roll_back]", "cooldown=4"]
    alarms = validate(AlarmSettings, parse_overrides(pairs))
    assert alarms.actions == {"retrieval_at_chance": [Action.STOP], "critical": [Action.CHECKPOINT, Action.ROLL_BACK]}
    assert alarms.cooldown == 4


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        (
            AlarmSettings,
            {"actions": {"retrieval_at_chanse": "stop"}},
            "holds 'retrieval_at_chanse', which is not an alarm: did you mean 'retrieval_at_chance'?",
        ),
        (AlarmSettings, {"actions": {"criticall": "stop"}}, "did you mean 'critical'?"),
        (AlarmSettings, {"actions": {"critical": "explode"}}, "explode"),
        (AlarmSettings, {"actions": {"critical": ["stop", "rollback"]}}, "rollback"),
        (AlarmSettings, {"actions": "stop"}, "actions"),
        (AlarmSettings, {"actions": {"critical": None}}, "actions"),
        (AlarmSettings, {"cooldown": 0}, "cooldown': got 0"),
        (AlarmSettings, {"roll_backs": 0}, "roll_backs': got 0"),
        (AlarmSettings, {"least_keep": 1.0}, "least_keep"),
        (AlarmSettings, {"rules": {"step_p": 1e-9}}, "step_p is 1e-09, but windows of 10 and 8 reach"),
        (DiagnosisSettings, {"scopes": ["turn"]}, "name first_turn"),
        (DiagnosisSettings, {"scopes": ["first_turn", "turn", "turn"]}, "each scope once"),
        (DiagnosisSettings, {"scopes": ["first_turn", "turns"]}, "scopes"),
        (DiagnosisSettings, {"budget": 0}, "budget"),
        (DiagnosisSettings, {"budget": 1.1}, "budget"),
        (DiagnosisSettings, {"contexts": 7}, "contexts': got 7"),
        (DiagnosisSettings, {"probe_prompts": 1}, "is one prompt, which has no other to be told apart from; give 2 or more, or 0"),
        (DiagnosisSettings, {"probe_prompts": -1}, "probe_prompts': got -1"),
        (DiagnosisSettings, {"probe_samples": 0}, "probe_samples': got 0"),
        (DiagnosisSettings, {"gradients": {"buckets": 0}}, "gradients.buckets': got 0"),
        (DiagnosisSettings, {"gradients": {"evry": 2}}, "did you mean 'gradients.every'"),
    ],
)
def test_what_is_refused(kind: type[Settings], values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(kind, values)
    assert words in str(caught.value) and "\n" not in str(caught.value)
