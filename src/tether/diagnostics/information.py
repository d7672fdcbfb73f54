"""How much the reasoning tells about its prompt: the mutual-information proxies of the paper (section 2.3, table 1).

From cross-scores L[n, j] = log p(z_n | x_j), with s(n) the column of n's own prompt:

    matched_n  = L[n, s(n)] / |z_n|
    marginal_n = (logsumexp_j L[n, j] - log P) / |z_n|        the mixture is over sequences, then divided (equation 1)
    MI-Est     = mean(matched - marginal)                      H(Z|X) = -mean matched, H(Z) = -mean marginal

so H(Z) = H(Z|X) + MI-Est exactly. Retrieval accuracy shares ties evenly: if every column is equal it is exactly 1/P.
Everything is computed in float64. The z-score's sigma is a population standard deviation, its EMA is carried by the caller.
The paper's own code logs a variant whose mixture is over the per-token means L[n, j] / |z_n|; it is `mi_token_mean` here.

How sure a number is: a 95% interval that resamples whole prompts (tether.diagnostics.intervals), and two permutation tests of the
hypothesis that reasoning and prompt are independent, in which the sources are shuffled among the reasonings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput
from tether.core.seeding import generator
from tether.diagnostics.intervals import prompt_effects, studentised_intervals

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SIGMA_FLOOR = 1e-3
SIGMA_DECAY = 0.9
SHUFFLED_AT_ONCE = 1 << 20
"""Labels held in memory by the permutation tests."""


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
    """95% interval of `mi`; the same as intervals["mi"]."""
    retrieval_p_value: float | None = None
    """Permutation p-value of the retrieval accuracy against chance."""
    mi_token_mean: float = 0.0
    """MI with the mixture over per-token means, as upstream logs it: for comparison only, it is not an information."""
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    """95% intervals, by studentised bootstrap over prompts, of what other prompts of the same kind would give: of retrieval_acc,
    recall_{k}, mi, mi_seq, mi_token_mean, mi_zscore, mi_zscore_ema, h_conditional, h_marginal, h_conditional_seq and h_marginal_seq.
    Shares end at 0 and 1, information at log P, entropies at 0. Where all reasonings are of one prompt they are resampled themselves, and the interval
    speaks of that prompt only. Equal values give a point. Empty without bootstrap."""
    mi_p_value: float | None = None
    """Permutation p-value of dependence, from the mean own score per token instead of ranks: detects dependence that a weak scorer cannot retrieve."""
    effects: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """For each name of `intervals`, the effect of every prompt (tether.diagnostics.intervals): two measurements on the same prompts give the
    interval of their difference (tether.diagnostics.probe). Empty without bootstrap, and where fewer than two prompts have reasonings."""


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
        bootstrap: resamples for `intervals` (0: none; a thousand or so for steady ends).
        permutations: shuffles for the p-values (0: none).
        seed: of the resampling.

    Raises:
        ValueError: bad shapes, non-finite values, lengths below 1, source outside the columns.
    """
    scores, tokens, own = _checked(logprobs, lengths, source)
    _check_options(recall_at, sigma_ema, bootstrap, permutations)
    batch = _Batch(scores, tokens, own)
    spread = _Spread.of(batch, sigma_ema)
    estimates = _estimates(batch, recall_at, spread)
    intervals, effects = _intervals(batch, estimates, recall_at, spread, bootstrap, seed) if bootstrap else ({}, {})
    retrieval_p_value, mi_p_value = _permutation_p_values(batch, permutations, seed) if permutations else (None, None)
    return Information(
        chance=1 / batch.num_prompts,
        recall={k: estimates.pop(f"recall_{k}") for k in dict.fromkeys(recall_at)},
        sigma=spread.sigma,
        sigma_ema=spread.running,
        mi_interval=intervals.get("mi"),
        retrieval_p_value=retrieval_p_value,
        intervals=intervals,
        mi_p_value=mi_p_value,
        effects=effects,
        **estimates,
    )


class _Batch:
    """The cross-scores with what is read off them more than once. Names without `seq` are per token."""

    def __init__(self, scores: Floats, tokens: Floats, own: Ints) -> None:
        self.scores, self.tokens, self.own = scores, tokens, own
        self.num_prompts = scores.shape[1]
        self.per_token = scores / tokens[:, None]
        self.matched_seq = scores[np.arange(len(own)), own]
        self.marginal_seq = _log_mean_exp(scores)
        self.matched = self.matched_seq / tokens
        self.marginal = self.marginal_seq / tokens
        self.marginal_token_mean = _log_mean_exp(self.per_token)


