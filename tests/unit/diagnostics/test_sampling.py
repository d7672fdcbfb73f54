"""Subsampling: every row equally likely, prompts keep their shares, means unbiased and their error right, all by exact enumeration."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tether.core.errors import BadInput
from tether.core.seeding import generator
from tether.diagnostics.information import measure_information
from tether.diagnostics.sampling import sample_reasonings, sampling_error, systematic


def every_start(order: list[int], count: int) -> list[tuple[Fraction, tuple[int, ...]]]:
    """All outcomes of a systematic draw from one order, with their probabilities."""
    return [(Fraction(1, len(order)), tuple(systematic(np.array(order), count, start))) for start in range(len(order))]


@pytest.mark.parametrize(("size", "count"), [(5, 2), (5, 3), (7, 4), (6, 3), (4, 1), (8, 7)])
def test_every_row_is_equally_likely_from_any_order(size: int, count: int) -> None:
    """Exactly count / N, in fractions, and no row twice."""
    chance = dict.fromkeys(range(size), Fraction(0))
    for weight, rows in every_start(list(reversed(range(size))), count):
        assert len(set(rows)) == count
        for row in rows:
            chance[row] += weight
    assert set(chance.values()) == {Fraction(count, size)}


def test_the_mean_is_unbiased_over_all_subsets() -> None:
    """Rows of two prompts, 3 and 2; all orders that the draw can make, all starts: the expected mean is the mean of all."""
    values = [Fraction(v) for v in (7, -2, 5, 100, 40)]
    orders = [
        [*first, *second]
        for blocks in ([(0, 1, 2), (3, 4)], [(3, 4), (0, 1, 2)])
        for first in itertools.permutations(blocks[0])
        for second in itertools.permutations(blocks[1])
    ]
    for count in (1, 2, 3, 4):
        outcomes = [(weight / len(orders), rows) for order in orders for weight, rows in every_start(order, count)]
        assert sum(weight for weight, _ in outcomes) == 1
        assert sum(weight * sum(values[row] for row in rows) / count for weight, rows in outcomes) == Fraction(sum(values), 5)


def test_places_by_hand() -> None:
    assert systematic(np.arange(6), 3, 0) == systematic(np.arange(6), 3, 2) == [0, 2, 4]
    assert systematic(np.arange(6), 3, 3) == systematic(np.arange(6), 3, 5) == [1, 3, 5]
    assert systematic(np.arange(5), 2, 0) == [0, 2] and systematic(np.arange(5), 2, 4) == [2, 4]


def test_prompts_keep_their_shares() -> None:
    """20, 10, 6 and 4 reasonings, half drawn: 10, 5, 3 and 2 to within one."""
    source = ["a"] * 20 + ["b"] * 10 + ["c"] * 6 + ["d"] * 4
    for seed in range(30):
        sample = sample_reasonings(source, 20, generator("test", seed))
        assert len(sample) == len(set(sample)) == 20 and list(sample) == sorted(sample)
        drawn = [source[row] for row in sample]
        assert all(abs(drawn.count(prompt) - share) <= 1 for prompt, share in (("a", 10), ("b", 5), ("c", 3), ("d", 2)))


def test_interleaved_rows_keep_their_shares_too() -> None:
    source = [n % 3 for n in range(12)]
    for seed in range(20):
        rows = sample_reasonings(source, 6, generator("test", seed))
        assert sorted([source[row] for row in rows].count(prompt) for prompt in range(3)) == [2, 2, 2]


def test_how_often_rows_are_drawn() -> None:
    """Over many seeds each of 7 rows comes in 3/7 of the draws: within four standard errors."""
    source, draws = [0, 0, 0, 1, 1, 2, 2], 3000
    counts = np.zeros(7)
    pairs = np.zeros((7, 7))
    for seed in range(draws):
        rows = list(sample_reasonings(source, 3, generator("test", seed)))
        counts[rows] += 1
        pairs[np.ix_(rows, rows)] += 1
    error = math.sqrt(3 / 7 * 4 / 7 / draws)
    assert np.abs(counts / draws - 3 / 7).max() < 4 * error
    assert (pairs > 0).sum() >= 49 - 2 * 5, "nearly any two rows can come together"


def test_the_draw_is_the_seeds() -> None:
    source = [n // 4 for n in range(32)]
    assert sample_reasonings(source, 9, generator("a", 1)) == sample_reasonings(source, 9, generator("a", 1))
    assert len({sample_reasonings(source, 9, generator("a", seed)) for seed in range(10)}) > 5


@pytest.mark.parametrize("count", [3, 4, 100])
def test_nothing_to_leave_out(count: int) -> None:
    sample = sample_reasonings([0, 0, 1], count, generator("x"))
    assert sample == (0, 1, 2)
    assert len(sample_reasonings([0, 0, 1], 2, generator("x"))) == 2


def test_a_row_of_the_matrix_says_the_same_in_any_company() -> None:
    """The means over single rows are the whole's: why a subset of rows is unbiased for information and retrieval."""
    rng = np.random.default_rng(0)
    scores, lengths, source = rng.normal(size=(6, 3)) * 3 - 20, rng.integers(1, 9, 6), np.array([0, 0, 1, 1, 2, 2])
    whole = measure_information(scores, lengths, source)
    alone = [measure_information(scores[n : n + 1], lengths[n : n + 1], source[n : n + 1]) for n in range(6)]
    for name in ("mi", "mi_seq", "retrieval_acc", "h_conditional", "h_marginal"):
        assert np.mean([getattr(found, name) for found in alone]) == pytest.approx(getattr(whole, name), abs=1e-12)


