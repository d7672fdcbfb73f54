"""The rules for ending a run early, on records written by hand; and a run that ends by one, with checkpoint, reason and evaluation."""

from pathlib import Path
from typing import Any

import pytest

from tether.core.config import dump_yaml, validate
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.training.hooks.early_stop import stop_reason
from tether.training.loop import Trainer
from tether.training.settings import EarlyStopSettings, RunSettings

RULES = EarlyStopSettings()


def _run(variances: list[float], kept: float = 1.0) -> list[StepRecord]:
    steps = [{"groups/rv_mean": variance, "groups/kept_ratio": kept} for variance in variances]
    return [StepRecord(0, {"validation/success": 0.3}), *(StepRecord(n, metrics) for n, metrics in enumerate(steps, 1))]


@pytest.mark.parametrize(
    ("variances", "stops"),
    [
        ([1.0] * 10 + [0.09] * 5, True),
        ([1.0] * 10 + [0.09] * 4, False),
        ([1.0] * 10 + [0.1] * 5, False),  # at the bound is not below it
        ([1.0] * 10 + [0.09] * 4 + [0.2, 0.09], False),  # in a row
        ([1.0] * 10 + [0.5] + [0.09] * 5, True),
        ([2.0] * 5 + [0.0] * 5 + [0.09] * 5, True),  # the mean over the first ten is 1.0
        ([2.0] * 5 + [0.0] * 9, False),  # four steps after the first ten
        ([0.0] * 30, False),  # nothing to fall from
    ],
)
def test_variance_rule(variances: list[float], stops: bool) -> None:
    reason = stop_reason(_run(variances), RULES)
    assert (reason is not None) is stops
    if reason:
        assert "below 10% of its mean over the first 10 steps for 5 steps in a row" in reason


def test_variance_rule_can_be_turned_off_and_set() -> None:
    collapsed = _run([1.0] * 10 + [0.0] * 9)
    assert stop_reason(collapsed, EarlyStopSettings(variance_share=0)) is None
    assert stop_reason(_run([1.0, 1.0, 0.4]), EarlyStopSettings(variance_share=0.5, baseline_steps=2, variance_steps=1)) is not None


@pytest.mark.parametrize(
    ("successes", "stops"),
    [([0.009] * 5, True), ([0.009] * 4, False), ([0.01] * 5, False), ([0.3, 0, 0, 0, 0, 0], True), ([0, 0, 0, 0.3, 0, 0], False)],
)
def test_success_rule(successes: list[float], stops: bool) -> None:
    records = [StepRecord(step, {"validation/success": success}) for step, success in enumerate(successes)]
    reason = stop_reason(records, RULES)
    assert (reason is not None) is stops
    assert stop_reason(records, EarlyStopSettings(success_floor=0)) is None
    if reason:
        assert reason == "validation success was below 1.0% in 5 evaluations in a row"


def test_empty_filter_rule() -> None:
    assert stop_reason(_run([0.1] * 5, kept=0.0), RULES) == "the filter kept nothing for 5 steps in a row"
    assert stop_reason(_run([0.1] * 4, kept=0.0), RULES) is None
    assert stop_reason(_run([0.1] * 5, kept=0.0), EarlyStopSettings(empty_steps=0)) is None
    one_kept = _run([0.1] * 5, kept=0.0)
    one_kept[-2].metrics["groups/kept_ratio"] = 0.125
    assert stop_reason(one_kept, RULES) is None


@pytest.mark.parametrize(("streak", "bound", "stops"), [(10, 10, True), (9, 10, False), (23, 10, True), (3, 3, True), (99, 0, False)])
def test_nonfinite_rule(streak: int, bound: int, stops: bool) -> None:
    records = _run([1.0, 1.0])
    records[-1].metrics["update/nonfinite_streak"] = streak
    reason = stop_reason(records, EarlyStopSettings(nonfinite_updates=bound))
    assert (reason is not None) is stops
    if reason:
        assert reason == f"the gradient was not finite in {streak} updates in a row; lower learner.learning_rate or learner.max_grad_norm"


def test_a_streak_that_ended_stops_nothing() -> None:
    records = _run([1.0, 1.0, 1.0])
    records[1].metrics["update/nonfinite_streak"] = 50
    records[2].metrics["update/nonfinite_streak"] = 0  # the last step made no update at all
    assert stop_reason(records, RULES) is None
    assert stop_reason([], RULES) is None


def _settings(**early_stop: Any) -> RunSettings:
    return validate(
        RunSettings,
        {
            "env": {"name": "countdown"},  # eight tokens are too few for an answer: all fail alike
            "rollout": {"num_groups": 2, "group_size": 2, "max_tokens": 8},
            "evaluation": {"prompts": 2},
            "diagnosis": {"every": 0},
            "checkpoint": {"every": 50},
            "steps": 9,
            "early_stop": early_stop,
        },
    )


def test_a_run_that_stops_leaves_a_checkpoint_a_reason_and_an_evaluation(tmp_path: Path) -> None:
    settings = _settings(empty_steps=2)
    store = RunStore.create(tmp_path / "run", dump_yaml(settings), {})
    Trainer(settings, store).run()
    reason = "the filter kept nothing for 2 steps in a row"
    assert store.finished == f"stopped early after step 2: {reason}"
    last = store.steps()[-1]
    assert last.step == 2 and last.notes[-1] == f"stopped early: {reason}"
    assert "validation/success" in last.metrics and "groups/rv_mean" in last.metrics
    assert [path.name for path in store.checkpoints.glob("step_*")] == ["step_000002"]
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    Trainer(settings, RunStore.open(tmp_path / "run")).run()  # asked to go on, it finds the same reason and trains no further
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
