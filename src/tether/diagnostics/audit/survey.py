"""The first reading: what the files hold, step by step, in bounded memory.

Everything that can be counted without keeping text is counted here, over all rollouts: episodes, rewards, success, empty reasoning. Of the
groups of a step only those with the smallest seeded hashes are remembered, for the reward variance within a prompt: a uniform sample that
does not depend on the order of the file and never outgrows its size, however many groups there are.
"""

import heapq
import math
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from tether.algorithms.filters.scores import ZERO
from tether.core.errors import BadInput
from tether.core.seeding import derive_seed
from tether.diagnostics.rollouts import Rollout

MAX_GROUPS = 1000
"""Groups of a step whose reward variance is followed; with more, theirs is a sample."""
MAX_STEPS = 20_000
"""A file with more is read by a field that is no training step."""

Step = int | None
"""None where the file does not say."""


@dataclass(slots=True)
class Running:
    """Count, mean and variance of a stream (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    @property
    def variance(self) -> float:
        """With ddof 1; zero of a single value."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Reward variance within prompts, over the prompts that have two rewards or more."""

    num_groups: int
    rv_mean: float
    rv_std: float
    rv_ratio: float | None
    """Std / Mean over prompts; None where no prompt varies."""
    zero_share: float
    """Share of the prompts whose rewards are all equal."""


@dataclass(slots=True)
class StepCounts:
    """What one step holds. `scope_rollouts` are those the audit may draw from: first turns, or all turns."""

    step: Step
    num_rollouts: int = 0
    num_episodes: int = 0
    num_scope: int = 0
    num_empty: int = 0
    """Rollouts in scope without reasoning."""
    reasoning_chars: Running = field(default_factory=Running)
    reward: Running = field(default_factory=Running)
    num_judged: int = 0
    """Episodes that say whether they succeeded."""
    num_success: int = 0
    rewards_of: dict[int, Running] = field(default_factory=dict)
    """By the hash of the group; Running.count is 0 for a group without rewards."""
    _order: list[int] = field(default_factory=list)
    is_sample: bool = False
    """More groups were met than are followed."""

    @property
    def num_groups(self) -> int:
        """Groups that were followed: all of them, unless `is_sample`."""
        return len(self.rewards_of)

    @property
    def success(self) -> float | None:
        return self.num_success / self.num_judged if self.num_judged else None

    def add(self, rollout: Rollout, group: int, in_scope: bool) -> None:
        self.num_rollouts += 1
        if in_scope:
            self.num_scope += 1
            self.num_empty += not rollout.has_reasoning
            if rollout.has_reasoning and rollout.reasoning is not None:
                self.reasoning_chars.add(len(rollout.reasoning))
        if rollout.turn == 0:  # the reward is that of the episode: counted once
            self._add_episode(rollout, group)

    def _add_episode(self, rollout: Rollout, group: int) -> None:
        self.num_episodes += 1
        if rollout.success is not None:
            self.num_judged += 1
            self.num_success += rollout.success
        followed = self._followed(group)
        if rollout.reward is not None:
            self.reward.add(rollout.reward)
            if followed is not None:
                followed.add(rollout.reward)

    def _followed(self, group: int) -> Running | None:
        """The rewards of a group, or None for one that the bounded sample leaves out."""
        found = self.rewards_of.get(group)
        if found is not None:
            return found
        if len(self._order) >= MAX_GROUPS:
            self.is_sample = True
            if group > -self._order[0]:
                return None
            del self.rewards_of[-heapq.heapreplace(self._order, -group)]
        else:
            heapq.heappush(self._order, -group)
        self.rewards_of[group] = Running()
        return self.rewards_of[group]


def survey(rollouts: Iterable[Rollout], *, all_turns: bool, seed: int) -> dict[Step, StepCounts]:
    """Counts by step, in the order of the steps.

    Args:
        all_turns: the audit's scope: every turn, or first turns only.
    """
    found: dict[Step, StepCounts] = {}
    for rollout in rollouts:
        counts = found.get(rollout.step)
        if counts is None:
            if len(found) >= MAX_STEPS:
                raise BadInput(
                    f"the rollouts have more than {MAX_STEPS} different steps (the last: {rollout.step}); a step holds many rollouts: "
                    "map another field, or none"
                )
            counts = found[rollout.step] = StepCounts(rollout.step)
        counts.add(rollout, group_hash(seed, rollout.step, rollout.group), all_turns or rollout.turn == 0)
    if not all_turns and not any(counts.num_scope for counts in found.values()):
        raise BadInput("no rollout is a first turn: turns count from 0 and none has that number; take all turns with --scope trajectory")
    return dict(sorted(found.items(), key=lambda item: (item[0] is not None, item[0] or 0)))


def group_hash(seed: int, step: Step, group: Hashable) -> int:
    """The place of a group in the seeded order that decides what is sampled."""
    return derive_seed("audit group", seed, str(step), repr(group))


def reward_statistics(counts: Iterable[StepCounts]) -> RewardStatistics | None:
    """Over the groups of one step or several; None where no group has two rewards."""
    variances = [rewards.variance for step in counts for rewards in step.rewards_of.values() if rewards.count > 1]
    if not variances:
        return None
    spread = Running()
    for variance in variances:
        spread.add(variance)
    deviation = math.sqrt(spread.squares / spread.count)
    ratio = deviation / spread.mean if spread.mean > ZERO else None
    return RewardStatistics(len(variances), spread.mean, deviation, ratio, sum(v <= ZERO for v in variances) / len(variances))
