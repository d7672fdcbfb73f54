"""The rules that turn numbers into a verdict, each on values small enough to decide by hand."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from pydantic import TypeAdapter

from harness.claims import Outcomes, Rule, RunNumbers, Verdict, all_of, decide, decide_near_zero, most_of
from tether.core.intervals import Estimate

HOLDS, DOES_NOT, CANNOT_TELL, NOT_RUN = Verdict.HOLDS, Verdict.DOES_NOT, Verdict.CANNOT_TELL, Verdict.NOT_RUN


def estimate(low: float, high: float) -> Estimate:
    return Estimate((low + high) / 2, low, high, 3, "paired")


def outcomes(values: Mapping[tuple[str, str], Sequence[float]], metric: str = "validation/success") -> Outcomes:
    """Runs whose only curve is one value of the metric; seeds 0, 1, 2, ..."""
    return Outcomes(
        [
            RunNumbers(env, arm, seed, 150, {metric: {150: value}})
            for (env, arm), column in values.items()
            for seed, value in enumerate(column)
        ]
    )


def judge(rule: dict[str, Any], found: Outcomes) -> Verdict:
    parsed: Any = TypeAdapter(Rule).validate_python(rule)
    return parsed.judge(found).verdict


# --------------------------------------------------------------------------------------------------------------- decisions


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (0.001, 0.2, HOLDS),
        (0.001, 0.02, HOLDS),  # inside the margin too: a small effect that is there
        (-0.2, -0.001, DOES_NOT),
        (-0.029, 0.029, DOES_NOT),
        (-0.031, 0.029, CANNOT_TELL),
        (-0.029, 0.031, CANNOT_TELL),
        (0.0, 0.2, CANNOT_TELL),
        (-math.inf, math.inf, CANNOT_TELL),
    ],
)
def test_decision_by_where_the_interval_lies(low: float, high: float, verdict: Verdict) -> None:
    assert decide(estimate(low, high), 0.03) is verdict


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.2, 0.2, HOLDS),
        (0.1, 0.2, HOLDS),
        (0.31, 0.4, DOES_NOT),
        (-0.4, -0.31, DOES_NOT),
        (0.2, 0.4, CANNOT_TELL),
        (-math.inf, math.inf, CANNOT_TELL),
    ],
)
def test_decision_that_nothing_is_there(low: float, high: float, verdict: Verdict) -> None:
    assert decide_near_zero(estimate(low, high), 0.3) is verdict


@pytest.mark.parametrize(
    ("verdicts", "all_", "most"),
    [
        ([HOLDS, HOLDS, HOLDS], HOLDS, HOLDS),
        ([HOLDS, HOLDS, CANNOT_TELL], CANNOT_TELL, HOLDS),
        ([HOLDS, HOLDS, DOES_NOT], DOES_NOT, HOLDS),
        ([HOLDS, CANNOT_TELL, DOES_NOT], DOES_NOT, CANNOT_TELL),
        ([DOES_NOT, DOES_NOT, HOLDS], DOES_NOT, DOES_NOT),
        ([HOLDS, HOLDS, NOT_RUN], NOT_RUN, HOLDS),
        ([HOLDS, NOT_RUN, CANNOT_TELL], NOT_RUN, NOT_RUN),
        ([DOES_NOT, NOT_RUN, HOLDS], DOES_NOT, NOT_RUN),
        ([HOLDS, DOES_NOT], DOES_NOT, DOES_NOT),
    ],
)
def test_combinations(verdicts: list[Verdict], all_: Verdict, most: Verdict) -> None:
    assert (all_of(verdicts), most_of(verdicts)) == (all_, most)


# ------------------------------------------------------------------------------------------------------------------- above

ABOVE = {"kind": "above", "contrast": {"b": 1, "a": -1}, "quantity": "peak validation/success", "environments": ["e"], "margin": 0.03}


def test_above_is_paired_by_seed() -> None:
    """Differences 0.10, 0.11, 0.12: the interval is 0.11 +- 0.025. The arms' own spread is ten times as large."""
    assert judge(ABOVE, outcomes({("e", "a"): [0.1, 0.3, 0.5], ("e", "b"): [0.2, 0.41, 0.62]})) is HOLDS


def test_above_fails_on_the_reverse_and_on_equals() -> None:
    assert judge(ABOVE, outcomes({("e", "b"): [0.1, 0.3, 0.5], ("e", "a"): [0.2, 0.41, 0.62]})) is DOES_NOT
    assert judge(ABOVE, outcomes({("e", "b"): [0.1, 0.3, 0.5], ("e", "a"): [0.101, 0.3, 0.499]})) is DOES_NOT


