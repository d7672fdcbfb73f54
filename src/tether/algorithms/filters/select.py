"""`select_groups`: rank groups by score, keep the best, and return what was kept, what was dropped and the numbers behind it.

Strategies are small functions from scores (best first) to how many of them are kept:

- top_p: smallest prefix whose sum reaches keep * total - eps (section 3.3, nucleus-style)
- top_k: floor(keep * P)
- min_p: score >= keep * best (order smallest: score <= lowest / keep)
- band: a quantile interval of the ranking, lowest score first (the quartile ablation)
- all: everything

Where every score is zero nothing is kept (`all` aside): such a batch has no task gradient, only regularisation. Ties keep the
order in which the groups first appear, so the result is deterministic.

What stands around the selection is at the end: when to filter (`auto_strategy`), how many more prompts to sample (`groups_to_sample`), how much
a filtered batch counts (`loss_scale`), and two baselines, `variance_weights` and the paper's trajectory-level `extreme_members`.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.algorithms.filters.scores import SPREAD_SCORES, ZERO, Floats, GroupedColumns, check_score, find_score
from tether.core.errors import BadInput, UnknownName, did_you_mean

Numbers = npt.NDArray[np.intp]

ROUNDING = 1e-9
"""Slack of comparisons between sums and products that are equal on paper."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What a filter decided, and the numbers it decided on."""

    mask: npt.NDArray[np.bool_]
    """[N], True for trajectories of kept groups."""
    kept: list[Hashable]
    """Ids of the kept groups, best first."""
    dropped: list[Hashable]
    """Ids of the other groups, best first."""
    scores: dict[Hashable, float]
    """The score of every group."""
    kept_ratio: float
    """Kept groups / groups."""
    zero_variance: int
    """Groups whose rewards are all equal (or that have one member)."""
    rv_mean: float
    """Mean reward variance over groups."""
    rv_std: float
    """Standard deviation (ddof 0) of the reward variance over groups."""
    rv_ratio: float
    """rv_std / rv_mean, 0 where the mean is 0; filtering helps where this is large."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """Everything a strategy may look at."""

    keep: float
    eps: float
    smallest: bool
    num_groups: int
    band: tuple[float, float] | None


def _top_p(ranked: Floats, rule: _Rule) -> slice:
    mass = np.cumsum(np.maximum(ranked, 0.0))  # a negative score (reward_sum) carries no mass
    if mass[-1] <= ZERO:
        return slice(0, 0)
    reached = mass >= rule.keep * mass[-1] - rule.eps - ROUNDING * mass[-1]
    reached &= mass > ZERO  # at least one group with signal, however small the total against eps
    return slice(0, int(np.argmax(reached)) + 1)


def _top_k(ranked: Floats, rule: _Rule) -> slice:
    return slice(0, min(len(ranked), math.floor(rule.keep * rule.num_groups + ROUNDING)))


def _min_p(ranked: Floats, rule: _Rule) -> slice:
    bound = ranked[0] / rule.keep if rule.smallest else ranked[0] * rule.keep
    slack = ROUNDING * abs(bound)
    passes = ranked <= bound + slack if rule.smallest else ranked >= bound - slack
    return slice(0, int(passes.sum()))


def _band(ranked: Floats, rule: _Rule) -> slice:
    assert rule.band is not None  # checked before anything else
    low, high = rule.band
    num = len(ranked)
    start, end = math.floor(low * num + ROUNDING), math.floor(high * num + ROUNDING)
    # Quantiles count from the lowest score; the ranking starts at the highest, unless the order is reversed.
    return slice(num - end, num - start)


STRATEGIES: dict[str, Callable[[Floats, _Rule], slice]] = {
    "top_p": _top_p,
    "top_k": _top_k,
    "min_p": _min_p,
    "band": _band,
    "all": lambda ranked, rule: slice(0, len(ranked)),
}
ORDERS = ("largest", "smallest")


def select_groups(
    rewards: Any,
    groups: Any,
    *,
    strategy: str = "top_p",
    keep: float = 0.9,
    score: str = "reward_variance",
    order: str = "largest",
    include_zero: bool = True,
    eps: float = 0.01,
    successes: Any = None,
    entropies: Any = None,
    lengths: Any = None,
    band: tuple[float, float] | None = None,
) -> Selection:
    """Keep the groups of trajectories that carry signal (paper, section 3.3).

    Args:
        rewards: N episode returns; list, numpy array or torch tensor.
        groups: N hashable ids saying which group each trajectory belongs to, in any order; groups may be uneven.
        strategy: top_p, top_k, min_p, band or all.
        keep: the share to keep, in (0, 1]; what it is a share of depends on the strategy.
        score: reward_variance, reward_std, outcome_variance, reward_sum, entropy, entropy_variance, length, or a function of yours as
            "module:function", which gets one group (`GroupValues`) and returns a number.
        order: "largest" keeps the highest scores, "smallest" reverses the rule.
        include_zero: False drops zero-variance groups before anything else.
        eps: slack of top_p, in units of the summed score.
        successes: N values, 0 or 1, for score outcome_variance.
        entropies: N values, for the scores entropy and entropy_variance.
        lengths: N values, for score length.
        band: (low, high) quantiles for strategy "band".

    Raises:
        ValueError: non-finite values, mismatched lengths, an empty batch, an unknown name, keep outside (0, 1].
    """
    _check_names(strategy, keep, score, order, eps)
    if strategy == "band":
        check_band(band)
    columns = {"rewards": _floats("rewards", rewards)}
    for name, values in (("successes", successes), ("entropies", entropies), ("lengths", lengths)):
        if values is not None:
            columns[name] = _floats(name, values)
    ids = _ids(groups)
    _check_lengths(columns, len(ids))

    numbers: dict[Hashable, int] = {}  # of the groups, in the order in which they first appear
    index = np.array([numbers.setdefault(group, len(numbers)) for group in ids])
    names, together, sizes = list(numbers), np.argsort(index, kind="stable"), np.bincount(index)
    grouped = GroupedColumns(np.cumsum(sizes) - sizes, sizes, **{name: values[together] for name, values in columns.items()})
    scores = _with_exact_ties(find_score(score)(grouped))
    variances = grouped.variances(grouped.rewards)

    smallest = order == "smallest"
    ranking = np.argsort(scores if smallest else -scores, kind="stable")  # ties keep their order
    flat = (variances <= ZERO) | ((scores <= ZERO) if score in SPREAD_SCORES else False)
    candidates = ranking if include_zero else ranking[~flat[ranking]]
    kept = candidates[:0]
    if len(candidates) and (strategy == "all" or bool((np.abs(scores) > ZERO).any())):
        rule = _Rule(keep, eps, smallest, len(names), band)
        kept = candidates[STRATEGIES[strategy](scores[candidates], rule)]
    return _selection(names, index, ranking, kept, scores, variances)


def select_within(rewards: Sequence[float], groups: Sequence[Hashable], environments: Sequence[Hashable], **options: Any) -> Selection:
    """`select_groups` within each environment of a mixed run: every environment keeps its own share.

    Rewards of different environments have different scales, so a ranking across environments would only compare the scales. `environments`
    names the environment of each trajectory; the options are those of `select_groups`, with N values where they take N.

    Kept groups of the environments take turns, best first, so that a prefix of `kept` is a fair share. rv_mean and rv_std are over all groups;
    rv_ratio is the mean of the environments' own ratios, weighted by their groups.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, environment in enumerate(environments):
        rows.setdefault(environment, []).append(row)
    if len(rows) <= 1:
        return select_groups(rewards, groups, **options)
    parts = []
    for members in rows.values():
        own: dict[str, Any] = {
            name: [value[row] for row in members] if name in PER_TRAJECTORY and value is not None else value
            for name, value in options.items()
        }
        parts.append(select_groups([rewards[row] for row in members], [groups[row] for row in members], **own))
    scores = {group: score for part in parts for group, score in part.scores.items()}
    kept = _taking_turns([part.kept for part in parts])
    chosen = set(kept)
    variances = select_groups(rewards, groups, strategy="all").scores
    counts = [len(part.scores) for part in parts]
    return Selection(
        mask=np.array([group in chosen for group in groups]),
        kept=kept,
        dropped=_taking_turns([part.dropped for part in parts]),
        scores=scores,
        kept_ratio=len(kept) / len(scores),
        zero_variance=sum(part.zero_variance for part in parts),
        rv_mean=float(np.mean(list(variances.values()))),
        rv_std=float(np.std(list(variances.values()))),
        rv_ratio=float(np.average([part.rv_ratio for part in parts], weights=counts)),
    )


