"""The trajectory-level baseline of the paper: keep the best and the worst members of every group, instead of choosing among groups.

Table 7 keeps the top 8 and bottom 8 of each prompt by reward. It cuts the same number of trajectories as a group filter but leaves every
prompt in the batch, also those whose members all did the same.
"""

from collections.abc import Sequence


def extreme_members(rewards: Sequence[float], count: int) -> list[int]:
    """Indices, ascending, of the `count` best and the `count` worst members of one group; at most 2 * count members are all kept.

    Of equal rewards the earlier ones are kept on either side, so the result is deterministic.
    """
    best = sorted(range(len(rewards)), key=lambda member: -rewards[member])[:count]  # sorted() is stable
    rest = sorted(set(range(len(rewards))) - set(best))
    return sorted([*best, *sorted(rest, key=lambda member: rewards[member])[:count]])
