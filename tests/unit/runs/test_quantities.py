"""The windows over a curve, on one small run."""

import pytest

from tether.core.errors import BadInput
from tether.runs.quantities import WINDOWS, Quantity, estimate_words, shown

CURVES = {
    "validation/success": {0: 0.1, 50: 0.5, 100: 0.3, 150: 0.2},
    "information/mi_seq": {1: 2.0, 41: 1.5, 61: 1.0, 101: 0.5, 141: 0.1},
}


def value(text: str, planned: int = 150) -> float | None:
    return Quantity.parse(text).of(CURVES, planned)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("start validation/success", 0.1),
        ("peak validation/success", 0.5),
        ("lowest validation/success", 0.1),
        ("mean validation/success", 47.5 / 150),  # 50 x 0.3 + 50 x 0.4 + 50 x 0.25
        ("last validation/success", 0.25),  # steps 100 and 150: 100 is the border of the last third and counts
        ("change validation/success", 0.15),
        ("trend information/mi_seq", -1.0),
        ("trend validation/success", 0.2),  # ranks 1 4 3 2 against 1 2 3 4: 1 - 6 x 8 / (4 x 15)
        ("at_peak information/mi_seq", 1.5),  # the peak is at step 50, and 41 is nearer than 61
        ("last information/mi_seq", 0.3),
    ],
)
def test_windows(text: str, expected: float) -> None:
    assert value(text) == pytest.approx(expected)


def test_every_window_is_tested_above() -> None:
    assert set(WINDOWS) == {"start", "peak", "lowest", "mean", "last", "change", "trend", "at_peak"}


def test_a_run_that_stopped_counts_with_its_last_measurement() -> None:
    assert value("last validation/success", planned=300) == 0.2
    assert value("mean validation/success", planned=300) == pytest.approx((47.5 + 150 * 0.2) / 300)


def test_one_measurement_is_its_own_mean() -> None:
    assert Quantity.parse("mean information/mi").of({"information/mi": {150: 0.7}}, 150) == 0.7


def test_a_metric_that_was_not_measured_has_no_value() -> None:
    assert value("last information/mi") is None


def test_at_peak_takes_the_first_of_equal_peaks_and_the_earlier_of_equally_near_steps() -> None:
    curves = {"validation/success": {0: 0.5, 20: 0.5}, "information/mi": {10: 1.0, 20: 2.0}}
    assert Quantity.parse("at_peak information/mi").of(curves, 20) == 1.0
    curves = {"validation/success": {15: 0.5}, "information/mi": {10: 1.0, 20: 2.0}}
    assert Quantity.parse("at_peak information/mi").of(curves, 20) == 1.0


@pytest.mark.parametrize(
    ("text", "hint"), [("peek validation/success", "did you mean 'peak'"), ("peak validation/sucess", "validation/success")]
)
def test_unknown_words_are_refused_with_the_nearest(text: str, hint: str) -> None:
    with pytest.raises(BadInput, match=hint):
        Quantity.parse(text)


def test_shares_are_shown_in_percent() -> None:
    assert shown(Quantity("last", "validation/success"), 0.12345) == "12.3"
    assert shown(Quantity("last", "validation/success"), -0.0001, signed=True) == "0.0"
    assert shown(Quantity("trend", "validation/success"), -0.5) == "-0.5"
    assert shown(Quantity("last", "information/mi_seq"), 1.5, signed=True) == "+1.5"


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("last validation/success", (0.0, 1.0)),
        ("change validation/success", (-1.0, 1.0)),
        ("last information/retrieval_acc_change", (-1.0, 1.0)),
        ("trend information/mi_seq", (-1.0, 1.0)),
        ("mean rollout/response_tokens", (0.0, float("inf"))),
        ("change rollout/response_tokens", None),
        ("last update/loss_entropy", None),
        ("last information/mi_seq", None),
        ("last gradients/task_norm_3", (0.0, float("inf"))),
    ],
)
def test_every_quantity_knows_its_range(text: str, bounds: tuple[float, float] | None) -> None:
    assert Quantity.parse(text).bounds == bounds


def test_two_seeds_of_a_success_rate() -> None:
    """The row that read "71.2 [-9.1, 151.4]": seeds 0.6488 and 0.7752, error 0.0632; on the logit 0.9051 +- 12.7062 x 0.0632 / 0.20506."""
    success = Quantity("last", "validation/success")
    assert estimate_words(success.level([0.6488, 0.7752]), success) == "71.2 [4.7, 99.2], n = 2"
    assert estimate_words(success.level([1.0, 1.0]), success) == "100.0, n = 2, all equal"
