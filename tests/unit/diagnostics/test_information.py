"""measure_information: numbers worked by hand, the identity of entropies, both ends (collapse, separation), ties, and extreme input.

Matrices are written as probabilities p(z_n | x_j) where that makes the arithmetic plain; the function gets their logs.
"""

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from tether import Information, measure_information

LOG = math.log


def by_loops(scores: list[list[float]], lengths: list[int], source: list[int]) -> dict[str, float]:
    """The definitions, one reasoning at a time, in plain Python."""
    num = len(scores)
    matched, marginal = [], []
    for row, own in zip(scores, source, strict=True):
        peak = max(row)
        matched.append(row[own])
        marginal.append(peak + LOG(math.fsum(math.exp(value - peak) for value in row)) - LOG(len(row)))
    per_token = [m / n for m, n in zip(marginal, lengths, strict=True)]
    mean = math.fsum(per_token) / num
    sigma = math.sqrt(math.fsum((value - mean) ** 2 for value in per_token) / num)
    mi = math.fsum((a - b) / n for a, b, n in zip(matched, marginal, lengths, strict=True)) / num
    return {
        "mi": mi,
        "mi_seq": math.fsum(a - b for a, b in zip(matched, marginal, strict=True)) / num,
        "sigma": sigma,
        "mi_zscore": mi / (sigma + 0.001),
        "h_conditional": -math.fsum(a / n for a, n in zip(matched, lengths, strict=True)) / num,
        "h_marginal": -mean,
        "h_conditional_seq": -math.fsum(matched) / num,
        "h_marginal_seq": -math.fsum(marginal) / num,
    }


def shuffled_recall(row: list[float], own: int, k: int) -> float:
    """Break ties in every possible order and count how often the own column is among the best k."""
    orders = list(itertools.permutations(range(len(row))))
    return sum(own in sorted(order, key=lambda j: -row[j])[:k] for order in orders) / len(orders)


