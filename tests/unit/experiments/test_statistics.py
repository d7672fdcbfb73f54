"""Intervals over few seeds and rank correlations, against values worked out by hand."""

import math

import numpy as np
import pytest

from tether.experiments.statistics import bootstrapped, contrast, level, mean_of, rank_correlations, spearman


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


def test_spearman_of_a_textbook_example() -> None:
    """Squared rank differences 1 + 1 + 1 + 1 + 0 = 4: 1 - 6 x 4 / (5 x 24) = 0.8."""
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert spearman([1, 2, 3], [7, 7, 7]) == 0.0


def test_ties_share_the_mean_of_their_ranks() -> None:
    """Ranks of 10, 20, 20, 5: 2, 3.5, 3.5, 1. With 1, 2, 3, 4: products sum to -1.5, over sqrt(4.5 x 5)."""
    assert spearman([10, 20, 20, 5], [1, 2, 3, 4]) == pytest.approx(-1.5 / math.sqrt(4.5 * 5))


def test_levels_of_strata_do_not_count() -> None:
    """Within both strata x and y rise together; the second stratum has a lower x and a higher y, so ranks across strata say the opposite."""
    x, y = [10, 11, 12, 1, 2, 3], [0.1, 0.2, 0.3, 0.7, 0.8, 0.9]
    assert rank_correlations(x, y, ["a"] * 3 + ["b"] * 3, np.ones((1, 6))).tolist() == pytest.approx([1.0])
    assert spearman(x, y) < 0


def test_strata_count_by_their_runs() -> None:
    """Four runs that agree (sum of centred products 5/16), two that do not (-0.5/4): (5/16 - 1/8) / (5/16 + 1/8) = 3/7."""
    x, y = [1, 2, 3, 4, 1, 2], [1, 2, 3, 4, 2, 1]
    assert rank_correlations(x, y, ["a"] * 4 + ["b"] * 2, np.ones((1, 6))).tolist() == pytest.approx([3 / 7])


def test_a_run_that_is_drawn_twice_counts_as_two_runs() -> None:
    """The sample with run 0 twice and without run 3 has the correlation of that sample written out."""
    x, y = [3.0, 1.0, 2.0, 9.0], [2.0, 3.0, 5.0, 0.0]
    found = rank_correlations(x, y, [0] * 4, np.array([[1.0, 1, 1, 1], [2, 1, 1, 0]]))
    assert found.tolist() == pytest.approx([spearman(x, y), spearman([3, 3, 1, 2], [2, 2, 3, 5])])


def test_bootstrap_is_deterministic_and_brackets_the_value() -> None:
    x = [float(number) for number in range(12)]
    y = [number + (3.0 if number % 3 == 0 else 0.0) for number in x]
    first, second = (bootstrapped(lambda counts: rank_correlations(x, y, [0] * 12, counts), [0] * 12) for _ in range(2))
    assert first == second
    assert 0 < first.low < first.value <= first.high <= 1


def test_bootstrap_interval_of_a_share() -> None:
    """50 of 100 runs: the share of a resample has a standard deviation of 0.05, so 95% lie within 0.5 +- 0.098."""
    found = bootstrapped(lambda counts: counts[:, :50].sum(axis=1) / 100, [0] * 100)
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.402, 0.598), abs=0.015)


def test_bootstrap_of_three_runs_has_no_interval() -> None:
    assert not bootstrapped(lambda counts: counts.sum(axis=1), [0, 0, 0]).has_interval


def test_bootstrap_draws_within_strata() -> None:
    """Every draw has three runs of the first stratum and one of the second."""
    seen = set()

    def statistic(counts: np.ndarray) -> np.ndarray:
        seen.update(counts[:, :3].sum(axis=1).tolist())
        return counts[:, 0]

    bootstrapped(statistic, ["a", "a", "a", "b"])
    assert seen == {3.0}