PER_TRAJECTORY = ("successes", "entropies", "lengths")
"""Options of select_groups with one value per trajectory."""


def _taking_turns(lists: Sequence[list[Hashable]]) -> list[Hashable]:
    """One list in which every input list appears evenly spread, in its own order: entry k of n stands at (k + 1/2) / n."""
    placed = [((place + 0.5) / len(names), number, name) for number, names in enumerate(lists) for place, name in enumerate(names)]
    return [name for _, _, name in sorted(placed, key=lambda entry: entry[:2])]


def _with_exact_ties(scores: Floats) -> Floats:
    """Scores that are equal on paper made equal, and those that are zero made zero.

    The same rewards in another order give another last digit, and that must not rank.
    """
    tied = np.where(np.abs(scores) <= ZERO, 0.0, scores)
    ascending = np.argsort(tied, kind="stable")
    values = tied[ascending].tolist()
    for place in range(1, len(values)):
        if values[place] - values[place - 1] <= ROUNDING * abs(values[place]):
            values[place] = values[place - 1]
    tied[ascending] = values
    return tied


def _selection(names: list[Hashable], index: Numbers, ranking: Numbers, kept: Numbers, scores: Floats, rv: Floats) -> Selection:
    chosen = np.zeros(len(names), dtype=bool)
    chosen[kept] = True
    mean, std = float(rv.mean()), float(rv.std())
    return Selection(
        mask=chosen[index],
        kept=[names[group] for group in kept],
        dropped=[names[group] for group in ranking if not chosen[group]],
        scores=dict(zip(names, scores.tolist(), strict=True)),
        kept_ratio=len(kept) / len(names),
        zero_variance=int((rv <= ZERO).sum()),
        rv_mean=mean,
        rv_std=std,
        rv_ratio=std / mean if mean > ZERO else 0.0,
    )