def test_above_cannot_tell_from_one_seed_and_is_not_run_without_an_arm() -> None:
    assert judge(ABOVE, outcomes({("e", "a"): [0.1], ("e", "b"): [0.9]})) is CANNOT_TELL
    assert judge(ABOVE, outcomes({("e", "b"): [0.9, 0.9]})) is NOT_RUN


def test_above_over_environments() -> None:
    values = {("e", "a"): [0.1, 0.1], ("e", "b"): [0.2, 0.2001], ("f", "a"): [0.5, 0.5], ("f", "b"): [0.45, 0.4501]}
    both = {**ABOVE, "environments": ["e", "f"]}
    assert judge({**both, "over": "each"}, outcomes(values)) is DOES_NOT
    assert judge({**both, "over": "mean"}, outcomes(values)) is HOLDS  # (0.1 - 0.05) / 2 on average
    assert judge({**both, "over": "most"}, outcomes(values)) is DOES_NOT  # half of them do not


def test_the_mean_over_environments_is_paired_within_each() -> None:
    """Environment e: differences 0.1 and 0.2 of its two shared seeds; f: 0.1 and 0.2. Errors 0.05 each, two degrees together."""
    rule: Any = TypeAdapter(Rule).validate_python({**ABOVE, "environments": ["e", "f"], "over": "mean"})
    values = {("e", "a"): [0.1, 0.1], ("e", "b"): [0.2, 0.3, 9.0], ("f", "a"): [0.5, 0.5], ("f", "b"): [0.6, 0.7]}
    found = rule.judge(outcomes(values)).findings[0].estimate
    assert (found.num, found.degrees) == (2, 2) and found.value == pytest.approx(0.15)
    assert found.high - found.value == pytest.approx(4.30265 * 0.05 / math.sqrt(2), abs=1e-4)


def test_slack_makes_it_not_below_by_more_than() -> None:
    values = outcomes({("e", "a"): [0.30, 0.30], ("e", "b"): [0.29, 0.2901]})
    assert judge({**ABOVE, "margin": 0.0}, values) is DOES_NOT
    assert judge({**ABOVE, "margin": 0.0, "slack": 0.03}, values) is HOLDS


def test_negative_slack_makes_it_above_by_at_least() -> None:
    """One arm at 0.55, 0.56, 0.57: its interval 0.56 +- 4.303 x 0.01 / sqrt(3) = [0.535, 0.585] lies above 0.5 and about 0.54."""
    one = outcomes({("e", "a"): [0.55, 0.56, 0.57]})
    rule = {**ABOVE, "contrast": {"a": 1}, "margin": 0.0}
    assert [judge({**rule, "slack": slack}, one) for slack in (-0.5, -0.54, -0.6)] == [HOLDS, CANNOT_TELL, DOES_NOT]


def test_a_rule_that_names_no_environment_is_about_all_that_the_experiment_has() -> None:
    rule = {name: value for name, value in ABOVE.items() if name != "environments"}
    found = outcomes({("e", "a"): [0.1, 0.1], ("e", "b"): [0.2, 0.21]})
    planned = [dataclasses.replace(found, environments=names) for names in ((), ("e",), ("e", "f"))]
    assert [judge(rule, one) for one in planned] == [NOT_RUN, HOLDS, NOT_RUN]


def test_one_arm_with_weight_minus_one_says_that_it_falls() -> None:
    rule = {**ABOVE, "contrast": {"a": -1}, "quantity": "change validation/success"}
    runs = [RunNumbers("e", "a", seed, 150, {"validation/success": {0: 0.5, 150: 0.2 + 0.001 * seed}}) for seed in range(3)]
    assert judge(rule, Outcomes(runs)) is HOLDS


# ------------------------------------------------------------------------------------------------------------- other kinds

ORDERED = {
    "kind": "ordered",
    "falls": ["a", "b", "c"],
    "quantity": "peak validation/success",
    "environments": ["e"],
    "margin": 0.03,
}


def test_ordered_needs_the_order_and_the_ends() -> None:
    assert judge(ORDERED, outcomes({("e", "a"): [0.9, 0.91], ("e", "b"): [0.5, 0.51], ("e", "c"): [0.1, 0.1101]})) is HOLDS
    assert judge(ORDERED, outcomes({("e", "c"): [0.9, 0.91], ("e", "b"): [0.5, 0.51], ("e", "a"): [0.1, 0.1101]})) is DOES_NOT
    # The order is right in both seeds, and the ends differ by nothing that can be seen.
    assert judge(ORDERED, outcomes({("e", "a"): [0.502, 0.501], ("e", "b"): [0.501, 0.5], ("e", "c"): [0.5, 0.4999]})) is DOES_NOT
    # The ends are right, the order is right in one seed only.
    assert judge(ORDERED, outcomes({("e", "a"): [0.9, 0.6], ("e", "b"): [0.5, 0.9], ("e", "c"): [0.1, 0.2]})) is CANNOT_TELL
    assert judge(ORDERED, outcomes({("e", "a"): [0.9], ("e", "b"): [0.5]})) is NOT_RUN


