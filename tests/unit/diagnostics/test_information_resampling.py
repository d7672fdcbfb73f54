"""measure_information, how sure it is: intervals over whole prompts and the two permutation tests."""

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest

from tether import Information, measure_information
from tether.diagnostics import information

EVERY_NUMBER = {
    *("retrieval_acc", "recall_2", "recall_4", "recall_8", "mi", "mi_seq", "mi_token_mean", "mi_zscore", "mi_zscore_ema"),
    *("h_conditional", "h_marginal", "h_conditional_seq", "h_marginal_seq"),
}


def number(info: Information, name: str) -> float:
    return info.recall[int(name.removeprefix("recall_"))] if name.startswith("recall_") else float(getattr(info, name))


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
    return scores, rng.integers(1, 6, size=len(source)), source


def test_the_helper_gives_the_gains() -> None:
    assert measure_information(with_gains([0.1, 0.5], [0, 1]), [1, 1], [0, 1]).mi_seq == pytest.approx(0.3, abs=1e-14)


# ----------------------------------------------------------------------------------------------------------- intervals


def test_two_prompts_by_hand() -> None:
    """Prompt 0 gains 0.01 four times, prompt 1 gains 0.03 four times: mean 0.02, standard error 0.01, Student's t with 1 degree 12.7062.

    Eight independent rows would have a standard error of 0.0038 and t = 2.36: the prompts are the units.
    """
    source = [0, 0, 0, 0, 1, 1, 1, 1]
    info = measure_information(with_gains([0.01] * 4 + [0.03] * 4, source), [1] * 8, source, bootstrap=400)
    assert info.mi_interval == pytest.approx((0.02 - 0.127062, 0.02 + 0.127062), abs=1e-6)
    assert info.mi_interval == info.intervals["mi"]
    assert all(type(end) is float for end in info.mi_interval or ())


def test_every_number_has_an_interval_around_it() -> None:
    scores, lengths, source = gaussian(16, 4, seed=3)
    info = measure_information(scores, lengths, source, bootstrap=200, sigma_ema=0.7)
    assert set(info.intervals) == EVERY_NUMBER
    for name, (low, high) in info.intervals.items():
        assert low < number(info, name) < high, name


def test_shares_stay_shares_and_information_below_its_ceiling() -> None:
    """One miss in 24: Student's interval alone would end above 1, and above log 3."""
    scores = np.full((24, 3), -20.0)
    source = np.arange(24) % 3
    scores[np.arange(24), source] = -1.0
    scores[0] = [-20.0, -1.0, -20.0]
    info = measure_information(scores, np.ones(24), source, bootstrap=300)
    assert info.retrieval_acc == pytest.approx(23 / 24)
    assert info.intervals["retrieval_acc"][1] == 1
    assert info.intervals["mi_seq"][1] == math.log(3)
    assert info.intervals["retrieval_acc"][0] >= 0


def test_few_retrieved_end_at_zero() -> None:
    scores = np.full((24, 3), -1.0)
    source = np.arange(24) % 3
    scores[np.arange(24), source] = -20.0
    scores[0] = [-1.0, -20.0, -20.0]
    assert measure_information(scores, np.ones(24), source, bootstrap=300).intervals["retrieval_acc"][0] == 0


def test_prompts_that_agree_give_a_point() -> None:
    """Total collapse: information is 0 and retrieval 1/4 whatever the prompts are. The entropies still differ."""
    scores = np.repeat(np.random.default_rng(0).normal(size=(12, 1)) - 9, 4, axis=1)
    info = measure_information(scores, np.full(12, 3), np.arange(12) % 4, bootstrap=100)
    for name in ("mi", "mi_seq", "mi_token_mean", "mi_zscore"):
        assert info.intervals[name] == (number(info, name),) * 2, name
    assert info.intervals["retrieval_acc"] == (0.25, 0.25)
    assert info.intervals["h_conditional"][0] < info.h_conditional < info.intervals["h_conditional"][1]


@pytest.mark.parametrize("num_prompts", [1, 3])
def test_reasonings_of_one_prompt_are_resampled_themselves(num_prompts: int) -> None:
    """Own scores -1, -2, -3, -4, -5: mean entropy 3, standard error sqrt(2.5 / 5) = 0.70711, t with 4 degrees 2.7764."""
    scores = np.full((5, num_prompts), -6.0)
    scores[:, 0] = [-1.0, -2.0, -3.0, -4.0, -5.0]
    low, high = measure_information(scores, np.ones(5), np.zeros(5), bootstrap=1).intervals["h_conditional"]
    assert (low, high) == pytest.approx((3 - 1.9632, 3 + 1.9632), abs=2e-3)


def test_one_reasoning_is_a_point() -> None:
    info = measure_information([[-1.0, -4.0]], [2], [0], bootstrap=50)
    assert set(info.intervals) == EVERY_NUMBER
    assert all(ends == (number(info, name),) * 2 for name, ends in info.intervals.items())