def _check_names(strategy: str, keep: float, score: str, order: str, eps: float) -> None:
    for what, name, known in (("strategy", strategy, STRATEGIES), ("order", order, ORDERS)):
        if name not in known:
            raise BadInput(f"unknown {what} {name!r}: {did_you_mean(str(name), known)}")
    check_score(str(score))
    if not 0 < keep <= 1:
        raise BadInput(f"keep is {keep}; it must be in (0, 1]")
    if not (math.isfinite(eps) and eps >= 0):
        raise BadInput(f"eps is {eps}; it must be zero or a positive number")


def check_band(band: tuple[float, float] | None) -> None:
    """Refuse what is not an interval of quantiles."""
    if band is None or len(band) != 2:
        raise BadInput("strategy 'band' needs band=(low, high), quantiles such as (0.25, 0.75)")
    if not 0 <= band[0] < band[1] <= 1:
        raise BadInput(f"band is ({band[0]}, {band[1]}); quantiles must satisfy 0 <= low < high <= 1")


def _check_lengths(columns: dict[str, Floats], num_ids: int) -> None:
    if num_ids == 0:
        raise BadInput("the batch is empty; give at least one trajectory")
    for name, values in columns.items():
        if len(values) != num_ids:
            raise BadInput(f"{name} has {len(values)} values but groups has {num_ids}; give one of each per trajectory")
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise BadInput(f"{name}[{bad[0]}] is {values[bad[0]]} ({bad.size} non-finite in all); drop or fix those trajectories first")


def _floats(name: str, values: Any) -> Floats:
    """One-dimensional float64 from a list, a numpy array or a torch tensor (on any device, with or without gradient)."""
    if hasattr(values, "detach"):
        # bfloat16 has no numpy counterpart: go through double on torch's side.
        values = values.detach().double().cpu().numpy()
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch refuses to convert numbers that need a gradient with a RuntimeError
        raise BadInput(f"{name} must be numbers, one per trajectory; got {type(values).__name__} that does not convert") from error
    if array.ndim != 1:
        raise BadInput(f"{name} has shape {array.shape}; it must be one-dimensional, one value per trajectory")
    return array


