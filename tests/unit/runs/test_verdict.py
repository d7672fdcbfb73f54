"""The words at the top of a report say what the numbers carry, and no more. Expected numbers were worked out by hand."""

import pytest

from tether.core.metrics import wilson_interval
from tether.runs.schema import StepRecord
from tether.runs.verdict import Rate, comparison, difference_interval, percent, tiles, verdict


def validated(step: int, successes: int, prompts: int = 256) -> StepRecord:
    low, high = wilson_interval(successes, prompts)
    interval = {"validation/success_low": low, "validation/success_high": high}
    return StepRecord(step, {"validation/success": successes / prompts, "validation/prompts": prompts, **interval})


def measured(step: int, accuracy: float, regime: str | None) -> StepRecord:
    metrics = {"information/retrieval_acc": accuracy, "information/chance": 0.125, "information/num_reasonings": 128.0}
    return StepRecord(step, metrics, regime)


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
    assert verdict([StepRecord(1, {})])[0] == "No validation and no training success was recorded, so learning cannot be judged."
    assert verdict([]) == ["No step was recorded, so there is nothing to judge yet."]


@pytest.mark.parametrize(
    ("accuracy", "regime", "words"),
    [
        (
            0.81,
            "diverse reasoning",
            "Reasoning is still tied to its input: retrieval accuracy 81% against 12.5% by chance (94% at the start)",
        ),
        (0.40, "template collapse", "Reasoning has come loose from its input: retrieval accuracy 40% against 12.5% by chance"),
        # 20 of 128 is above 12.5%, but its interval reaches down to 10%.
        (
            20 / 128,
            "diverse reasoning",
            "Reasoning does not measurably depend on its input: retrieval accuracy 15.6% against 12.5% by chance",
        ),
        (0.81, None, "Reasoning is still tied to its input: retrieval accuracy 81%"),
    ],
)
def test_dependence_on_the_input_follows_retrieval_and_regime(accuracy: float, regime: str | None, words: str) -> None:
    sentence = verdict([measured(1, 0.94, "diverse reasoning"), measured(30, accuracy, regime)])[1]
    assert sentence.startswith(words)
    assert (f"regime: {regime}" in sentence) == (regime is not None)


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
