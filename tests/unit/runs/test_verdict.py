"""The words at the top of a report say what the numbers carry, and no more. Expected numbers were worked out by hand."""

import dataclasses
from typing import Any

import pytest

from tether.core.metrics import wilson_interval
from tether.core.reasoning import NEXT_STEPS
from tether.core.shares import percent
from tether.runs.schema import StepRecord
from tether.runs.verdict import Rate, comparison, difference_interval, every_episode_failed, tiles, verdict


def validated(step: int, successes: int, prompts: int = 256) -> StepRecord:
    low, high = wilson_interval(successes, prompts)
    interval = {"validation/success_low": low, "validation/success_high": high}
    return StepRecord(step, {"validation/success": successes / prompts, "validation/prompts": prompts, **interval})


def measured(step: int, accuracy: float, regime: str | None) -> StepRecord:
    metrics = {"information/retrieval_acc": accuracy, "information/chance": 0.125, "information/num_reasonings": 128.0}
    return StepRecord(step, metrics, regime)


def test_a_rate_that_stays_is_not_a_range() -> None:
    sentence = verdict([validated(0, 0, 1), validated(9, 0, 1)])[0]
    assert sentence.startswith("Validation success did not measurably change: 0% at step 0 and at step 9 (±0 points; 1 prompt);")
    assert "0% to 0%" not in sentence
    assert "(0 of 40; at most 9%; 40 prompts), measured once" in verdict([validated(1, 0, 40)])[0]


def test_newcombe_interval_against_the_published_example() -> None:
    # Newcombe 1998, table II, example (a): 56/70 - 48/80 = 0.2, method 10 gives 0.0524 to 0.3339.
    first, last = (Rate(0, k / n, *wilson_interval(k, n), n) for k, n in ((48, 80), (56, 70)))
    assert difference_interval(first, last) == pytest.approx((0.0524, 0.3339), abs=1e-4)


def test_a_rise_is_stated_with_points_prompts_and_interval() -> None:
    assert verdict([validated(1, 79), validated(30, 164)])[0] == (
        "Validation success rose from 31% to 64% (+33 points; 256 prompts; 95% interval +25 to +41)."
    )


def test_a_fall_says_so_and_names_the_peak() -> None:
    words = verdict([validated(1, 120), validated(10, 180), validated(30, 60)])[0]
    assert words.startswith("Validation success fell from 47% to 23% (−24 points; 256 prompts;")
    assert words.endswith("It had been higher: 70% at step 10.")


def test_a_difference_within_its_interval_is_no_change() -> None:
    words = verdict([validated(1, 79), validated(30, 85)])[0]
    change = "from 31% to 33% (+2 points; 256 prompts); its 95% interval, −6 to +10, includes zero."
    assert words == f"Validation success did not measurably change: {change}"


def test_without_validation_training_success_is_a_rough_guide() -> None:
    records = [StepRecord(1, {"rollout/success": 0.2}), StepRecord(9, {"rollout/success": 0.5})]
    assert verdict(records)[0].startswith("No validation was recorded. Training success went from 20% (step 1) to 50% (step 9);")
    assert "measured once, at step 1" in verdict([validated(1, 79)])[0]
    assert verdict([StepRecord(1, {})])[0] == "No validation and no training success was recorded, so learning cannot be assessed."
    assert verdict([]) == ["No step was recorded, so there is no verdict yet."]


@pytest.mark.parametrize(
    ("accuracy", "regime", "words"),
    [
        (0.81, "diverse reasoning", "Tied to the input: the reasoning depends on its prompt."),
        # (0.4 - 0.125) / 0.875 is 31%. A regime that an earlier version recorded is not repeated.
        (0.40, "template collapse", "Weakly tied: some of the reasoning depends on its prompt, much of it does not."),
        # 20 of 128 is above 12.5%, but its interval reaches down to 10%.
        (20 / 128, "diverse reasoning", "Template collapse: the reasoning varies, but not with its prompt. Regime: template collapse."),
        (0.81, None, "Tied to the input: the reasoning depends on its prompt."),
    ],
)
def test_dependence_on_the_input_follows_the_numbers(accuracy: float, regime: str | None, words: str) -> None:
    headline, numbers = verdict([measured(1, 0.94, "diverse reasoning"), measured(30, accuracy, regime)])[1:]
    assert headline.startswith(words) and any(headline.endswith(step) for step in NEXT_STEPS.values())
    assert f"finds the prompt of {accuracy:.0%} of the reasonings (95% interval" in numbers
    assert "This is step 30; at step 1 the prompts of 94% were found (tied)." in numbers


