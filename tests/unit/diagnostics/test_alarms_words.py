"""Alarms through JSON, and the counts of repeated text that a run recorded itself."""

import json

import pytest

from tether.core.alarms import Alarm, AlarmName, Evidence, Severity
from tether.diagnostics.alarms.tracker import StepReasoning, check
from tether.runs.schema import StepRecord


def test_an_alarm_through_json_is_the_same_alarm() -> None:
    evidence = (
        Evidence("groups/rv_mean", 0.01, (41, 48), "rank-sum p = 0.00002", 0.2, (1, 10)),
        Evidence("information/retrieval_acc", 0.125, (40, 48), "holds chance"),
    )
    alarm = Alarm(AlarmName.INPUT_AGNOSTIC_TEXT, Severity.CRITICAL, 47, evidence, "a cause", "a remedy")
    written = json.loads(json.dumps(alarm.to_json()))
    assert written["name"] == "input_agnostic_text" and written["evidence"][0]["reference_steps"] == [1, 10]
    back = Alarm.from_json(written)
    assert back == alarm == Alarm.from_json(alarm.to_json())
    assert isinstance(back.name, AlarmName) and isinstance(back.severity, Severity) and back.sentence() == alarm.sentence()
    assert back.evidence[1].reference_steps is None and str(back.evidence[0]) == str(evidence[0])


def test_alarms_of_a_record_through_json() -> None:
    """The real ones: no reward variance in eight steps."""
    records = [StepRecord(step, {"groups/rv_mean": 0.0, "rollout/success": 0.0}) for step in range(1, 9)]
    (alarm,) = check(records)
    assert Alarm.from_json(json.loads(json.dumps(alarm.to_json()))) == alarm


def _counted(step: int, reasonings: float | None, share: float | None) -> StepRecord:
    values = {"rollout/reasonings": reasonings, "rollout/repeated_text": share}
    return StepRecord(step, {name: value for name, value in values.items() if value is not None})


def test_counts_that_a_run_recorded() -> None:
    """Steps without reasonings, and steps whose number of reasonings is not on record, are not among the three that are pooled."""
    records = [_counted(1, 30, 0.5), _counted(2, 7, 3 / 7), _counted(3, 0, 0), _counted(4, None, None), _counted(5, None, 0.5)]
    assert check(records) == []
    (alarm,) = check([*records, _counted(6, 13, 2 / 13)])
    (evidence,) = alarm.evidence
    assert evidence.steps == (1, 6) and evidence.value == pytest.approx(20 / 50), "15 of 30, 3 of 7, 2 of 13"


def test_texts_at_hand_count_more_than_what_was_recorded() -> None:
    """The record alone raises the alarm; sensible texts of the same steps replace its counts; blank texts do not."""
    records = [_counted(step, 40, 0.9) for step in (1, 2, 3)]
    assert [alarm.name for alarm in check(records)] == [AlarmName.REPEATED_TEXT]
    assert check(records, [StepReasoning(step, "x", f"I try {step}") for step in (1, 2, 3) for _ in range(30)]) == []
    assert check(records, [StepReasoning(1, "x", "  ")]) == check(records)


def test_repeated_text_is_raised_from_the_record_alone() -> None:
    records = [_counted(step, 40, 0.0 if step < 4 else 0.9) for step in range(1, 7)]
    (alarm,) = check(records)
    assert (alarm.name, alarm.began, alarm.evidence[0].steps, alarm.evidence[0].value) == (AlarmName.REPEATED_TEXT, 5, (4, 6), 0.9)
    assert check(records[:4]) == []
