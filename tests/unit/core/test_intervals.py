"""Intervals over instances and over seeds: values by hand, and coverage by simulation."""

import math

import numpy as np
import pytest

from tether.core.intervals import clustered_interval, contrast, difference_interval, level, mean_interval, mean_of, spearman, student_t
from tether.core.metrics import wilson_interval
from tether.core.seeding import generator


@pytest.mark.parametrize(
    ("degrees", "level", "table"),
    [
        (1, 0.95, 12.7062),
        (2, 0.95, 4.3027),
        (9, 0.95, 2.2622),
        (30, 0.95, 2.0423),
        (1, 0.99, 63.657),
        (2, 0.99, 9.9248),
        (30, 0.99, 2.7500),
    ],
)
def test_student_t(degrees: int, level: float, table: float) -> None:
    assert student_t(degrees, level) == pytest.approx(table, rel=1e-3)


def test_mean_by_hand() -> None:
    """1, 2, 3, 6: mean 3, variance 14 / 3, error sqrt(14 / 12), t(3) 3.182."""
    half = student_t(3) * math.sqrt(14 / 12)
    assert mean_interval([1, 2, 3, 6]) == pytest.approx((3 - half, 3 + half))
    assert student_t(3) == pytest.approx(3.182, rel=3e-3)
    assert mean_interval([2.0, 2.0, 2.0]) is None and mean_interval([1.0]) is None


def test_difference_by_hand() -> None:
    """+1, 0, 0, -1, +1 on five instances, one sample each: mean 0.2, variance (3 - 5 * 0.04) / 4 = 0.7, error^2 0.14 + 0.04."""
    half = student_t(4) * math.sqrt(0.7 / 5 + 1 / 25)
    low, high = difference_interval([1, 0, 0, -1, 1], 1)
    assert (low, high) == pytest.approx((max(-1.0, 0.2 - half), 1.0)) and 0.2 + half > 1
    # Twenty instances, four samples each: ten times +0.5, ten times 0.
    values = [0.5] * 10 + [0.0] * 10
    half = student_t(19) * math.sqrt(20 * 0.0625 / 19 / 20 + 1 / 80**2)
    assert difference_interval(values, 4) == pytest.approx((0.25 - half, 0.25 + half))
    assert difference_interval(values, 4, level=0.99)[0] < 0.25 - half
    assert difference_interval([0.3], 1) == (-1.0, 1.0)


def test_models_that_agree_everywhere_have_an_interval() -> None:
    low, high = difference_interval([0.0] * 100, 1)
    assert (low, high) == pytest.approx((-student_t(99) / 100, student_t(99) / 100))


def test_shares_are_outcomes_too() -> None:
    """Half of every instance: pass@k values. No variance between instances: each counts as one trial, with Student's quantile."""
    assert clustered_interval([[0.5]] * 8) == wilson_interval(4, 8, student_t(7))
    assert clustered_interval([[1.0], [0.0], [1.0]]) == wilson_interval(2, 3)
    values = [0.0, 0.5, 1.0, 1.0]
    variance = 4 / 3 * sum((value - 0.625) ** 2 for value in values) / 16
    trials = 0.625 * 0.375 / variance
    assert clustered_interval([[value] for value in values]) == pytest.approx(wilson_interval(0.625 * trials, trials, student_t(3)))


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize(("first", "second"), [(0.5, 0.5), (0.3, 0.7), (0.9, 0.8)])
def test_coverage_of_the_difference(samples: int, first: float, second: float) -> None:
    """Instances with beta-distributed difficulties, nearly the same for both models: 95% of the intervals hold the true difference.

    With 800 rounds the share itself has a standard error of 0.8 points. benchmarks/evaluation_coverage.py has more cases and rounds.
    """
    rng, rounds, count, pool = generator("coverage", samples, int(10 * first), int(10 * second)), 800, 80, 4000
    a, b = (np.sort(rng.beta(mean, 1 - mean, pool)) for mean in (first, second))
    drawn = rng.integers(pool, size=(rounds, count))
    other = np.where(rng.random((rounds, count)) < 0.8, drawn, rng.integers(pool, size=(rounds, count)))
    differences = (rng.binomial(samples, a[drawn]) - rng.binomial(samples, b[other])) / samples
    true = float(a.mean() - b.mean())
    intervals = [difference_interval(row, samples) for row in differences.tolist()]
    covered = sum(low <= true <= high for low, high in intervals) / rounds
    assert 0.93 - 0.01 <= covered <= 0.97 + 0.01, covered