def with_interval(step: int, accuracy: float, low: float, p_value: float, regime: str | None = None, high: float = 0.9) -> StepRecord:
    ends = {"information/retrieval_acc_low": low, "information/retrieval_acc_high": high, "information/retrieval_p_value": p_value}
    return StepRecord(step, {**measured(step, accuracy, None).metrics, **ends}, regime)


@pytest.mark.parametrize(
    ("accuracy", "low", "p_value", "words"),
    [
        (0.7, 0.3, 0.01, "Tied to the input"),
        (0.7, 0.3, 0.02, "It cannot be told"),
        (0.3, 0.1, 0.01, "Weakly tied"),
        # 0.2 is 9% of the way from 0.125 to 1, 0.22 is 11%. The interval reaches to 90%.
        (0.20, 0.15, 0.001, "It cannot be told"),
        (0.22, 0.15, 0.001, "Weakly tied"),
    ],
)
def test_a_signal_counts_by_its_p_value(accuracy: float, low: float, p_value: float, words: str) -> None:
    headline, numbers = verdict([with_interval(1, accuracy, low, p_value)])[1:]
    assert headline.startswith(words)
    assert f"{accuracy:.0%} of the reasonings (95% interval {low:.0%} to 90%; chance 12.5%, p {p_value:.3f})" in numbers


def test_nothing_found_is_only_said_where_something_could_have_been() -> None:
    # 0.3 of the way from 0.125 to 1 is 0.3875.
    assert verdict([with_interval(1, 0.2, 0.05, 0.3, high=0.39)])[1].startswith("It cannot be told")
    collapsed = verdict([with_interval(1, 0.2, 0.05, 0.3, high=0.38)])
    assert collapsed[1].startswith("Template collapse") and "This rests on the scores alone; tether diagnose" in collapsed[2]
    warned = dataclasses.replace(with_interval(1, 0.2, 0.05, 0.3), alarms=[alarm("retrieval_at_chance", "critical", "information/mi")])
    words = verdict([warned])
    assert words[1].startswith("It cannot be told whether the reasoning depends on its prompt. This is neither good nor bad news")
    assert words[2].endswith("Over several measurements: critical alarm retrieval at chance.")


def alarm(name: str, severity: str, metric: str, began: int = 4) -> dict[str, Any]:
    evidence = {"metric": metric, "value": 0.1, "steps": [1, 9], "test": "t", "reference": None, "reference_steps": None}
    return {"name": name, "severity": severity, "began": began, "evidence": [evidence], "cause": "c", "remedy": "r"}


def test_a_critical_alarm_about_the_input_is_part_of_the_verdict() -> None:
    healthy = with_interval(9, 0.8, 0.7, 0.001, "diverse reasoning")
    falls = "information/mi_seq / log(prompts)"
    for name, severity, metric, about in (
        ("information_falls", "critical", falls, True),
        ("information_falls", "warning", falls, False),
        ("length_collapse", "critical", "rollout/response_tokens", False),
    ):
        words = verdict([with_interval(1, 0.9, 0.8, 0.001), dataclasses.replace(healthy, alarms=[alarm(name, severity, metric)])])
        assert words[1].startswith("Tied to the input"), "what the last measurement shows is not denied"
        assert words[2].endswith("It depends on its input less than before: critical alarm information falls.") == about
        assert words[3] == f"{severity.capitalize()} at the end: {name.replace('_', ' ')} (since step 4)."


def test_an_alarm_that_no_longer_stands_is_no_verdict() -> None:
    past = dataclasses.replace(with_interval(1, 0.8, 0.7, 0.001), alarms=[alarm("information_falls", "critical", "information/mi_seq")])
    words = verdict([past, with_interval(2, 0.8, 0.7, 0.001)])
    assert len(words) == 3 and words[1].startswith("Tied to the input") and "alarm" not in words[2]


def test_alarms_at_the_end_are_listed_gravest_first() -> None:
    alarms = [alarm(name, severity, "groups/rv_mean", began) for name, severity, began in (
        ("length_collapse", "warning", 2), ("repeated_text", "critical", 3), ("reward_variance_collapse", "critical", 5),
    )]  # fmt: skip
    assert verdict([StepRecord(9, {}, None, [], alarms)])[2:] == [
        "Critical at the end: repeated text (since step 3) and reward variance collapse (since step 5).",
        "Warning at the end: length collapse (since step 2).",
    ]


def test_measurements_that_failed_are_named_with_their_cause() -> None:
    records = [
        StepRecord(
            1, {"information/failed": 1.0}, None, ["diagnosis (trajectory) failed: other.", "diagnosis (first_turn) failed: no memory."]
        ),
        StepRecord(2, {"gradients/failed": 1.0, "information/failed": 0.0}, None, ["gradient decomposition failed: first"]),
        StepRecord(
            3, {"gradients/failed": 1.0, "information_trajectory/failed": 1.0}, None, ["gradient decomposition failed: second: worse"]
        ),
    ]
    assert verdict(records)[2:] == [
        "Measuring information failed at step 1: no memory.",
        "Measuring information over trajectories failed at step 3.",
        "The gradient decomposition failed at 2 steps, the last time at step 3: second: worse.",
    ]