def random_scores(num: int, num_prompts: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    source = rng.integers(num_prompts, size=num)
    scores = -60 + 8 * rng.normal(size=(num, num_prompts))
    scores[np.arange(num), source] += 5
    return scores, rng.integers(1, 40, size=num), source


def test_two_by_two_by_hand() -> None:
    """p = [1/2 1/8; 1/8 3/8], each reasoning its own prompt's, 1 and 2 tokens.

    Marginals (1/2 + 1/8) / 2 = 5/16 and 1/4. Gains log(8/5) = 0.4700036 and log(3/2) = 0.4054651; the second is over 2 tokens.
    """
    info = measure_information(np.log([[1 / 2, 1 / 8], [1 / 8, 3 / 8]]), [1, 2], [0, 1])
    assert info.mi_seq == pytest.approx((0.47000362924573563 + 0.4054651081081644) / 2, abs=1e-15)
    assert info.mi == pytest.approx((0.47000362924573563 + 0.4054651081081644 / 2) / 2, abs=1e-15)
    assert info.mi == pytest.approx(0.33636809, abs=1e-8)
    assert info.h_conditional == pytest.approx((LOG(2) + LOG(8 / 3) / 2) / 2, abs=1e-15)
    assert info.h_marginal == pytest.approx((LOG(16 / 5) + LOG(4) / 2) / 2, abs=1e-15)
    assert info.h_conditional_seq == pytest.approx((LOG(2) + LOG(8 / 3)) / 2, abs=1e-15)
    assert info.h_marginal_seq == pytest.approx((LOG(16 / 5) + LOG(4)) / 2, abs=1e-15)
    # Marginals per token -log 3.2 = -1.1631508 and -log 2: half their distance is the standard deviation with ddof 0.
    assert info.sigma == pytest.approx((LOG(3.2) - LOG(2)) / 2, abs=1e-15)
    assert info.sigma == pytest.approx(0.23500181, abs=1e-8)
    assert info.mi_zscore == pytest.approx(0.33636809 / 0.23600181, abs=1e-7)
    assert (info.retrieval_acc, info.chance, info.recall) == (1, 0.5, {2: 1, 4: 1, 8: 1})
    assert (info.mi_interval, info.retrieval_p_value, info.mi_p_value, info.intervals) == (None, None, None, {})


def test_three_by_two_by_hand() -> None:
    """p = [1/2 1/4; 1/4 1/4; 1/8 1/2], prompts 0 1 0, tokens 1 2 4: one right, one tie, one wrong.

    Marginals 3/8, 1/4, 5/16; gains log 4/3, 0, log 2/5. The long reasoning weighs less per token, so mi > 0 > mi_seq.
    """
    info = measure_information(np.log([[1 / 2, 1 / 4], [1 / 4, 1 / 4], [1 / 8, 1 / 2]]), [1, 2, 4], [0, 1, 0], recall_at=(1, 2))
    assert info.retrieval_acc == 0.5
    assert info.recall == {1: 0.5, 2: 1}
    assert info.mi_seq == pytest.approx((LOG(4 / 3) + LOG(2 / 5)) / 3, abs=1e-15)
    assert info.mi_seq == pytest.approx(-0.20953622, abs=1e-8)
    assert info.mi == pytest.approx((LOG(4 / 3) + LOG(2 / 5) / 4) / 3, abs=1e-15)
    assert info.mi == pytest.approx(0.01953646, abs=1e-8)
    assert info.h_conditional == pytest.approx((LOG(2) + LOG(4) / 2 + LOG(8) / 4) / 3, abs=1e-15)
    assert info.h_marginal == pytest.approx((LOG(8 / 3) + LOG(4) / 2 + LOG(16 / 5) / 4) / 3, abs=1e-15)


def test_the_mixture_is_over_sequences_then_divided() -> None:
    """Two tokens, p = 1/4 and 1/64: the mixture is 17/128. Mixing per-token means 1/2 and 1/8 would give (5/16)^2 instead."""
    info = measure_information([[LOG(1 / 4), LOG(1 / 64)]], [2], [0])
    assert info.h_marginal == pytest.approx(LOG(128 / 17) / 2, abs=1e-15)
    assert info.h_marginal != pytest.approx(LOG(16 / 5), abs=0.1)
    assert info.mi_seq == pytest.approx(LOG(32 / 17), abs=1e-15)


def test_the_variant_that_upstream_logs() -> None:
    """The case above, mixed over per-token means: log(1/2) - log(5/16) = log(8/5), where MI-Est is log(32/17) / 2 = 0.316."""
    info = measure_information([[LOG(1 / 4), LOG(1 / 64)]], [2], [0])
    assert info.mi_token_mean == pytest.approx(LOG(8 / 5), abs=1e-15)
    assert info.mi == pytest.approx(LOG(32 / 17) / 2, abs=1e-15)
    ones = measure_information(np.log([[1 / 2, 1 / 8], [1 / 8, 3 / 8]]), [1, 1], [0, 1])
    assert ones.mi_token_mean == ones.mi == ones.mi_seq, "reasonings of one token: no difference"


@pytest.mark.parametrize(("num", "num_prompts"), [(1, 1), (5, 1), (1, 4), (7, 3), (40, 8), (3, 30)])
def test_against_plain_loops(num: int, num_prompts: int) -> None:
    scores, lengths, source = random_scores(num, num_prompts, seed=num)
    info = measure_information(scores, lengths, source)
    for name, value in by_loops(scores.tolist(), lengths.tolist(), source.tolist()).items():
        assert getattr(info, name) == pytest.approx(value, rel=1e-12, abs=1e-13), name
    assert info.h_marginal == pytest.approx(info.h_conditional + info.mi, abs=1e-12)
    assert info.h_marginal_seq == pytest.approx(info.h_conditional_seq + info.mi_seq, abs=1e-12)
    assert info.chance == 1 / num_prompts


# --------------------------------------------------------------------------------------------------------- the two ends


@pytest.mark.parametrize("num_prompts", [2, 3, 7, 16])
def test_total_collapse(num_prompts: int) -> None:
    """Every prompt explains every reasoning equally well: exactly chance, exactly k of P, no information."""
    rng = np.random.default_rng(0)
    rows = -300 * rng.random(21)
    scores = np.repeat(rows[:, None], num_prompts, axis=1)
    info = measure_information(scores, rng.integers(1, 9, 21), rng.integers(num_prompts, size=21), recall_at=(1, 2, 4, 8))
    assert info.retrieval_acc == pytest.approx(1 / num_prompts, rel=1e-15)
    assert info.recall == pytest.approx({k: min(1, k / num_prompts) for k in (1, 2, 4, 8)}, rel=1e-15)
    assert info.mi == pytest.approx(0, abs=1e-14)
    assert info.mi_seq == pytest.approx(0, abs=1e-13)


def test_total_collapse_has_exactly_no_information() -> None:
    """The sign of a rounding error must not decide whether a run is informed (regimes ask for mi_seq > 0)."""
    for value, num_prompts in ((-0.1, 3), (-0.1, 8), (-7.3, 3), (-33.3, 5)):
        info = measure_information(np.full((6, num_prompts), value), [5] * 6, [0, 1, 2, 0, 1, 2])
        assert (info.mi, info.mi_seq, info.mi_zscore) == (0, 0, 0)


@pytest.mark.parametrize("num_prompts", [2, 5, 32])
def test_perfect_separation(num_prompts: int) -> None:
    """Other prompts are 1,000 nats worse, which underflows: mi_seq is log P, the most it can be."""
    scores = np.where(np.eye(num_prompts, dtype=bool), -20.0, -1020.0)
    info = measure_information(scores, np.full(num_prompts, 10), np.arange(num_prompts))
    assert info.mi_seq == pytest.approx(LOG(num_prompts), abs=1e-13)
    assert info.mi == pytest.approx(LOG(num_prompts) / 10, abs=1e-14)
    assert info.retrieval_acc == 1
    assert info.recall == {2: 1, 4: 1, 8: 1}
    assert info.h_conditional == 2


def test_misled_reasoning_has_negative_information() -> None:
    """The own prompt is 1,000 nats worse than the one other: log 2 - 1000."""
    info = measure_information([[-1020.0, -20.0]], [1], [0])
    assert info.mi_seq == pytest.approx(LOG(2) - 1000, abs=1e-12)
    assert info.retrieval_acc == 0


# ----------------------------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize(
    ("row", "own", "expected"),
    [
        # expected for k = 1, 2, 3, 4
        ([-1, -2, -3, -4], 0, (1, 1, 1, 1)),
        ([-1, -2, -3, -4], 2, (0, 0, 1, 1)),
        ([-1, -2, -2, -4], 1, (0, 1 / 2, 1, 1)),  # one better, two equal
        ([-1, -1, -1, -4], 0, (1 / 3, 2 / 3, 1, 1)),
        ([-1, -1, -1, -4], 3, (0, 0, 0, 1)),
        ([-2, -2, -2, -1], 0, (0, 1 / 3, 2 / 3, 1)),
        ([-5, -5, -5, -5], 3, (1 / 4, 2 / 4, 3 / 4, 1)),
    ],
)
def test_ties_are_shared(row: list[float], own: int, expected: tuple[float, ...]) -> None:
    info = measure_information([row], [3], [own], recall_at=(1, 2, 3, 4))
    assert [info.recall[k] for k in (1, 2, 3, 4)] == pytest.approx(expected, rel=1e-15)
    assert [shuffled_recall(row, own, k) for k in (1, 2, 3, 4)] == pytest.approx(expected, rel=1e-15)
    assert info.retrieval_acc == info.recall[1]