def test_copies_of_members_do_not_narrow_the_interval() -> None:
    """Exactly, where columns play no part; otherwise the share of the columns moves a little, because copies pass for many that agree."""
    scores, lengths, source = gaussian(12, 2, seed=1)
    once = measure_information(scores, lengths, source, bootstrap=300).intervals
    many = measure_information(np.tile(scores, (10, 1)), np.tile(lengths, 10), np.tile(source, 10), bootstrap=300).intervals
    assert many["h_conditional"] == pytest.approx(once["h_conditional"], rel=1e-12)
    assert many["mi"] == pytest.approx(once["mi"], abs=0.02 * (once["mi"][1] - once["mi"][0]))


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


def test_information_lost_by_a_few_prompts_leans_the_interval_down() -> None:
    """Thirteen prompts near the ceiling and three at zero: the true value is likelier far below the estimate than far above it."""
    source = np.repeat(np.arange(16), 2)
    scores = np.full((32, 16), -9.0)
    scores[np.arange(32), source] = -1.0
    scores[:6] = -9.0
    low, high = measure_information(scores, np.ones(32), source, bootstrap=2000).intervals["h_conditional_seq"]
    estimate = (26 * 1 + 6 * 9) / 32
    assert high - estimate > 1.2 * (estimate - low), "entropy is the mirror image"


def test_sigma_carried_over_steadies_the_z_score() -> None:
    """With 0.9 of the divisor fixed its interval is nearly that of mi over the divisor; with none fixed sigma's luck counts too."""
    scores, lengths, source = gaussian(24, 4, seed=8)
    free = measure_information(scores, lengths, source, bootstrap=500)
    assert free.intervals["mi_zscore_ema"] == free.intervals["mi_zscore"]
    carried = measure_information(scores, lengths, source, bootstrap=500, sigma_ema=free.sigma)
    assert carried.intervals["mi_zscore"] == free.intervals["mi_zscore"]
    low, high = carried.intervals["mi"]
    of_mi = (high - low) / (carried.sigma_ema + 1e-3)
    widths = [ends[1] - ends[0] for ends in (carried.intervals["mi_zscore_ema"], free.intervals["mi_zscore"])]
    assert widths[0] == pytest.approx(of_mi, rel=0.1)
    assert abs(widths[1] - of_mi) > abs(widths[0] - of_mi)


def test_deterministic_by_seed() -> None:
    scores, lengths, source = gaussian(8, 4, seed=2)
    first, again, other = (measure_information(scores, lengths, source, bootstrap=100, permutations=30, seed=seed) for seed in (5, 5, 6))
    assert first == again
    assert first.mi_interval != other.mi_interval
    np.random.seed(0)
    assert measure_information(scores, lengths, source, bootstrap=100, permutations=30, seed=5) == first
    plain = measure_information(scores, lengths, source)
    assert (plain.mi, plain.retrieval_acc) == (first.mi, first.retrieval_acc), "resampling does not touch the estimate"


# ------------------------------------------------------------------------------------------------------------ p-values


def test_the_smallest_p_value() -> None:
    """Eight prompts, all retrieved: a shuffle ties only if it is the identity, 1 in 40,320."""
    scores = np.where(np.eye(8, dtype=bool), -1.0, -9.0)
    for shuffles in (9, 99):
        info = measure_information(scores, np.ones(8), np.arange(8), permutations=shuffles)
        assert info.retrieval_p_value == info.mi_p_value == 1 / (shuffles + 1)


@pytest.mark.parametrize("value", [-7.0, -33.3, -1e5 / 3])
def test_total_collapse_has_p_value_one(value: float) -> None:
    """Every shuffle does exactly as well, rounding or not."""
    scores = np.repeat(value * np.linspace(0.5, 1, 12)[:, None], 4, axis=1)
    info = measure_information(scores, np.full(12, 7), np.arange(12) % 4, permutations=50)
    assert info.retrieval_p_value == info.mi_p_value == 1


def test_likely_texts_and_likely_prompts_alone_have_p_value_one() -> None:
    """Scores that are a sum of a text's and a prompt's part: the mean own score is the same however sources are dealt, but for rounding."""
    scores = -0.1 * np.arange(30)[:, None] ** 1.5 - 0.7 * np.arange(6) - 900 / 7
    info = measure_information(scores, np.ones(30), np.arange(30) % 6, permutations=200)
    assert info.mi_p_value == 1


def test_against_all_shuffles() -> None:
    """Four rows and prompts; 24 shuffles can be listed, and the share that does at least as well is the limit of the p-value."""
    scores = np.array([[-1, -4, -4, -4], [-4, -1, -4, -4], [-4, -4, -3, -2], [-4, -4, -1, -4.0]])
    best = scores.argmax(axis=1).tolist()  # 0 1 3 2: two of four retrieved
    hits = sum(sum(own == column for own, column in zip(order, best, strict=True)) >= 2 for order in permutations(range(4)))
    exact = Fraction(hits, 24)
    assert exact == Fraction(7, 24)  # 6 with exactly two fixed points, 1 with four
    info = measure_information(scores, np.ones(4), np.arange(4), permutations=2000)
    assert info.retrieval_acc == 0.5
    assert info.retrieval_p_value == pytest.approx(float(exact), abs=0.035)  # 3.4 standard errors
    # Own scores -1 -1 -3 -4 sum to -9.
    sums = [sum(scores[n, column] for n, column in enumerate(order)) for order in permutations(range(4))]
    assert sum(total >= -9 for total in sums) == 2  # the identity, and the one that swaps the last two (-1 -1 -2 -1)
    assert info.mi_p_value == pytest.approx(2 / 24, abs=0.021)


