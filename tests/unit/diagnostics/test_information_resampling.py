"""measure_information, how sure it is: the bootstrap over whole prompts and the permutation test of retrieval."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from tether import measure_information


def with_gains(gains: list[float], source: list[int]) -> np.ndarray:
    """Cross-scores under two prompts in which row n gains gains[n] over the marginal (gain < log 2; one token).

    With p at the own prompt and 0 < q at the other, the gain is log(2 p / (p + q)), so q = p (2 exp(-gain) - 1).
    """
    scores = np.empty((len(gains), 2))
    for n, (gain, own) in enumerate(zip(gains, source, strict=True)):
        scores[n, own] = -3.0
        scores[n, 1 - own] = -3.0 + math.log(2 * math.exp(-gain) - 1)
    return scores


def gaussian(num_prompts: int, members: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    source = np.repeat(np.arange(num_prompts), members)
    scores = rng.normal(size=(len(source), num_prompts)) - 30
    scores[np.arange(len(source)), source] += 1
    return scores, np.ones(len(source)), source


def test_the_helper_gives_the_gains() -> None:
    assert measure_information(with_gains([0.1, 0.5], [0, 1]), [1, 1], [0, 1]).mi_seq == pytest.approx(0.3, abs=1e-14)


def test_two_prompts_resample_to_three_means() -> None:
    """Prompt 0 gains 0.1 four times, prompt 1 gains 0.5 four times: the resampled mean is 0.1, 0.3 or 0.5 with chances 1/4, 1/2, 1/4.

    So the 95% interval is (0.1, 0.5). Resampling the eight rows as if they were independent would give a narrower one.
    """
    source = [0, 0, 0, 0, 1, 1, 1, 1]
    info = measure_information(with_gains([0.1] * 4 + [0.5] * 4, source), [1] * 8, source, bootstrap=400)
    assert info.mi_interval == pytest.approx((0.1, 0.5), abs=1e-12)
    assert all(type(end) is float for end in info.mi_interval or ())


def test_prompts_weigh_by_their_rows() -> None:
    """Prompt 0 gains 0.1 three times, prompt 1 gains 0.5 once. The mean is over rows, (3 * 0.1 + 0.5) / 4 = 0.2, in resamples too.

    A single resample has both ends at its mean, so forty seeds show the set of means: 0.1, 0.2 and 0.5, and not the 0.3 between prompts.
    """
    source = [0, 0, 0, 1]
    scores = with_gains([0.1, 0.1, 0.1, 0.5], source)
    ends = {end for seed in range(40) for end in measure_information(scores, [1] * 4, source, bootstrap=1, seed=seed).mi_interval or ()}
    assert {round(end, 9) for end in ends} == {0.1, 0.2, 0.5}


def test_copies_of_members_do_not_narrow_the_interval() -> None:
    scores, lengths, source = gaussian(12, 2, seed=1)
    once = measure_information(scores, lengths, source, bootstrap=300)
    many = measure_information(np.tile(scores, (10, 1)), np.tile(lengths, 10), np.tile(source, 10), bootstrap=300)
    assert many.mi_interval == pytest.approx(once.mi_interval, rel=1e-12)


def test_the_interval_is_the_central_95_percent() -> None:
    """400 prompts of one reasoning each: the mean is close to normal, so the interval is mean +- 1.96 standard errors."""
    rng = np.random.default_rng(4)
    gains = rng.uniform(-0.5, 0.5, 400)
    own = np.arange(400)
    # P = 400 columns, all equal but the own one; solve p for the gain: log(400 p / (p + 399 q)) = gain with q = 1.
    share = np.exp(gains) / 400
    scores = np.zeros((400, 400))
    scores[own, own] = np.log(399 * share / (1 - share))
    info = measure_information(scores, np.ones(400), own, bootstrap=3000)
    assert info.mi == pytest.approx(gains.mean(), abs=1e-12)
    margin = 1.96 * gains.std() / 20
    assert info.mi_interval == pytest.approx((gains.mean() - margin, gains.mean() + margin), abs=0.1 * margin)


def test_deterministic_by_seed() -> None:
    scores, lengths, source = gaussian(8, 4, seed=2)
    first, again, other = (measure_information(scores, lengths, source, bootstrap=100, permutations=30, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.mi_interval != other.mi_interval
    np.random.seed(0)
    assert measure_information(scores, lengths, source, bootstrap=100, permutations=30, seed=5) == first
    plain = measure_information(scores, lengths, source)
    assert (plain.mi, plain.retrieval_acc) == (first.mi, first.retrieval_acc), "resampling does not touch the estimate"


def test_the_interval_contains_the_estimate() -> None:
    scores, lengths, source = gaussian(16, 4, seed=3)
    info = measure_information(scores, lengths, source, bootstrap=200)
    assert info.mi_interval is not None
    low, high = info.mi_interval
    assert low < info.mi < high


# ------------------------------------------------------------------------------------------------------------- p-value


def test_the_smallest_p_value() -> None:
    """Eight prompts, all retrieved: a shuffle ties only if it is the identity, 1 in 40,320."""
    scores = np.where(np.eye(8, dtype=bool), -1.0, -9.0)
    for shuffles in (9, 99):
        info = measure_information(scores, np.ones(8), np.arange(8), permutations=shuffles)
        assert info.retrieval_p_value == 1 / (shuffles + 1)


def test_total_collapse_has_p_value_one() -> None:
    """Every shuffle retrieves exactly as well."""
    info = measure_information(np.full((12, 4), -7.0), np.ones(12), np.arange(12) % 4, permutations=50)
    assert info.retrieval_p_value == 1


def test_against_all_shuffles() -> None:
    """Four rows and prompts; 24 shuffles can be listed, and the share that retrieves at least as well is the limit of the p-value."""
    scores = np.array([[-1, -4, -4, -4], [-4, -1, -4, -4], [-4, -4, -3, -2], [-4, -4, -1, -4.0]])
    best = scores.argmax(axis=1).tolist()  # 0 1 3 2: two of four retrieved
    hits = sum(sum(own == column for own, column in zip(order, best, strict=True)) >= 2 for order in permutations(range(4)))
    exact = Fraction(hits, 24)
    assert exact == Fraction(7, 24)  # 6 with exactly two fixed points, 1 with four
    info = measure_information(scores, np.ones(4), np.arange(4), permutations=2000)
    assert info.retrieval_acc == 0.5
    assert info.retrieval_p_value == pytest.approx(float(exact), abs=0.035)  # 3.4 standard errors


def test_uniform_under_the_null() -> None:
    """Scores that know nothing of their prompt: the p-value is uniform, up to its coarse steps (ties make it larger, never smaller)."""
    rng = np.random.default_rng(7)
    source = np.repeat(np.arange(6), 10)
    p_values = np.array(
        [
            measure_information(rng.normal(size=(60, 6)), np.ones(60), source, permutations=39, seed=seed).retrieval_p_value
            for seed in range(150)
        ]
    )
    assert 0.45 < p_values.mean() < 0.65
    assert 0.03 < (p_values <= 0.2).mean() < 0.27
    assert (p_values <= 0.05).mean() < 0.11
    assert p_values.min() >= 1 / 40


def test_the_p_value_does_not_depend_on_the_bootstrap() -> None:
    scores, source = np.random.default_rng(0).normal(size=(16, 8)), np.arange(16) % 8
    scores[np.arange(16), source] += 0.6
    alone = measure_information(scores, np.ones(16), source, permutations=200)
    beside = measure_information(scores, np.ones(16), source, permutations=200, bootstrap=50)
    assert alone.retrieval_p_value == beside.retrieval_p_value