# ------------------------------------------------------------------------------------------------------------- the error


@pytest.mark.parametrize("count", [2, 3, 5])
def test_the_error_against_all_subsets(count: int) -> None:
    """The mean of its square over all subsets is the variance of the mean over all subsets."""
    population = [3.0, -1.0, 4.0, 10.0, 5.5, -9.0]
    subsets = list(itertools.combinations(population, count))
    true_variance = np.var([np.mean(subset) for subset in subsets])
    assert np.mean([sampling_error(subset, 6) ** 2 for subset in subsets]) == pytest.approx(true_variance, rel=1e-12)


def test_the_error_by_hand() -> None:
    """1, 2, 3 of 6: s^2 = 1, half left out: sqrt(1/2 * 1/3)."""
    assert sampling_error([1.0, 2.0, 3.0], 6) == pytest.approx(math.sqrt(1 / 6), abs=1e-15)
    assert sampling_error(np.array([4.0, 4.0]), 9) == 0.0
    assert sampling_error([1.0, 2.0, 3.0], 3) == 0.0 == sampling_error([8.0], 1)


def test_the_spread_over_prompts_makes_the_error_smaller() -> None:
    """Prompts that differ: the real error of the draw stays below the stated one."""
    source = [n // 8 for n in range(32)]
    values = np.array([10.0 * prompt for prompt in source]) + np.tile([0.0, 1.0], 16)
    means, stated = [], []
    for seed in range(300):
        rows = list(sample_reasonings(source, 8, generator("test", seed)))
        means.append(values[rows].mean())
        stated.append(sampling_error(values[rows], 32))
    assert np.std(means) < 0.2 * np.mean(stated)
    assert np.mean(means) == pytest.approx(values.mean(), abs=0.05)


@pytest.mark.parametrize(
    ("values", "population", "words"),
    [
        ([1.0], 5, "draw at least 2"),
        ([], 5, "0 values cannot be drawn from a population of 5"),
        ([1.0, 2.0], 1, "2 values cannot be drawn from a population of 1"),
        ([1.0, math.nan], 5, "1 not finite"),
        ([[1.0, 2.0]], 5, r"got shape \(1, 2\)"),
    ],
)
def test_bad_values(values: Any, population: int, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        sampling_error(values, population)


def test_a_count_below_one() -> None:
    with pytest.raises(BadInput, match="count must be at least 1, got 0"):
        sample_reasonings([0, 1], 0, generator("x"))