def scatter(pairs: Sequence[tuple[str, float, float]]) -> Outcomes:
    return Outcomes(
        [
            RunNumbers(env, "a", seed, 150, {"information/mi_seq": {141: x}, "validation/success": {150: y}, "update/entropy": {150: -x}})
            for seed, (env, x, y) in enumerate(pairs)
        ]
    )


RISING = scatter([(env, float(n), base + n / 100) for env, base in (("e", 0.1), ("f", 0.8)) for n in range(8)])


def test_correlation_with_its_sign() -> None:
    rule = {"kind": "correlation", "x": "last information/mi_seq", "y": "last validation/success"}
    assert judge(rule, RISING) is HOLDS
    assert judge({**rule, "sign": -1}, RISING) is DOES_NOT
    assert judge({**rule, "sign": 0, "margin": 0.3}, RISING) is DOES_NOT
    assert judge({**rule, "than": "last update/entropy"}, RISING) is HOLDS
    assert judge({**rule, "x": "last update/entropy", "than": "last information/mi_seq"}, RISING) is DOES_NOT
    assert judge(rule, scatter([("e", 1.0, 1.0), ("e", 2.0, 2.0), ("e", 3.0, 3.0)])) is CANNOT_TELL
    assert judge(rule, Outcomes([])) is NOT_RUN


def buckets(rows: Sequence[Sequence[float]]) -> Outcomes:
    return Outcomes(
        [
            RunNumbers("e", "a", seed, 150, {f"gradients/task_norm_{k}": {1: value} for k, value in enumerate(row, start=1)})
            for seed, row in enumerate(rows)
        ]
    )


def test_buckets_rise_fall_or_are_flat() -> None:
    rule = {"kind": "buckets", "arm": "a", "metric": "gradients/task_norm", "buckets": 3, "environments": ["e"]}
    rising = buckets([[0.1, 0.2, 0.3], [0.2, 0.3, 0.4]])
    assert judge(rule, rising) is HOLDS
    assert judge({**rule, "sign": -1}, rising) is DOES_NOT
    assert judge({**rule, "sign": 0, "margin": 0.25}, buckets([[100.0, 130.0, 101.0], [100.0, 90.0, 101.0]])) is HOLDS
    assert judge({**rule, "sign": 0, "margin": 0.25}, buckets([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])) is DOES_NOT  # (3 - 1) / 2 = 1
    mixed = buckets([[0.3, 0.2, 0.1], [0.1, 0.3, 0.2]])  # correlations -1 and 0.5
    assert judge(rule, mixed) is CANNOT_TELL and judge({**rule, "sign": -1}, mixed) is CANNOT_TELL
    assert judge(rule, buckets([])) is NOT_RUN


def test_predicts_over_settings() -> None:
    """Five settings; the ratio of the baseline and the gain have the same order, or the reverse."""
    rule = {
        "kind": "predicts",
        "pairs": [("a", "b")],
        "x": "start groups/rv_ratio",
        "gain": "peak validation/success",
    }

    def settings(gains: Sequence[float]) -> Outcomes:
        runs = []
        for number, gain in enumerate(gains):
            for seed in (0, 1):
                ratio = {"groups/rv_ratio": {10: float(number)}}
                runs.append(RunNumbers(f"e{number}", "a", seed, 150, ratio | {"validation/success": {150: 0.2}}))
                runs.append(RunNumbers(f"e{number}", "b", seed, 150, ratio | {"validation/success": {150: 0.2 + gain}}))
        return Outcomes(runs)

    assert judge(rule, settings([-0.1, 0.0, 0.1, 0.2, 0.3])) is HOLDS
    assert judge(rule, settings([0.3, 0.2, 0.1, 0.0, -0.1])) is DOES_NOT
    assert judge(rule, settings([0.1])) is NOT_RUN


def test_combined_rules_report_the_findings_of_all() -> None:
    rule: Any = TypeAdapter(Rule).validate_python({"kind": "all_of", "of": [ABOVE, ABOVE]})
    judged = rule.judge(outcomes({("e", "a"): [0.1, 0.1], ("e", "b"): [0.2, 0.2001]}))
    assert judged.verdict is HOLDS and len(judged.findings) == 2
    assert rule.arms() == {"a", "b"} and rule.environments_named() == {"e"}