# -------------------------------------------------------------------------------------------------------------- over seeds


def test_level_is_the_mean_with_student_t() -> None:
    """Values 1, 2, 3: variance 1, error 1/sqrt(3), t with 2 degrees 4.30265, so the half width is 2.48414."""
    found = level([1.0, 2.0, 3.0])
    assert (found.value, found.num) == (2.0, 3)
    assert (found.low, found.high) == pytest.approx((-0.48414, 4.48414), abs=1e-4)


def test_two_seeds_have_one_degree_of_freedom() -> None:
    """Values 0, 2: variance 2, error 1, t with 1 degree 12.7062."""
    found = level([0.0, 2.0])
    assert (found.low, found.high) == pytest.approx((-11.7062, 13.7062), abs=1e-3)


def test_one_seed_has_no_interval() -> None:
    found = level([0.4])
    assert found.value == 0.4 and not found.has_interval


def test_contrast_is_paired_where_seeds_are_shared() -> None:
    """Differences 2, 3, 1 by seed: mean 2, error 1/sqrt(3). Unpaired, the interval would be wider than that of the differences."""
    found = contrast([(1.0, {0: 13.0, 1: 25.0, 2: 34.0}), (-1.0, {0: 11.0, 1: 22.0, 2: 33.0})])
    assert found.how == "paired" and found.num == 3
    assert (found.value, found.low, found.high) == pytest.approx((2.0, -0.48414, 4.48414), abs=1e-4)


def test_contrast_uses_only_shared_seeds() -> None:
    found = contrast([(1.0, {0: 1.0, 1: 2.0, 7: 100.0}), (-1.0, {0: 0.0, 1: 0.5, 2: 9.0})])
    assert found.num == 2 and found.value == pytest.approx(1.25)


def test_contrast_without_shared_seeds_is_welch() -> None:
    """Arm {1, 3}: variance 2, 2/2 = 1. Arm {0, 0, 3}: variance 3, 3/3 = 1. Sum 2; degrees 4 / (1/1 + 1/2) = 2.67, rounded down to 2."""
    found = contrast([(1.0, {0: 1.0, 1: 3.0}), (-1.0, {5: 0.0, 6: 0.0, 7: 3.0})])
    half = 4.30265 * math.sqrt(2)
    assert found.how == "unpaired" and found.num == 2
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1 - half, 1 + half), abs=1e-4)


def test_weights_enter_squared_into_welch() -> None:
    """Weight 2 on the arm {1, 3}: variance 4 x 1; with the other arm's 1 it is 5; degrees 25 / (16/1 + 1/2) = 1.5, rounded down to 1."""
    found = contrast([(2.0, {0: 1.0, 1: 3.0}), (-1.0, {5: 0.0, 6: 0.0, 7: 3.0})])
    assert found.value == pytest.approx(3.0)
    assert found.high - found.value == pytest.approx(12.7062 * math.sqrt(5), abs=1e-2)


def test_four_arms_are_a_difference_of_differences() -> None:
    arms = [(1.0, {0: 5.0, 1: 6.0}), (-1.0, {0: 3.0, 1: 3.0}), (-1.0, {0: 2.0, 1: 2.0}), (1.0, {0: 1.0, 1: 1.0})]
    assert contrast(arms).value == pytest.approx(1.5)