def _ids(groups: Any) -> list[Hashable]:
    ids = groups.tolist() if hasattr(groups, "tolist") else groups
    if not isinstance(ids, Iterable):
        raise BadInput(f"groups is {type(groups).__name__}; give a sequence with one id per trajectory")
    ids = [group.tolist() if hasattr(group, "tolist") else group for group in ids]  # torch's numbers hash by identity
    for row, group in enumerate(ids):
        if isinstance(group, list):
            raise BadInput("groups has more than one dimension; give one id per trajectory")
        if not isinstance(group, Hashable):
            raise BadInput(f"groups[{row}] is of type {type(group).__name__}, which cannot name a group; use numbers, text or tuples")
    return ids


# ------------------------------------------------------------------------------------------------- around the selection

AUTO = "auto"
FILTERED = "top_p"
"""The strategy of `auto` where filtering helps; elsewhere `auto` keeps all groups."""

LOSS_SCALES: dict[str, Callable[[float], float]] = {"kept_ratio": lambda ratio: ratio, "sqrt": math.sqrt, "none": lambda ratio: 1.0}
"""`kept_ratio` makes the update the filtered objective over all groups (paper, definition G.1), `none` is section 3.3's mean over the kept
groups, `sqrt` lies between."""


def auto_strategy(unfiltered: Selection, earlier_ratios: Sequence[float], threshold: float) -> str:
    """The strategy for a batch: `unfiltered` is its selection by `all`, `earlier_ratios` are the rv_ratio of the batches before it.

    Where a few prompts hold the signal (Std(RV) / Mean(RV) about 1.2 in the paper) filtering gained 4 points; where all prompts vary alike
    (0.33) it lost 5, because it mostly discards data. The decision takes the mean ratio of the recent batches, the present one included.
    """
    if unfiltered.rv_mean <= ZERO:
        return FILTERED  # no prompt varies: the filter keeps nothing, where `all` would train on regularisation alone
    ratios = [*earlier_ratios, unfiltered.rv_ratio]
    return FILTERED if sum(ratios) / len(ratios) >= threshold else "all"


def groups_to_sample(kept: int, sampled: int, wanted: int) -> int:
    """How many more prompts to sample (arXiv 2503.14476, equation 11): the missing groups over the share kept so far, rounded up.

    That is at least as many as are missing. At most a whole batch (`wanted`), which is also the answer where nothing was kept; 0 when full.
    """
    missing = wanted - kept
    if missing <= 0:
        return 0
    if kept == 0:
        return wanted
    return min(-(-missing * sampled // kept), wanted)  # the quotient rounded up, in integers


def loss_scale(name: str, ratio: float) -> float:
    """The factor on the whole loss where `ratio` of the groups were kept; it means the same for every aggregation."""
    if name not in LOSS_SCALES:
        raise UnknownName(f"unknown loss scale '{name}': {did_you_mean(name, LOSS_SCALES)}")
    return LOSS_SCALES[name](ratio)


def variance_weights(variances: Mapping[Hashable, float]) -> dict[Hashable, float]:
    """RV / max RV for each group: the factor on its advantages.

    Where no group varies every weight is zero, as a filter keeps nothing there; zero means at most 1e-12.
    """
    largest = max(variances.values(), default=0.0)
    return {group: variance / largest if variance > ZERO else 0.0 for group, variance in variances.items()}


def extreme_members(rewards: Sequence[float], count: int) -> list[int]:
    """Indices, ascending, of the `count` best and the `count` worst members of one group; at most 2 * count members are all kept.

    Table 7 of the paper keeps the top 8 and bottom 8 of each prompt by reward: as many trajectories as a group filter cuts, but every prompt
    stays in the batch, also those whose members all did the same. Of equal rewards the earlier ones are kept on either side.
    """
    best = sorted(range(len(rewards)), key=lambda member: -rewards[member])[:count]  # sorted() is stable
    rest = sorted(set(range(len(rewards))) - set(best))
    return sorted([*best, *sorted(rest, key=lambda member: rewards[member])[:count]])
