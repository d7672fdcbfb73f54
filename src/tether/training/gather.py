"""Gathering: sample prompts, filter them, and sample more until the batch is full, within bounds.

Every round of a step plays new prompts. The filter ranks all groups of the step together after each round; where it keeps more than a
batch, the best of them are the batch. Without refill there is one round, and the batch is whatever the filter keeps of it.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

from tether.algorithms.filters.auto import AUTO, auto_strategy
from tether.algorithms.filters.refill import groups_to_sample
from tether.algorithms.filters.select import Selection, select_groups
from tether.core.types import Group
from tether.rollout.summary import group_summary
from tether.training.settings import FilterSettings

SELECTING = {"keep", "score", "order", "include_zero", "eps", "band"}
"""The settings that select_groups takes as they are."""


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Everything a step sampled, and what of it is to be learned from."""

    groups: list[Group]
    """Of all rounds."""
    first_round: list[Group]
    selection: Selection
    chosen: list[Group]
    """The batch, in the order of sampling."""
    num_rounds: int
    num_wanted: int

    @property
    def chosen_ids(self) -> set[Hashable]:
        return {group.index for group in self.chosen}

    @property
    def fill_ratio(self) -> float:
        """How full the batch is: kept groups / groups wanted. Without refill this is the kept ratio."""
        return len(self.chosen) / self.num_wanted

    def metrics(self, tokens_batched: int) -> dict[str, float]:
        """The "groups/" metrics of the step, of whose sampled tokens so many made it into the batch."""
        return {
            **group_summary(self.groups, self.selection),
            "sampled": len(self.groups),
            "kept": len(self.chosen),
            "kept_ratio": len(self.chosen) / len(self.groups),
            "rounds": self.num_rounds,
            "tokens_discarded": sum(t.num_sampled for group in self.groups for t in group.trajectories) - tokens_batched,
        }


def gather(
    sample: Callable[[int, int], list[Group]], num_groups: int, rules: FilterSettings, earlier_ratios: Sequence[float] = ()
) -> SampledBatch:
    """Gather the batch of a step.

    Args:
        sample: plays new prompts: how many, and the index of the first.
        num_groups: how many the batch should hold.
        rules: the filter, and how many rounds of refill it may take.
        earlier_ratios: `groups/rv_ratio` of the recent steps, for strategy `auto`.
    """
    groups = first = sample(num_groups, 0)
    selection = select(groups, rules, earlier_ratios)
    num_rounds = 1
    while num_rounds <= rules.refill and (more := groups_to_sample(len(selection.kept), len(groups), num_groups)):
        groups = [*groups, *sample(more, len(groups))]
        selection = select(groups, rules, earlier_ratios)
        num_rounds += 1
    batch = set(selection.kept[:num_groups])
    return SampledBatch(groups, first, selection, [group for group in groups if group.index in batch], num_rounds, num_groups)


def select(groups: Sequence[Group], rules: FilterSettings, earlier_ratios: Sequence[float] = ()) -> Selection:
    """What the filter keeps of these groups."""
    trajectories = [t for group in groups for t in group.trajectories]
    by = partial(
        select_groups,
        [t.reward for t in trajectories],
        [t.group for t in trajectories],
        successes=[float(t.success) for t in trajectories],
        entropies=[t.mean_nll for t in trajectories],
        lengths=[t.num_sampled for t in trajectories],
        **rules.model_dump(include=SELECTING),
    )
    if rules.strategy != AUTO:
        return by(strategy=rules.strategy)
    return by(strategy=auto_strategy(by(strategy="all"), earlier_ratios, rules.auto_ratio))