def test_a_tie_earns_its_share_when_shuffled() -> None:
    """Own prompts 1 and 0: missed and retrieved, 1 in all. Swapped: a tie of two and missed, 1/2. So half of all shuffles do as well."""
    info = measure_information([[-1.0, -5.0, -1.0], [-1.0, -5.0, -5.0]], [1, 1], [1, 0], permutations=400)
    assert info.retrieval_p_value == pytest.approx(0.5, abs=0.08)


def test_uniform_under_the_null() -> None:
    """Scores that know nothing of their prompt: the p-values are uniform, up to coarse steps (ties make them larger, never smaller)."""
    rng = np.random.default_rng(7)
    source = np.repeat(np.arange(6), 10)
    found = [measure_information(rng.normal(size=(60, 6)), np.ones(60), source, permutations=39, seed=seed) for seed in range(150)]
    for p_values in (np.array([info.retrieval_p_value for info in found]), np.array([info.mi_p_value for info in found])):
        assert 0.42 < p_values.mean() < 0.65
        assert 0.03 < (p_values <= 0.2).mean() < 0.27
        assert (p_values <= 0.05).mean() < 0.11
        assert p_values.min() >= 1 / 40


def test_dependence_that_retrieval_cannot_see() -> None:
    """A scorer that always likes prompt 0 best retrieves at chance; that the own prompt lifts the score a little still shows."""
    rng = np.random.default_rng(1)
    source = np.repeat(np.arange(4), 16)
    scores = rng.normal(size=(64, 1)) + 0.3 * rng.normal(size=(64, 4)) - 50
    scores[:, 0] += 20
    scores[np.arange(64), source] += 0.4
    info = measure_information(scores, np.ones(64), source, permutations=500)
    assert info.retrieval_acc == info.chance == 0.25
    assert info.retrieval_p_value == 1
    assert info.mi_p_value is not None and info.mi_p_value < 0.01


def test_neither_likely_texts_nor_likely_prompts_are_dependence() -> None:
    """Any constant per row and per column leaves the p-value of dependence as it is."""
    rng = np.random.default_rng(2)
    source = np.arange(20) % 5
    scores = rng.normal(size=(20, 5))
    scores[np.arange(20), source] += 0.5
    moved = scores + 100 * rng.normal(size=(20, 1)) + 100 * rng.normal(size=(1, 5))
    p_values = [measure_information(matrix, np.ones(20), source, permutations=300).mi_p_value for matrix in (scores, moved)]
    assert p_values[0] == p_values[1]
    assert 1 / 301 < p_values[0] < 0.9, "between the ends, so that a difference could be seen"


def test_dependence_is_judged_per_token() -> None:
    """The same scores per token, from texts of 1 to 40 tokens."""
    rng = np.random.default_rng(3)
    source, lengths = np.arange(20) % 5, rng.integers(1, 41, size=20)
    scores = rng.normal(size=(20, 5))
    scores[np.arange(20), source] -= 0.3
    short = measure_information(scores, np.ones(20), source, permutations=300)
    long = measure_information(scores * lengths[:, None], lengths, source, permutations=300)
    assert short.mi_p_value == long.mi_p_value
    assert 0.02 < (short.mi_p_value or 0) < 0.9, "between the ends, so that a difference could be seen"


def test_shuffles_in_blocks_are_the_same_shuffles(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, lengths, source = gaussian(8, 2, seed=4)
    scores[np.arange(16), source] -= 0.7
    whole = measure_information(scores, lengths, source, permutations=100)
    monkeypatch.setattr(information, "SHUFFLED_AT_ONCE", 7 * 16 + 3)  # seven at a time, and two at the end
    blocks = measure_information(scores, lengths, source, permutations=100)
    assert (whole.retrieval_p_value, whole.mi_p_value) == (blocks.retrieval_p_value, blocks.mi_p_value)
    assert 0.02 < (whole.mi_p_value or 0) < 0.9


def test_the_p_values_do_not_depend_on_the_bootstrap() -> None:
    scores, source = np.random.default_rng(0).normal(size=(16, 8)), np.arange(16) % 8
    scores[np.arange(16), source] += 0.6
    alone = measure_information(scores, np.ones(16), source, permutations=200)
    beside = measure_information(scores, np.ones(16), source, permutations=200, bootstrap=50)
    assert (alone.retrieval_p_value, alone.mi_p_value) == (beside.retrieval_p_value, beside.mi_p_value)
