"""Tokens are drawn by inverse CDF exactly, from all or from the likely ones; log-probs are those of the whole distribution.

The reference for what top-k, top-p and min-p leave is written down once more here, by sorting everything in double precision.
"""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.core.protocols import Sampling
from tether.models.fast.decoding import sampling as sampling_module
from tether.models.fast.decoding.sampling import among_candidates, bisected, least_probability, sample

PROBABILITIES = [0.1, 0.2, 0.3, 0.4]
LOGITS = torch.tensor(PROBABILITIES).log()
RULES = [
    Sampling(top_k=7),
    Sampling(top_p=0.6),
    Sampling(min_p=0.2),
    Sampling(temperature=0.7, top_k=40, top_p=0.8),
    Sampling(temperature=1.5, top_k=12, top_p=0.9, min_p=0.3),
    Sampling(top_p=0.95, min_p=0.01),
]


def _picks(logits: Tensor, sampling: Sampling, uniforms: list[float]) -> list[int]:
    rows = logits.expand(len(uniforms), -1)
    return sample(rows, sampling, torch.tensor(uniforms))[0].tolist()


def _possible(probabilities: list[float], sampling: Sampling) -> set[int]:
    """What 200 uniforms spread over the unit interval pick."""
    return set(_picks(torch.tensor(probabilities).log(), sampling, np.linspace(0, 1, 200, endpoint=False).tolist()))


def _exact(logits_V: Tensor, sampling: Sampling) -> np.ndarray:
    """The distribution that is drawn from: sort, cut, cut, cut."""
    probs = torch.softmax(logits_V.double() / sampling.temperature, dim=-1).numpy()
    falling = np.sort(probs)[::-1]
    least = falling[sampling.top_k - 1] if sampling.top_k else 0.0
    left = falling[falling >= least]
    if sampling.top_p < 1:
        least = left[np.searchsorted(np.cumsum(left), sampling.top_p * left.sum())]
    least = max(least, sampling.min_p * falling[0])
    kept = np.where(probs >= least, probs, 0.0)
    return kept / kept.sum()


def test_literal_picks() -> None:
    assert _picks(LOGITS, Sampling(), [0.0, 0.05, 0.099, 0.11, 0.29, 0.31, 0.59, 0.61, 0.999]) == [0, 0, 0, 1, 1, 2, 2, 3, 3]


def test_temperature_sharpens() -> None:
    # Squares: 1, 4, 9, 16 in 30; the borders are 1/30, 5/30, 14/30.
    assert _picks(LOGITS, Sampling(temperature=0.5), [0.03, 0.04, 0.16, 0.17, 0.46, 0.47]) == [0, 1, 1, 2, 2, 3]


def test_log_probs_are_those_of_the_temperature() -> None:
    ids, logprobs = sample(LOGITS.expand(2, -1), Sampling(temperature=0.5), torch.tensor([0.0, 0.9]))
    assert ids.tolist() == [0, 3]
    assert logprobs.tolist() == pytest.approx([math.log(1 / 30), math.log(16 / 30)], abs=1e-6)


def test_zero_temperature_takes_the_most_likely_whatever_the_uniform() -> None:
    rows = torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]])
    for uniform in (0.0, 0.999):
        ids, logprobs = sample(rows, Sampling(temperature=0.0, top_p=0.5), torch.full((2,), uniform))
        assert ids.tolist() == [1, 0]
        assert logprobs.tolist() == pytest.approx(
            [3 - math.log(1 + math.e**3 + math.e), 5 - math.log(math.e**5 + math.e**3 + math.e)], abs=1e-5
        )


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_k=3), Sampling(top_p=0.9), Sampling(min_p=0.01)])
@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24, math.nextafter(1, 0)])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float, sampling: Sampling) -> None:
    never = -torch.inf
    for possible in ([2], [2, 5], [0], [7]):
        logits = torch.full((8,), never)
        logits[possible] = 1.5
        assert _picks(logits, sampling, [uniform])[0] in possible
    # Many terms: the cumulative sum ends a little off 1.
    logits = torch.cat([torch.full((3,), never), torch.linspace(-3, 3, 5000), torch.full((4000,), never)])
    assert 3 <= _picks(logits, sampling, [uniform])[0] < 5003


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_without_exclusions_not_a_bit_depends_on_them(temperature: float) -> None:
    """The plain draw, written out; an exclusion that excludes nothing picks the same tokens."""
    source = torch.Generator().manual_seed(3)
    logits, uniforms = 3 * torch.randn(64, 500, generator=source), torch.rand(64, generator=source)
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1)
    want = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=500), Sampling(temperature, min_p=1e-30)):
        ids, got = sample(logits, sampling, uniforms)
        assert torch.equal(ids, want)
        assert torch.equal(got, logprobs[torch.arange(64), want])


def test_literal_exclusions() -> None:
    assert _possible(PROBABILITIES, Sampling(top_k=2)) == {2, 3}
    assert _picks(LOGITS, Sampling(top_k=2), [0.0, 0.42, 0.44, 0.99]) == [2, 2, 3, 3]  # 3/7 is the border
    assert _possible(PROBABILITIES, Sampling(top_p=0.39)) == {3}
    assert _possible(PROBABILITIES, Sampling(top_p=0.41)) == {2, 3}
    assert _possible(PROBABILITIES, Sampling(top_p=0.71)) == {1, 2, 3}
    assert _possible(PROBABILITIES, Sampling(min_p=0.6)) == {2, 3}
    assert _possible(PROBABILITIES, Sampling(min_p=0.4)) == {1, 2, 3}
    assert _possible(PROBABILITIES, Sampling(min_p=1.0)) == {3}


