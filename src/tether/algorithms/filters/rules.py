"""What stands around the selection of groups: when to filter, how many more prompts to sample, and how much a filtered batch counts.

- `auto_strategy`: filter only where the spread of reward variance over prompts says that filtering helps
- `groups_to_sample`: refill a filtered batch in few rounds (DAPO's dynamic sampling)
- `loss_scale`: one factor on the loss of a filtered batch
- `variance_weights`: reduce the weight of a group with little reward variance instead of dropping the group
- `extreme_members`: the paper's trajectory-level baseline
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from tether.algorithms.filters.scores import ZERO
from tether.algorithms.filters.select import Selection
from tether.core.errors import UnknownName, did_you_mean

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