def test_the_mean_of_environments_adds_their_errors() -> None:
    """Differences 2 +- 1/sqrt(3) and 0 +- 1/sqrt(3), two degrees each: mean 1, error sqrt(2/3)/2 = 0.40825, four degrees, t = 2.77645."""
    found = mean_of([level([1.0, 2.0, 3.0]), level([-1.0, 0.0, 1.0])])
    assert (found.value, found.degrees, found.num) == (1.0, 4, 3)
    assert found.high - found.value == pytest.approx(2.77645 * 0.40825, abs=1e-3)


def test_an_environment_with_one_seed_leaves_the_mean_without_an_interval() -> None:
    assert not mean_of([level([1.0, 2.0, 3.0]), level([1.0])]).has_interval


def test_environments_without_spread_have_a_point() -> None:
    found = mean_of([level([1.0, 1.0]), level([3.0, 3.0])])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_the_interval_of_a_share_is_students_on_the_logit() -> None:
    """0.2 and 0.4: mean 0.3, error 0.1, t(1) 12.7062. On the logit: ln(3/7) = -0.8473, error 0.1 / (0.3 x 0.7) = 0.47619, half width
    6.0506, so -6.8979 to 5.2033: 0.0010098 to 0.9945317."""
    found = level([0.2, 0.4], bounds=(0.0, 1.0))
    assert (found.value, found.error, found.degrees) == pytest.approx((0.3, 0.1, 1))
    assert (found.low, found.high) == pytest.approx((0.0010098, 0.9945317), abs=1e-6)


def test_the_interval_of_a_length_is_cut_at_zero() -> None:
    """10 and 30: mean 20, error 10, half width 127.062."""
    found = level([10.0, 30.0], bounds=(0.0, math.inf))
    assert (found.low, found.high) == pytest.approx((0.0, 147.062), abs=1e-3)


def test_a_range_from_minus_one_to_one_is_symmetric() -> None:
    """-0.2 and 0.2: mean 0, which is 1/2 of the range: logit 0, error 0.2 / 2 / 0.25 = 0.4, half width 5.0825."""
    found = level([-0.2, 0.2], bounds=(-1.0, 1.0))
    assert (found.low, found.high) == pytest.approx((-found.high, math.tanh(12.7062 * 0.4 / 2)), abs=1e-6)


@pytest.mark.parametrize("values", [[0.01, 0.99], [0.0, 1.0], [0.0, 0.0, 0.02], [0.999, 1.0, 1.0], [0.7, 0.712, 0.72]])
def test_no_interval_of_a_share_leaves_its_range(values: list[float]) -> None:
    found = level(values, bounds=(0.0, 1.0))
    assert 0 <= found.low < found.value < found.high <= 1


def test_shares_that_agree_have_a_point_and_no_mean_interval() -> None:
    found = level([1.0, 1.0], bounds=(0.0, 1.0))
    assert (found.low, found.value, found.high) == (1.0, 1.0, 1.0)
    assert mean_interval([1.0, 1.0], (0.0, 1.0)) is None


def test_a_difference_of_shares_ends_at_one() -> None:
    """0.3 and 0.7 by seed: mean 0.5, error 0.2, half width 2.54; cut at the range of a difference of shares, and its sign is undecided still."""
    found = contrast([(1.0, {0: 0.3, 1: 0.8}), (-1.0, {0: 0.0, 1: 0.1})], (0.0, 1.0))
    assert (found.value, found.low, found.high) == pytest.approx((0.5, -1.0, 1.0))


def test_spearman_of_a_textbook_example() -> None:
    """Squared rank differences 1 + 1 + 1 + 1 + 0 = 4: 1 - 6 x 4 / (5 x 24) = 0.8."""
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [7, 7, 7]) == 0.0


def test_ties_share_the_mean_of_their_ranks() -> None:
    """Ranks of 10, 20, 20, 5: 2, 3.5, 3.5, 1. With 1, 2, 3, 4: products sum to -1.5, over sqrt(4.5 x 5)."""
    assert spearman([10, 20, 20, 5], [1, 2, 3, 4]) == pytest.approx(-1.5 / math.sqrt(4.5 * 5))