@dataclass(frozen=True, slots=True)
class _Spread:
    """The spread of the marginal: of this batch, running, and how much of a change of the first reaches the second."""

    sigma: float
    running: float
    weight: float

    @classmethod
    def of(cls, batch: _Batch, sigma_ema: float | None) -> "_Spread":
        sigma = float(batch.marginal.std())
        if sigma_ema is None:
            return cls(sigma, sigma, 1.0)
        return cls(sigma, SIGMA_DECAY * float(sigma_ema) + (1 - SIGMA_DECAY) * sigma, 1 - SIGMA_DECAY)


def _estimates(batch: _Batch, recall_at: Sequence[int], spread: _Spread) -> dict[str, float]:
    mi = float((batch.matched - batch.marginal).mean())
    return {
        "retrieval_acc": float(own_in_top(batch.scores, batch.own, 1).mean()),
        **{f"recall_{k}": float(own_in_top(batch.scores, batch.own, k).mean()) for k in recall_at},
        "mi": mi,
        "mi_seq": float((batch.matched_seq - batch.marginal_seq).mean()),
        "mi_token_mean": float((batch.matched - batch.marginal_token_mean).mean()),
        "mi_zscore": mi / (spread.sigma + SIGMA_FLOOR),
        "mi_zscore_ema": mi / (spread.running + SIGMA_FLOOR),
        "h_conditional": float(-batch.matched.mean()),
        "h_marginal": float(-batch.marginal.mean()),
        "h_conditional_seq": float(-batch.matched_seq.mean()),
        "h_marginal_seq": float(-batch.marginal_seq.mean()),
    }


def _intervals(
    batch: _Batch, estimates: dict[str, float], recall_at: Sequence[int], spread: _Spread, resamples: int, seed: int
) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[float, ...]]]:
    """Intervals of all estimates, and the effects of the prompts. Those on the z-scores follow from mi and sigma, by the chain rule."""
    if len(batch.own) == 1:
        return {name: (value, value) for name, value in estimates.items()}, {}
    measured = len(np.unique(batch.own))
    effects = _effects(batch, recall_at, by_prompt=measured > 1)
    on_sigma = effects.pop("variance") / (2 * spread.sigma) if spread.sigma > 0 else np.zeros_like(effects["mi"])
    for name, divisor, weight in (("mi_zscore", spread.sigma, 1.0), ("mi_zscore_ema", spread.running, spread.weight)):
        effects[name] = (effects["mi"] - estimates[name] * weight * on_sigma) / (divisor + SIGMA_FLOOR)
    shares = {name: (0.0, 1.0) for name in estimates if name.startswith(("retrieval", "recall"))}
    ceilings = {name: (-math.inf, math.log(batch.num_prompts)) for name in ("mi", "mi_seq", "mi_token_mean")}
    floors = {name: (0.0, math.inf) for name in estimates if name.startswith("h_")}  # no text is likelier than certain
    intervals = studentised_intervals(
        estimates,
        effects,
        {**shares, **ceilings, **floors},
        degrees=(measured if measured > 1 else len(batch.own)) - 1,
        resamples=resamples,
        rng=generator("information", "bootstrap", seed),
    )
    return intervals, {name: tuple(values.tolist()) for name, values in effects.items()} if measured > 1 else {}