def test_information_that_was_not_measured_is_said_to_be_missing() -> None:
    assert verdict([validated(1, 79)])[1] == "Whether the reasoning depends on its input was not measured in this run."


def test_comparison_ranks_only_what_the_data_tell_apart() -> None:
    far = comparison({"a": [validated(9, 100)], "b": [validated(9, 164)], "c": [validated(9, 20)]})
    assert far.startswith("b ends with 64% validation success, a with 39% (+25 points,")
    assert far.endswith("b is ahead beyond chance.")
    assert comparison({"a": [validated(9, 160)], "b": [validated(9, 164)]}).endswith("the data do not tell the best two apart.")
    assert "cannot be ranked" in comparison({"a": [validated(9, 160)], "b": []})


def test_tiles_show_the_last_value_and_the_start() -> None:
    by_label = {tile.label: tile for tile in tiles([StepRecord(1, {"groups/rv_mean": 0.2}), StepRecord(2, {"groups/rv_mean": 0.125})])}
    assert (by_label["Reward variance"].value, by_label["Reward variance"].note) == ("0.125", "0.2 at the start")
    assert (by_label["Retrieval accuracy"].value, by_label["Retrieval accuracy"].note) == ("—", "not recorded")


def test_percent_never_rounds_something_to_nothing() -> None:
    assert [percent(value) for value in (0.0, 0.002, 0.31, 0.998, 1.0)] == ["0%", "under 1%", "31%", "over 99%", "100%"]


def test_tiles_show_intervals_and_alarms() -> None:
    by_label = {tile.label: tile for tile in tiles([with_interval(1, 0.5, 0.25, 0.01), with_interval(2, 0.6, 0.3, 0.02)])}
    assert by_label["Retrieval accuracy"].note == "95% interval 30% to 90%; 12.5% is chance; 50% at the start"
    assert by_label["Regime"].value == "cannot be told" and by_label["Regime"].note == "weakly tied at the start"
    assert (by_label["Alarms at the end"].value, by_label["Alarms at the end"].note) == ("—", "not recorded")
    watched = StepRecord(
        1, {"alarms/critical": 0.0, "information/mi_seq": 0.5, "information/mi_seq_low": -0.25, "information/mi_seq_high": 1.0}
    )
    by_label = {tile.label: tile for tile in tiles([watched])}
    assert by_label["Information (MI), nats"].note == "−0.25 to 1; measured once"
    assert (by_label["Alarms at the end"].value, by_label["Alarms at the end"].note) == ("0", "none was ever raised")
    alarms = [alarm("a", "critical", "x"), alarm("b", "warning", "x")]
    tile = tiles([StepRecord(1, {}, None, [], [alarm("c", "warning", "x")]), StepRecord(2, {"alarms/critical": 1.0}, None, [], alarms)])[-1]
    assert (tile.value, tile.note) == ("2", "1 critical; 3 raised in the whole run")
    eased = [
        StepRecord(1, {"alarms/critical": 1.0}, None, [], [alarm("a", "critical", "x")]),
        StepRecord(2, {}, None, [], [alarm("a", "warning", "x")]),
    ]
    assert tiles(eased)[-1].note == "0 critical; 1 raised in the whole run"


# ------------------------------------------------------------------------------------------------------------------ errors


def _failed(step: int, note: str) -> StepRecord:
    return StepRecord(step, {}, None, ["another note", note])


def test_the_commonest_environment_error_is_part_of_the_verdict() -> None:
    words = "episodes ended by an environment error and were left out"
    records = [
        _failed(0, f"validation: 2 of 4 {words}, all with: reset: OSError: no file 'x: y.txt'"),
        _failed(1, f"5 of 8 {words}, 3 of them with: step 2: ValueError: bad"),
        _failed(2, f"4 of 8 {words}, all with: reset: OSError: no file 'x: y.txt'"),
        StepRecord(3, {}),
    ]
    assert (
        "11 of 20 episodes of the steps that had errors were ended by their environment; the commonest error: reset: OSError: no file 'x: y.txt'."
        in verdict(records)
    )
    assert not any("environment" in sentence for sentence in verdict(records[3:]))
    assert [every_episode_failed(record) for record in records] == [None] * 4
    assert every_episode_failed(_failed(1, f"8 of 8 {words}, all with: step 1: ValueError: bad")) == "step 1: ValueError: bad"
    assert every_episode_failed(_failed(0, f"validation: 8 of 8 {words}, all with: x")) is None  # of training alone