def test_each_rule_applies_to_what_the_one_before_left() -> None:
    # Of 0.4, 0.3 and 0.2 that top-k leaves, 0.4 is 0.444 of the whole: enough for 0.44 here, not enough without top-k.
    assert _possible(PROBABILITIES, Sampling(top_p=0.44)) == {2, 3}
    assert _possible(PROBABILITIES, Sampling(top_k=3, top_p=0.44)) == {3}
    assert _possible(PROBABILITIES, Sampling(top_k=3, top_p=0.99, min_p=0.7)) == {2, 3}
    assert _possible(PROBABILITIES, Sampling(top_k=2, top_p=0.99, min_p=0.1)) == {2, 3}


@pytest.mark.parametrize("sampling", [Sampling(top_k=2), Sampling(top_p=0.5)])
def test_tokens_that_tie_with_the_last_one_are_drawn_too(sampling: Sampling) -> None:
    assert _possible([0.25, 0.25, 0.25, 0.25], sampling) == {0, 1, 2, 3}
    assert _possible([0.1, 0.4, 0.1, 0.2, 0.2], sampling) == {1, 3, 4}


def test_log_probs_ignore_exclusions() -> None:
    ids, logprobs = sample(LOGITS.expand(2, -1), Sampling(top_k=2, top_p=0.9, min_p=0.1), torch.tensor([0.1, 0.9]))
    assert ids.tolist() == [2, 3]
    assert logprobs.tolist() == pytest.approx([math.log(0.3), math.log(0.4)], abs=1e-6)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.5), *RULES], ids=str)
def test_draws_follow_the_distribution_that_is_left(sampling: Sampling) -> None:
    """Chi-square of 40000 draws from 100 words, those with fewer than five expected draws taken together.

    Four standard deviations above its mean, and a little for few cells: by chance less than once in a thousand, and the seed is fixed.
    """
    num_draws = 40_000
    logits_V = 2 * torch.randn(100, generator=torch.Generator().manual_seed(1))
    uniforms = torch.rand(num_draws, generator=torch.Generator().manual_seed(2))
    ids, _ = sample(logits_V.expand(num_draws, -1), sampling, uniforms)
    expected = num_draws * _exact(logits_V, sampling)
    counts = np.bincount(ids.numpy(), minlength=100)
    assert not counts[expected == 0].any()
    rare = (expected < 5) & (expected > 0)
    cells = [(counts[n], expected[n]) for n in np.flatnonzero(expected >= 5)] + [(counts[rare].sum(), expected[rare].sum())] * bool(
        rare.any()
    )
    chi_square, freedom = sum((count - mean) ** 2 / mean for count, mean in cells), len(cells) - 1
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom) + 4
    without = _exact(logits_V, Sampling(temperature=sampling.temperature))
    assert not sampling.truncates or (without[expected == 0].sum() > 0.001)  # the rule does exclude something


@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_thresholds_by_candidates_by_bisection_and_by_sorting_agree(spread: float, top_p: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flat rows need every candidate, peaked ones a few; both are in one batch."""
    monkeypatch.setattr(sampling_module, "CANDIDATES", (4, 32))
    scales_B1 = torch.tensor([spread, 0.0, 8.0, spread])[:, None]
    probs_BV = torch.softmax(scales_B1 * torch.randn(4, 700, generator=torch.Generator().manual_seed(5)), dim=-1)
    target_B = top_p * probs_BV.sum(dim=-1)
    falling_BV = probs_BV.sort(dim=-1, descending=True).values
    first_B1 = (falling_BV.double().cumsum(dim=-1) < target_B[:, None].double() * (1 - 1e-6)).sum(dim=-1, keepdim=True)
    last_B1 = (falling_BV.double().cumsum(dim=-1) < target_B[:, None].double() * (1 + 1e-6)).sum(dim=-1, keepdim=True).clamp(max=699)
    for found_B in (among_candidates(probs_BV, target_B), bisected(probs_BV, target_B)):
        assert (found_B[:, None] <= falling_BV.gather(1, first_B1)).all() and (found_B[:, None] >= falling_BV.gather(1, last_B1)).all()
        assert all((probs_BV[b] == found_B[b]).any() for b in range(4))  # a probability of a token, not a number between two


def test_the_threshold_of_a_wide_vocabulary() -> None:
    """More words than the last bounded number of candidates, and a row that needs them all."""
    probs_BV = torch.cat([torch.full((1, 9000), 1 / 9000), torch.softmax(torch.linspace(0, 30, 9000)[None], dim=-1)])
    least_B = least_probability(probs_BV, Sampling(top_p=0.95))
    assert float(least_B[0]) == pytest.approx(1 / 9000)
    kept = probs_BV[1] >= least_B[1]
    assert float(probs_BV[1][kept].sum()) >= 0.95 and float(probs_BV[1][kept].sum() - least_B[1]) < 0.95


@pytest.mark.parametrize("sampling", [Sampling(), *RULES], ids=str)
def test_logits_that_are_not_numbers_give_log_probs_that_are_not(sampling: Sampling) -> None:
    ids, logprobs = sample(torch.full((2, 60), torch.nan), sampling, torch.tensor([0.2, 0.9]))
    assert torch.isnan(logprobs).all() and ((ids >= 0) & (ids < 60)).all()
