"""How many more prompts to sample after filtering."""

import pytest

from tether.algorithms.filters.select import groups_to_sample


@pytest.mark.parametrize(
    ("kept", "sampled", "wanted", "more"),
    [
        (8, 8, 8, 0),  # full
        (9, 16, 8, 0),
        (6, 8, 8, 3),  # 2 missing, 3/4 kept: 2.67
        (4, 8, 8, 8),  # 4 missing, half kept
        (7, 8, 8, 2),  # 1 missing, 7/8 kept: 1.14
        (3, 4, 5, 3),  # 2 missing, 3/4 kept: 2.67
        (6, 16, 8, 6),  # a second round: 2 missing, 3/8 kept: 5.33
        (4, 16, 8, 8),  # 16 expected, a batch at most
        (1, 8, 8, 8),
        (0, 8, 8, 8),  # nothing kept: a whole batch
        (0, 0, 8, 8),
        (5, 5, 8, 3),  # all kept so far: what is missing
        (0, 0, 0, 0),
        (3, 9, 6, 6),  # exactly 9, a batch at most
        (99, 100, 1000, 911),  # 901 * 100 / 99 = 910.1
        (10, 30, 20, 20),
        (10, 15, 20, 15),  # exactly 15: no rounding up
    ],
)
def test_by_hand(kept: int, sampled: int, wanted: int, more: int) -> None:
    assert groups_to_sample(kept, sampled, wanted) == more


def test_never_fewer_than_are_missing_and_never_more_than_a_batch() -> None:
    for wanted in range(1, 9):
        for sampled in range(20):
            for kept in range(min(sampled, wanted - 1) + 1):
                assert wanted - kept <= groups_to_sample(kept, sampled, wanted) <= wanted