def test_recall_against_every_order_of_ties() -> None:
    rng = np.random.default_rng(5)
    scores = rng.integers(-3, 0, size=(30, 5)).astype(float)
    source = rng.integers(5, size=30)
    info = measure_information(scores, np.ones(30), source, recall_at=(1, 2, 3, 4, 5, 9))
    for k, value in info.recall.items():
        expected = np.mean([shuffled_recall(row, own, min(k, 5)) for row, own in zip(scores.tolist(), source, strict=True)])
        assert value == pytest.approx(expected, rel=1e-12), k


def test_recall_above_the_number_of_prompts_is_one() -> None:
    info = measure_information([[-9.0, -1.0, -1.0]], [1], [0], recall_at=(2, 3, 4, 100))
    assert info.recall == {2: 0, 3: 1, 4: 1, 100: 1}


# ---------------------------------------------------------------------------------------------------------------- sigma


def test_sigma_ema() -> None:
    """Batch sigma 0.23500181 (two by two, above). From 0.5: 0.45 + 0.023500181 = 0.473500181, then 0.9 of that plus the same again."""
    scores, lengths, source = np.log([[1 / 2, 1 / 8], [1 / 8, 3 / 8]]), [1, 2], [0, 1]
    sigma = (LOG(3.2) - LOG(2)) / 2
    first = measure_information(scores, lengths, source)
    assert first.sigma_ema == first.sigma, "nothing before: it starts here"
    assert first.mi_zscore_ema == first.mi_zscore
    second = measure_information(scores, lengths, source, sigma_ema=0.5)
    assert second.sigma_ema == pytest.approx(0.45 + 0.1 * sigma, rel=1e-14)
    assert second.sigma_ema == pytest.approx(0.47350018, abs=1e-8)
    assert second.sigma == first.sigma
    assert second.mi_zscore == first.mi_zscore
    assert second.mi_zscore_ema == pytest.approx(0.33636809 / 0.47450018, abs=1e-7)
    third = measure_information(scores, lengths, source, sigma_ema=second.sigma_ema)
    assert third.sigma_ema == pytest.approx(0.405 + 0.19 * sigma, rel=1e-14)
    assert measure_information(scores, lengths, source, sigma_ema=0.0).sigma_ema == pytest.approx(0.1 * sigma, rel=1e-14), "zero is a value"