def _effects(batch: _Batch, recall_at: Sequence[int], by_prompt: bool) -> dict[str, Floats]:
    """Effect of every prompt on every mean, and on the variance of the marginal; of every reasoning where one prompt wrote them all."""
    units, num_units = (batch.own, batch.num_prompts) if by_prompt else (np.arange(len(batch.own)), len(batch.own))
    with_columns = by_prompt and batch.num_prompts > 2
    tokens = batch.tokens[:, None]

    def of(values: Floats, without: Floats | None = None) -> Floats:
        return prompt_effects(values, without, units, num_units)

    def in_top(k: int) -> Floats:
        share = own_in_top(batch.scores, batch.own, k)
        return of(share, _own_in_top_without_each(batch.scores, batch.own, k) - share[:, None] if with_columns else None)

    seq = _log_mean_exp_without_each(batch.scores) - batch.marginal_seq[:, None] if with_columns else None
    token = seq / tokens if seq is not None else None
    mean = _log_mean_exp_without_each(batch.per_token) - batch.marginal_token_mean[:, None] if with_columns else None
    deviation = batch.marginal - batch.marginal.mean()
    return {
        "retrieval_acc": in_top(1),
        **{f"recall_{k}": in_top(k) for k in recall_at},
        "mi": of(batch.matched - batch.marginal, -token if token is not None else None),
        "mi_seq": of(batch.matched_seq - batch.marginal_seq, -seq if seq is not None else None),
        "mi_token_mean": of(batch.matched - batch.marginal_token_mean, -mean if mean is not None else None),
        "h_conditional": of(-batch.matched),
        "h_marginal": of(-batch.marginal, -token if token is not None else None),
        "h_conditional_seq": of(-batch.matched_seq),
        "h_marginal_seq": of(-batch.marginal_seq, -seq if seq is not None else None),
        "variance": of(deviation**2, 2 * deviation[:, None] * token if token is not None else None),
    }


def own_in_top(scores: Floats, own: Ints, k: int) -> Floats:
    """Probability, per row, that the own column is among the k best when ties are broken at random.

    With a columns strictly better and t columns equal (the own one included) it is (k - a) / t, clipped to [0, 1].
    """
    mine = scores[np.arange(len(own)), own][:, None]
    better = (scores > mine).sum(axis=1)
    equal = (scores == mine).sum(axis=1)
    share: Floats = np.clip((k - better) / equal, 0.0, 1.0)
    return share


def _own_in_top_without_each(scores: Floats, own: Ints, k: int) -> Floats:
    """[N, P] own_in_top of row n when column j is left out (the own column, which cannot be, holds a value of no meaning)."""
    mine = scores[np.arange(len(own)), own][:, None]
    above, same = scores > mine, scores == mine
    better = above.sum(axis=1, keepdims=True) - above
    equal = np.maximum(same.sum(axis=1, keepdims=True) - same, 1)
    share: Floats = np.clip((k - better) / equal, 0.0, 1.0)
    return share


def _permutation_p_values(batch: _Batch, permutations: int, seed: int) -> tuple[float, float]:
    """Share of shuffles of the sources that retrieve at least as well, and whose own scores are at least as high; at least 1 / (permutations + 1).

    Dealing keeps each text and the number of each source, so neither a likely text nor a prompt that likes every text counts as dependence:
    the test is the same as for scores centred by row and column.
    """
    scores, own, rows = batch.scores, batch.own, np.arange(len(batch.own))
    top = scores == scores.max(axis=1, keepdims=True)
    credits = (top / top.sum(axis=1, keepdims=True), batch.per_token)
    slack = (1e-12, 1e-12 * max(1.0, float(np.abs(batch.per_token).max())))
    least = [float(credit[rows, own].mean()) - allowed for credit, allowed in zip(credits, slack, strict=True)]
    rng, hits = generator("information", "permutation", seed), [0, 0]
    block = max(1, SHUFFLED_AT_ONCE // len(own))
    for start in range(0, permutations, block):
        dealt = rng.permuted(np.tile(own, (min(block, permutations - start), 1)), axis=1)
        for which, credit in enumerate(credits):
            hits[which] += int((credit[rows, dealt].mean(axis=1) >= least[which]).sum())
    return (1 + hits[0]) / (1 + permutations), (1 + hits[1]) / (1 + permutations)


def _log_mean_exp(scores: Floats) -> Floats:
    """logsumexp - log P; exactly the row's value where all its columns are equal."""
    peak = scores.max(axis=1, keepdims=True)
    total: Floats = (peak + np.log(np.exp(scores - peak).mean(axis=1, keepdims=True)))[:, 0]
    return total


def _log_mean_exp_without_each(scores: Floats) -> Floats:
    """[N, P] log mean exp of a row without column j, from sums of the columns before and after it: no difference, nothing cancels."""
    before, after = np.full_like(scores, -np.inf), np.full_like(scores, -np.inf)
    before[:, 1:] = np.logaddexp.accumulate(scores[:, :-1], axis=1)
    after[:, :-1] = np.logaddexp.accumulate(scores[:, :0:-1], axis=1)[:, ::-1]
    total: Floats = np.logaddexp(before, after) - math.log(scores.shape[1] - 1)
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
        if count < 0 or count != int(count):
            raise BadInput(f"{name} is {count}; give a whole number of resamples, 0 for none")
