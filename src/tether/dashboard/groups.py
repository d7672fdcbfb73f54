"""The groups of a step: what the members of each earned, how far they differ, and whether the filter kept the group.

Reward variance is that of the filter: over the members that are evidence (an errored episode is none), with ddof 1, zero for a group of one. Whether
a group was kept is on record; why it was dropped follows from its rewards and the run's filter, and is said only as far as it follows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tether.core.enums import ERRORED, Split
from tether.dashboard.catalogue import LiveRun
from tether.dashboard.episodes import EpisodeRow, Filter, find

ZERO_VARIANCE = 1e-12
"""At most this counts as zero, as in the filter."""
_EVERY = 1_000_000


@dataclass(frozen=True, slots=True)
class GroupRow:
    """One group of a step."""

    number: int
    members: list[EpisodeRow]
    num_errored: int
    rewards: list[float]
    """Of the members that are evidence."""
    reward_mean: float | None
    reward_variance: float | None
    """None where every member errored."""
    num_successes: int
    kept: bool
    why: str


def step_groups(run: LiveRun, step: int) -> list[GroupRow]:
    """The groups of a training step, most reward variance first."""
    members: dict[int, list[EpisodeRow]] = {}
    for row in find(run, Filter(step=step, split=Split.TRAIN.value, order="oldest"), limit=_EVERY).rows:
        members.setdefault(row.group, []).append(row)
    rows = [_group(number, found, run.config().get("filter") or {}) for number, found in members.items()]
    return sorted(rows, key=lambda group: -1.0 if group.reward_variance is None else group.reward_variance, reverse=True)


def _group(number: int, members: list[EpisodeRow], settings: Mapping[str, Any]) -> GroupRow:
    evidence = [row for row in members if row.stop_reason not in ERRORED]
    rewards = [row.reward for row in evidence if row.reward is not None]
    mean = sum(rewards) / len(rewards) if rewards else None
    variance = None if mean is None else sum((reward - mean) ** 2 for reward in rewards) / max(1, len(rewards) - 1)
    kept = any(row.kept for row in members)
    return GroupRow(
        number=number,
        members=members,
        num_errored=len(members) - len(evidence),
        rewards=rewards,
        reward_mean=mean,
        reward_variance=variance,
        num_successes=sum(row.success is True for row in evidence),
        kept=kept,
        why=_why(kept, variance, settings),
    )


def _why(kept: bool, variance: float | None, settings: Mapping[str, Any]) -> str:
    """Why the group was kept or dropped, from the run's filter settings; an alarm action may have changed the share that is kept."""
    strategy, score = str(settings.get("strategy", "filter")), str(settings.get("score", "reward_variance"))
    words = score.replace("_", " ")
    if kept:
        return f"among the groups that {strategy} takes by {words}" if strategy != "all" else "all groups are kept"
    if variance is None:
        return "every member errored, so there is no evidence"
    if score == "reward_variance":
        if variance <= ZERO_VARIANCE:
            return "all rewards are equal: no task gradient"
        return f"reward variance below the cut of {strategy}"
    return f"its {words} is beyond the cut of {strategy}"


def train_steps(run: LiveRun) -> list[int]:
    """The steps that have training episodes."""
    return sorted(step for step, split in run.index().attempts() if split == Split.TRAIN.value)
