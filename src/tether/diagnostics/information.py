"""How much the reasoning tells about its prompt: the mutual-information proxies of the paper (section 2.3, table 1).

From cross-scores L[n, j] = log p(z_n | x_j), with s(n) the column of n's own prompt:

    matched_n  = L[n, s(n)] / |z_n|
    marginal_n = (logsumexp_j L[n, j] - log P) / |z_n|        the mixture is over sequences, then divided (equation 1)
    MI-Est     = mean(matched - marginal)                      H(Z|X) = -mean matched, H(Z) = -mean marginal

so H(Z) = H(Z|X) + MI-Est exactly. Retrieval accuracy shares ties evenly: if every column is equal it is exactly 1/P.
Everything is computed in float64. The z-score's sigma is a population standard deviation, its EMA is carried by the caller.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIGMA_FLOOR = 1e-3
SIGMA_DECAY = 0.9
INTERVAL = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Information:
    """The proxies of one batch. `mi` is MI-Est in nats per token; `mi_seq` is in nats per reasoning, at most log P."""

    retrieval_acc: float
    chance: float
    """1 / P: the accuracy of reasoning that ignores its input."""
    recall: dict[int, float]
    """Share of reasonings whose own prompt is among the best k."""
    mi: float
    mi_seq: float
    mi_zscore: float
    mi_zscore_ema: float
    sigma: float
    """Spread of the marginal in this batch."""
    sigma_ema: float
    """Running spread; hand it to the next call."""
    h_conditional: float
    h_marginal: float
    h_conditional_seq: float
    h_marginal_seq: float
    mi_interval: tuple[float, float] | None = None
    """95% bootstrap interval of `mi`, resampling whole prompts."""
    retrieval_p_value: float | None = None
    """Permutation p-value of the retrieval accuracy against chance."""


def measure_information(
    logprobs: Any,
    lengths: Any,
    source: Any,
    *,
    recall_at: Sequence[int] = (2, 4, 8),
    sigma_ema: float | None = None,
    bootstrap: int = 0,
    permutations: int = 0,
    seed: int = 0,
) -> Information:
    """The information proxies of a matrix of cross-scores.

    Args:
        logprobs: [N, P] sequence log-probs of every reasoning under every prompt.
        lengths: [N] tokens of each reasoning, at least 1.
        source: [N] column of each reasoning's own prompt.
        recall_at: the k of Recall@k; k above P gives 1.
        sigma_ema: running spread from the previous batch; None starts it here.
        bootstrap: resamples for `mi_interval` (0: none).
        permutations: shuffles for `retrieval_p_value` (0: none).
        seed: of the resampling.

    Raises:
        ValueError: bad shapes, non-finite values, lengths below 1, source outside the columns.
    """
    scores, tokens, own = _checked(logprobs, lengths, source)
    _check_options(recall_at, sigma_ema, bootstrap, permutations)
    num_prompts = scores.shape[1]
    matched_seq = scores[np.arange(len(own)), own]
    marginal_seq = _log_mean_exp(scores)
    matched, marginal = matched_seq / tokens, marginal_seq / tokens

    gain = matched - marginal
    mi, sigma = float(gain.mean()), float(marginal.std())
    running = sigma if sigma_ema is None else SIGMA_DECAY * float(sigma_ema) + (1 - SIGMA_DECAY) * sigma
    return Information(
        retrieval_acc=float(own_in_top(scores, own, 1).mean()),
        chance=1 / num_prompts,
        recall={k: float(own_in_top(scores, own, k).mean()) for k in recall_at},
        mi=mi,
        mi_seq=float((matched_seq - marginal_seq).mean()),
        mi_zscore=mi / (sigma + SIGMA_FLOOR),
        mi_zscore_ema=mi / (running + SIGMA_FLOOR),
        sigma=sigma,
        sigma_ema=running,
        h_conditional=float(-matched.mean()),
        h_marginal=float(-marginal.mean()),
        h_conditional_seq=float(-matched_seq.mean()),
        h_marginal_seq=float(-marginal_seq.mean()),
        mi_interval=_clustered_interval(gain, own, bootstrap, np.random.default_rng([seed, 0])) if bootstrap else None,
        retrieval_p_value=_permutation_p_value(scores, own, permutations, np.random.default_rng([seed, 1])) if permutations else None,
    )


def own_in_top(scores: Floats, own: Ints, k: int) -> Floats:
    """Probability, per row, that the own column is among the k best when ties are broken at random.

    With a columns strictly better and t columns equal (the own one included) it is (k - a) / t, clipped to [0, 1].
    """
    mine = scores[np.arange(len(own)), own][:, None]
    better = (scores > mine).sum(axis=1)
    equal = (scores == mine).sum(axis=1)
    share: Floats = np.clip((k - better) / equal, 0.0, 1.0)
    return share


def _clustered_interval(gain: Floats, own: Ints, resamples: int, rng: np.random.Generator) -> tuple[float, float]:
    """Percentile interval of the mean gain, resampling prompts (reasonings of one prompt are not independent)."""
    _, cluster = np.unique(own, return_inverse=True)
    totals, counts = np.bincount(cluster, weights=gain), np.bincount(cluster)
    draws = rng.integers(len(totals), size=(resamples, len(totals)))
    means = totals[draws].sum(axis=1) / counts[draws].sum(axis=1)
    low, high = np.percentile(means, INTERVAL)
    return float(low), float(high)


def _permutation_p_value(scores: Floats, own: Ints, permutations: int, rng: np.random.Generator) -> float:
    """How often shuffled labels retrieve at least as well; never below 1 / (permutations + 1)."""
    observed = own_in_top(scores, own, 1).mean()
    hits = sum(bool(own_in_top(scores, rng.permutation(own), 1).mean() >= observed - 1e-12) for _ in range(permutations))
    return (1 + hits) / (1 + permutations)


def _log_mean_exp(scores: Floats) -> Floats:
    """logsumexp - log P; exactly the row's value where all its columns are equal."""
    peak = scores.max(axis=1, keepdims=True)
    total: Floats = (peak + np.log(np.exp(scores - peak).mean(axis=1, keepdims=True)))[:, 0]
    return total