def test_the_floor_of_the_z_score() -> None:
    """Mirror images have the same marginal, so sigma is 0 and only the floor of 1e-3 divides."""
    info = measure_information(np.log([[1 / 2, 1 / 8], [1 / 8, 1 / 2]]), [1, 1], [0, 1])
    assert info.sigma == pytest.approx(0, abs=1e-15)
    assert info.mi_zscore == pytest.approx(LOG(8 / 5) * 1000, rel=1e-9)


# ------------------------------------------------------------------------------------------------------- extreme input


def test_very_negative_log_probs_stay_finite() -> None:
    """-1e5 and -1e5 - 1: exp underflows unless the peak is taken out first."""
    info = measure_information([[-1e5, -1e5 - 1], [-2e5, -1e5]], [1000, 500], [0, 1])
    values = [v for v in vars_of(info).values() if isinstance(v, float)]
    assert all(math.isfinite(value) for value in values)
    assert info.mi_seq == pytest.approx((LOG(2) - LOG(1 + math.exp(-1)) + LOG(2)) / 2, abs=1e-10)
    assert info.h_marginal_seq == pytest.approx(info.h_conditional_seq + info.mi_seq, rel=1e-14)


def vars_of(info: Information) -> dict[str, Any]:
    return {name: getattr(info, name) for name in info.__dataclass_fields__}


