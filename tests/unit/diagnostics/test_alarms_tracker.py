"""The tracker gives the alarms of the definition, for any history, and asks every rule once per step.

The definition: an alarm stands at a step if its rule says so of the history up to that step; it began at the first step of the unbroken
stretch that ends there. `_by_definition` evaluates it directly, walking back from the last step.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tether.core.alarms import Alarm, AlarmName
from tether.core.seeding import generator
from tether.diagnostics.alarms import tracker as tracker_module
from tether.diagnostics.alarms.history import History
from tether.diagnostics.alarms.rules import RULES, Rule
from tether.diagnostics.alarms.tracker import AlarmTracker, check
from tether.diagnostics.settings import AlarmRules
from tether.runs.schema import StepRecord

Metrics = dict[str, float]
SHORT = AlarmRules(
    start_steps=4, recent_steps=3, step_p=0.1, start_measurements=3, recent_measurements=2, measured_p=0.2, text_steps=2, max_tokens=160
)
"""Short windows, so that alarms begin and end many times in a short history."""
LEVELS = (
    "groups/rv_mean",
    "information/h_conditional",
    "information/mi_seq",
    "information/retrieval_acc",
    "rollout/format_valid",
    "rollout/mismatch_before",
    "rollout/reasoning_tokens",
    "rollout/repeated_text",
    "rollout/response_tokens",
    "rollout/staleness",
    "rollout/success",
)
"""The metrics of a random run whose level jumps."""


def _by_definition(records: Mapping[int, Metrics], rules: AlarmRules) -> list[Alarm]:
    history = History()
    for step in sorted(records):
        history.append(step, records[step])
    alarms = []
    for name in AlarmName:
        rule = RULES[name]
        finding = rule.check(history, rules)
        if finding is None:
            continue
        began = history.steps[-1]
        for step in reversed(history.steps[:-1]):
            if rule.check(history.until(step), rules) is None:
                break
            began = step
        advice = finding.advice or rule.advice
        alarms.append(Alarm(name, finding.severity, began, finding.evidence, advice.cause, advice.remedy))
    return sorted(alarms, key=lambda alarm: alarm.began)


def _random_run(seed: int, steps: int = 40) -> dict[int, Metrics]:
    """Levels that jump now and then, some metrics missing at some steps, gaps between the steps."""
    draw = generator("random run", seed)
    level = dict.fromkeys(LEVELS, 1.0)
    records: dict[int, Metrics] = {}
    for step in np.cumsum(draw.integers(1, 3, steps)).tolist():
        for name in level:
            if draw.random() < 0.12:
                level[name] = float(draw.choice([0.0, 0.05, 0.3, 1.0, 1.5]))
        noise = {name: value * draw.uniform(0.9, 1.1) for name, value in level.items()}
        metrics = {
            "groups/rv_mean": 0.2 * noise["groups/rv_mean"],
            "rollout/success": min(1.0, 0.5 * noise["rollout/success"]),
            "rollout/format_valid": min(1.0, noise["rollout/format_valid"]),
            "rollout/response_tokens": 100 * noise["rollout/response_tokens"],
            "rollout/reasoning_tokens": 70 * noise["rollout/reasoning_tokens"],
            "rollout/reasonings": 16.0,
            "rollout/repeated_text": round(16 * min(1.0, 0.3 * noise["rollout/repeated_text"])) / 16,
            "rollout/mismatch_before": 0.09 * noise["rollout/mismatch_before"],
            "rollout/staleness": noise["rollout/staleness"],
            "update/loss": 1.0,
        }
        if draw.random() < 0.7:
            metrics |= {
                "information/mi_seq": math.log(8) * 0.6 * noise["information/mi_seq"],
                "information/h_conditional": noise["information/h_conditional"],
                "information/retrieval_acc": min(1.0, 0.5 * noise["information/retrieval_acc"]),
                "information/chance": 0.125,
                "information/num_prompts": 8.0,
            }
        records[step] = metrics
    return records


@pytest.mark.parametrize("seed", range(12))
def test_every_step_of_a_random_history_is_as_defined(seed: int) -> None:
    records, tracker = _random_run(seed), AlarmTracker(SHORT)
    for count, (step, metrics) in enumerate(records.items(), 1):
        so_far = dict(itertools.islice(records.items(), count))
        expected = _by_definition(so_far, SHORT)
        assert tracker.add(step, metrics) == expected == tracker.alarms
        assert tracker.new_alarms == [alarm for alarm in expected if alarm.began == step]
    assert check([StepRecord(step, metrics) for step, metrics in records.items()], rules=SHORT) == tracker.alarms


def test_the_random_histories_raise_most_alarms() -> None:
    """Else the comparison above would say little. A new alarm has its own test and need not occur in these histories."""
    raised: set[AlarmName] = set()
    for seed in range(12):
        tracker = AlarmTracker(SHORT)
        tracker.replay(_random_run(seed).items())
        raised |= set(tracker.steps_standing())
    assert len(raised) > len(AlarmName) / 2


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 500), first=st.integers(1, 60), length=st.integers(0, 30))
def test_forgotten_steps_leave_no_trace(seed: int, first: int, length: int) -> None:
    """Whether the steps are at the end, in the middle or not on record at all."""
    records, tracker = _random_run(seed, 25), AlarmTracker(SHORT)
    tracker.replay(records.items())
    tracker.forget(first, first + length)
    left = {step: metrics for step, metrics in records.items() if not first <= step <= first + length}
    assert tracker.alarms == (_by_definition(left, SHORT) if left else [])
    tracker.add(1000, records[max(records)])
    assert tracker.alarms == _by_definition(left | {1000: records[max(records)]}, SHORT)


def test_a_step_that_is_recorded_again_is_replaced() -> None:
    records, tracker = _random_run(3), AlarmTracker(SHORT)
    tracker.replay(records.items())
    step = sorted(records)[20]
    records[step] = dict(records[step], **{"groups/rv_mean": 0.0, "rollout/success": 0.0})
    tracker.add(step, records[step])
    assert tracker.alarms == _by_definition(records, SHORT)


def test_order_of_a_replay_does_not_matter_and_nothing_is_recorded_at_first() -> None:
    records, tracker = _random_run(4), AlarmTracker(SHORT)
    assert tracker.alarms == tracker.new_alarms == [] and tracker.steps_standing() == {}
    tracker.forget(1, 5)
    tracker.replay(list(records.items())[::-1])
    assert tracker.alarms == _by_definition(records, SHORT)


def test_a_step_asks_every_rule_once_however_long_an_alarm_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reward variance is zero from step 11 on; at step 1000 the alarm has stood for 980 steps."""
    asked: list[AlarmName] = []

    def counting(name: AlarmName, rule: Rule) -> Rule:
        def counted(*arguments: Any) -> Any:
            asked.append(name)
            return rule.check(*arguments)

        return Rule(counted, rule.advice)

    tracker = AlarmTracker()
    tracker.replay((step, {"groups/rv_mean": 0.2 if step <= 10 else 0.0, "rollout/success": 0.1}) for step in range(1, 1000))
    monkeypatch.setattr(tracker_module, "RULES", {name: counting(name, rule) for name, rule in RULES.items()})
    (alarm,) = tracker.add(1000, {"groups/rv_mean": 0.0, "rollout/success": 0.1})
    assert alarm.began < 20 and asked == list(AlarmName)
