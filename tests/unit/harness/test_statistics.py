"""Rank correlations over runs and their bootstrap, against values worked out by hand."""

import numpy as np
import pytest

from harness.statistics import bootstrapped, rank_correlations
from tether.core.intervals import spearman


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