@pytest.mark.parametrize("convert", [np.float32, "torch32", "bfloat16", "grad"])
def test_float32_input_is_computed_in_float64(convert: Any) -> None:
    """The widened values give the same numbers; in float32 the sums near -900 would be off by 1e-5."""
    scores, lengths, source = random_scores(50, 6, seed=2)
    scores -= 900
    as_torch = torch.tensor(scores, dtype=torch.bfloat16 if convert == "bfloat16" else torch.float32)
    given: Any = scores.astype(np.float32) if convert is np.float32 else as_torch
    if convert == "grad":
        given = as_torch.requires_grad_()
    widened = as_torch.detach().double().numpy()
    info = measure_information(given, torch.tensor(lengths), torch.tensor(source))
    for name, value in by_loops(widened.tolist(), lengths.tolist(), source.tolist()).items():
        assert getattr(info, name) == pytest.approx(value, rel=1e-12, abs=1e-13), name


def test_lists_numpy_and_torch_agree() -> None:
    scores, lengths, source = random_scores(12, 4, seed=9)
    reference = measure_information(scores, lengths, source, bootstrap=20, permutations=20)
    assert measure_information(scores.tolist(), lengths.tolist(), source.tolist(), bootstrap=20, permutations=20) == reference
    assert (
        measure_information(torch.tensor(scores), torch.tensor(lengths), torch.tensor(source), bootstrap=20, permutations=20) == reference
    )


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"logprobs": [-1.0, -2.0]}, ["logprobs", "(2,)", "[N, P]"]),
        ({"logprobs": [[[-1.0]]]}, ["logprobs", "(1, 1, 1)"]),
        ({"logprobs": np.zeros((0, 2)), "lengths": [], "source": []}, ["logprobs", "(0, 2)", "at least one reasoning"]),
        ({"logprobs": np.zeros((2, 0))}, ["logprobs", "(2, 0)"]),
        ({"logprobs": -3.0}, ["logprobs", "()"]),
        ({"logprobs": [[-1.0, -2.0], [-1.0]]}, ["logprobs", "numbers"]),
        ({"logprobs": [["a", "b"], ["c", "d"]]}, ["logprobs", "numbers"]),
        ({"logprobs": [[-1.0, float("nan")], [-1.0, -2.0]]}, ["logprobs", "1 non-finite"]),
        ({"logprobs": [[-1.0, float("-inf")], [float("inf"), -2.0]]}, ["logprobs", "2 non-finite"]),
        ({"lengths": [1]}, ["lengths", "(1,)", "[2]"]),
        ({"lengths": [[1], [1]]}, ["lengths", "(2, 1)"]),
        ({"lengths": [1, 0]}, ["lengths holds 0", "at least 1"]),
        ({"lengths": [-3, 1]}, ["lengths holds -3"]),
        ({"lengths": [0.5, 1]}, ["lengths holds 0.5"]),
        ({"lengths": [1, float("nan")]}, ["lengths", "non-finite"]),
        ({"lengths": [1, float("inf")]}, ["lengths", "non-finite"]),
        ({"source": [0, 1, 1]}, ["source", "(3,)", "[2]"]),
        ({"source": [0, 2]}, ["source", "0..1", "to 2"]),
        ({"source": [-1, 1]}, ["source", "0..1", "from -1"]),
        ({"source": [0, 0.5]}, ["source", "column indices"]),
        ({"source": [0, float("nan")]}, ["source", "non-finite"]),
        ({"source": None}, ["source"]),
    ],
)
def test_bad_input(changed: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        measure_information(**{"logprobs": [[-1.0, -2.0], [-3.0, -1.0]], "lengths": [1, 1], "source": [0, 1], **changed})
    for word in words[1:]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"permutations": -3},
        {"bootstrap": 1.5},
        {"permutations": 0.5},
        {"sigma_ema": float("nan")},
        {"sigma_ema": -5.0},
        {"recall_at": (0,)},
        {"recall_at": (1.5,)},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        measure_information([[-1.0, -2.0], [-3.0, -1.0]], [1, 1], [0, 1], **options)
