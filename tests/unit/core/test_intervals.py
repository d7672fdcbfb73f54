"""Intervals over instances: values by hand, and coverage by simulation."""

import math

import numpy as np
import pytest

from tether.core.intervals import clustered_interval, difference_interval, mean_interval, student_t
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
