"""Sampling tokens: inverse CDF on uniforms that the caller passes, from all tokens or from the likely ones.

A sample needs one softmax, one cumulative sum and one binary search; torch.multinomial over a large vocabulary costs ten times as much
on a CPU. The uniforms belong to the conversation, so a sample does not depend on which other rows share its batch.

Top-k, top-p and min-p apply in this order, each to what the ones before left. All three come down to one number per row, the least
probability that may be sampled, and tokens that tie with it are kept too: what is left does not depend on the order of equal tokens, and top-k
may leave more than k of them. Nothing is sorted as a whole: top-k and top-p look at a bounded number of the likeliest tokens, more only
where these do not reach p. On a GPU top-p is a bisection over the bits of the threshold instead, which the host does not have to wait for.

Log-probs are those of the whole distribution at the temperature, whatever was excluded: the learner computes the same ones.

Shape legend: B rows, V vocabulary, C candidates.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tether.core.protocols import Sampling

CANDIDATES = (256, 4096)
"""How many of the likeliest tokens top-p looks at, until they reach p; after these, all."""
FLOAT_BITS = 30
"""Bits that tell the probabilities of float32 apart: the sign and the highest bit of the exponent are never set."""


def sample(logits_BV: Tensor, sampling: Sampling, uniforms_B: Tensor, never: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Sampled ids [B] and their log-probs [B] at the sampling temperature; temperature 0 takes the most likely token.

    A uniform u picks the first token whose cumulative probability exceeds u, so a token of probability zero is never sampled. Of logits
    that are not finite some token is sampled, with a log-prob that is not a number: the caller has to check for that. Tokens of `never`
    are not sampled, however likely.
    """
    scaled_BV = logits_BV.float() if sampling.temperature in (0, 1) else logits_BV.float() / sampling.temperature
    logprobs_BV = torch.log_softmax(scaled_BV, dim=-1)
    if sampling.temperature == 0:
        allowed_BV = logits_BV.clone() if never else logits_BV
        for token in never:  # one at a time: a list of them would have to be sent to the device
            allowed_BV[:, token] = -torch.inf
        ids_B = allowed_BV.argmax(dim=-1)
    else:
        probs_BV = logprobs_BV.exp()
        for token in never:
            probs_BV[:, token] = 0.0
        if sampling.truncates:
            probs_BV = torch.where(probs_BV >= least_probability(probs_BV, sampling)[:, None], probs_BV, 0.0)
        cumulative_BV = probs_BV.cumsum(dim=-1)
        total_B = cumulative_BV[:, -1]
        # Rounding must not lift the target to the total: nothing exceeds that.
        targets_B = torch.minimum(uniforms_B * total_B, torch.nextafter(total_B, torch.zeros_like(total_B)))
        ids_B = torch.searchsorted(cumulative_BV, targets_B[:, None], right=True)[:, 0].clamp(max=logits_BV.shape[-1] - 1)
    return ids_B, logprobs_BV.gather(1, ids_B[:, None])[:, 0]


def least_probability(probs_BV: Tensor, sampling: Sampling) -> Tensor:
    """[B]: the smallest probability that top-k, top-p and min-p leave."""
    least_B = probs_BV.new_zeros(len(probs_BV))
    likeliest_BC: Tensor | None = None
    if 0 < sampling.top_k < probs_BV.shape[1]:
        likeliest_BC = probs_BV.topk(sampling.top_k, dim=-1).values
        least_B = likeliest_BC[:, -1]
    if sampling.top_p < 1:
        target_B = sampling.top_p * _mass_from(probs_BV, least_B)
        if likeliest_BC is not None:
            reached_B, _ = _where_reached(likeliest_BC, target_B)
        elif probs_BV.device.type == "cuda":
            reached_B = bisected(probs_BV, target_B)
        else:
            reached_B = among_candidates(probs_BV, target_B)
        least_B = torch.maximum(least_B, reached_B)
    if sampling.min_p > 0:
        least_B = torch.maximum(least_B, sampling.min_p * probs_BV.amax(dim=-1))
    return least_B


def among_candidates(probs_BV: Tensor, target_B: Tensor) -> Tensor:
    """[B]: the probability of the last token that is needed to reach a target when the likeliest are added up, most likely first."""
    found_B = torch.zeros_like(target_B)
    open_N = torch.arange(len(probs_BV), device=probs_BV.device)
    size = probs_BV.shape[1]
    for count in (*(few for few in CANDIDATES if few < size), size):
        found_N, reached_N = _where_reached(probs_BV[open_N].topk(count, dim=-1).values, target_B[open_N])
        found_B[open_N] = found_N
        open_N = open_N[~reached_N]
        if not len(open_N):
            break
    return found_B


def bisected(probs_BV: Tensor, target_B: Tensor) -> Tensor:
    """[B]: the largest probability such that all tokens with at least that much reach the target; the same number, found bit by bit.

    Floats that are not negative are ordered as the integers that their bits spell.
    """
    bits_B = torch.zeros(len(probs_BV), dtype=torch.int32, device=probs_BV.device)
    for bit in reversed(range(FLOAT_BITS)):
        higher_B = bits_B | (1 << bit)
        reaches_B = _mass_from(probs_BV, higher_B.view(torch.float32)) >= target_B
        bits_B = torch.where(reaches_B, higher_B, bits_B)
    return bits_B.view(torch.float32)


def _where_reached(likeliest_BC: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor]:
    """The probability at which descending candidates reach a target, the last one where they do not; and whether they do."""
    cumulative_BC = likeliest_BC.cumsum(dim=-1)
    before_B1 = (cumulative_BC < target_B[:, None]).sum(dim=-1, keepdim=True)
    reached_B = before_B1[:, 0] < likeliest_BC.shape[1]
    return likeliest_BC.gather(1, before_B1.clamp(max=likeliest_BC.shape[1] - 1))[:, 0], reached_B


def _mass_from(probs_BV: Tensor, least_B: Tensor) -> Tensor:
    """[B]: the probability of all tokens that have at least so much."""
    return torch.where(probs_BV >= least_B[:, None], probs_BV, 0.0).sum(dim=-1)