def _checked(logprobs: Any, lengths: Any, source: Any) -> tuple[Floats, Floats, Ints]:
    scores, tokens, own = _array("logprobs", logprobs), _array("lengths", lengths), _array("source", source)
    if scores.ndim != 2 or 0 in scores.shape:
        raise BadInput(f"logprobs has shape {scores.shape}; it must be [N, P] with at least one reasoning and one prompt")
    for name, values in (("lengths", tokens), ("source", own)):
        if values.shape != (len(scores),):
            raise BadInput(f"{name} has shape {values.shape}; it must be [{len(scores)}], one per row of logprobs")
    for name, values in (("logprobs", scores), ("lengths", tokens), ("source", own)):
        if not np.isfinite(values).all():
            raise BadInput(f"{name} holds {int((~np.isfinite(values)).sum())} non-finite values; score or drop those reasonings first")
    if (tokens < 1).any():
        raise BadInput(f"lengths holds {tokens.min():g}; every reasoning needs at least 1 token, drop empty ones first")
    if (own != np.floor(own)).any() or own.min() < 0 or own.max() >= scores.shape[1]:
        raise BadInput(f"source must be column indices in 0..{scores.shape[1] - 1}; got values from {own.min():g} to {own.max():g}")
    return scores, tokens, own.astype(np.int64)


def _array(name: str, values: Any) -> Floats:
    if hasattr(values, "detach"):
        values = values.detach().double().cpu().numpy()
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"{name} must be an array of numbers; got {type(values).__name__} that does not convert") from error


def _check_options(recall_at: Sequence[int], sigma_ema: float | None, bootstrap: int, permutations: int) -> None:
    for k in recall_at:
        if k < 1 or k != int(k):
            raise BadInput(f"recall_at holds {k}; every k must be a whole number of at least 1")
    if sigma_ema is not None and not (math.isfinite(sigma_ema) and sigma_ema >= 0):
        raise BadInput(f"sigma_ema is {sigma_ema}; hand over the sigma_ema of the previous call, or None to start")
    for name, count in (("bootstrap", bootstrap), ("permutations", permutations)):
        if count < 0:
            raise BadInput(f"{name} is {count}; give the number of resamples, 0 for none")
