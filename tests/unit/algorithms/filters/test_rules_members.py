"""The trajectory-level baseline: which members are the extremes, ties, and groups too small to cut."""

import pytest

from tether.algorithms.filters.select import extreme_members


@pytest.mark.parametrize(
    ("rewards", "count", "kept"),
    [
        ([5, 1, 4, 2, 3], 1, [0, 1]),
        ([5, 1, 4, 2, 3], 2, [0, 1, 2, 3]),
        ([0, -1, -3, -2], 1, [0, 2]),
        ([1, 0, 1, 0, 1, 0], 1, [0, 1]),  # of equal rewards the first
        ([1, 0, 1, 0, 1, 0], 2, [0, 1, 2, 3]),
        ([0, 0, 0, 1, 0], 1, [0, 3]),
        ([2, 2, 2, 2], 1, [0, 1]),  # all equal: never the same member twice
        ([2, 2, 2, 2, 2], 2, [0, 1, 2, 3]),
        ([3, 2, 1], 2, [0, 1, 2]),  # at most 2 * count: all
        ([3, 2, 1, 0], 2, [0, 1, 2, 3]),
        ([7], 8, [0]),
        ([], 8, []),
    ],
)
def test_by_hand(rewards: list[float], count: int, kept: list[int]) -> None:
    assert extreme_members(rewards, count) == kept


def test_the_paper_keeps_eight_and_eight() -> None:
    """Table 7, here of 20 members with rewards 0 to 19 in a shuffled order: the middle four go."""
    rewards = [(7 * member) % 20 for member in range(20)]
    kept = [rewards[member] for member in extreme_members(rewards, 8)]
    assert sorted(kept) == [*range(8), *range(12, 20)]
