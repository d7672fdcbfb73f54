"""Batch: rows are cut to their longest, minibatches and micro-batches hold each row exactly once, the token budget is respected."""

import dataclasses

import pytest
import torch

from tether.algorithms.batch import Batch

LENGTHS = [3, 7, 1, 5, 5, 2]


def make(lengths: list[int]) -> Batch:
    """Row b holds the ids 100 b + t, and the same numbers shifted in the other columns."""
    lengths_B = torch.tensor(lengths)
    ids_BT = 100 * torch.arange(len(lengths))[:, None] + torch.arange(max(lengths))
    inside_BT = torch.arange(max(lengths)) < lengths_B[:, None]
    ids_BT = ids_BT * inside_BT
    return Batch(ids_BT, inside_BT & (ids_BT % 2 == 1), ids_BT * -0.5, ids_BT * 2.0, lengths_B)


def test_len() -> None:
    assert len(make(LENGTHS)) == 6


def test_rows_are_aligned_in_order_and_cut_to_the_longest() -> None:
    part = make(LENGTHS).rows(torch.tensor([5, 0, 2]))
    assert part.lengths_B.tolist() == [2, 3, 1]
    assert part.ids_BT.tolist() == [[500, 501, 0], [0, 1, 2], [200, 0, 0]]
    assert part.loss_mask_BT.tolist() == [[False, True, False], [False, True, False], [False, False, False]]
    assert part.logprobs_BT.tolist() == [[-250, -250.5, 0], [0, -0.5, -1], [-100, 0, 0]]
    assert part.advantages_BT.tolist() == [[1000, 1002, 0], [0, 2, 4], [400, 0, 0]]


def test_minibatches_follow_the_order() -> None:
    parts = list(make(LENGTHS).minibatches(torch.tensor([4, 2, 0, 1, 5, 3]), size=4))
    assert [part.lengths_B.tolist() for part in parts] == [[5, 1, 3, 7], [2, 5]]
    assert [part.ids_BT[:, 0].tolist() for part in parts] == [[400, 200, 0, 100], [500, 300]]
    assert [part.ids_BT.shape[1] for part in parts] == [7, 5]


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 6), (2, [2, 2, 2]), (6, [6]), (32, [6])])
def test_minibatches_hold_each_row_once(size: int, sizes: list[int]) -> None:
    parts = list(make(LENGTHS).minibatches(torch.tensor([3, 5, 1, 0, 4, 2]), size))
    assert [len(part) for part in parts] == sizes
    assert [first // 100 for part in parts for first in part.ids_BT[:, 0].tolist()] == [3, 5, 1, 0, 4, 2]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # Longest first 7 5 5 3 2 1; a batch takes budget // longest rows.
        (100, [[1, 3, 4, 0, 5, 2]]),
        (14, [[1, 3], [4, 0], [5, 2]]),
        (10, [[1], [3, 4], [0, 5, 2]]),
        (7, [[1], [3], [4], [0, 5], [2]]),
        (6, [[1], [3], [4], [0, 5], [2]]),  # the row of 7 is over the budget and goes alone
        (1, [[1], [3], [4], [0], [5], [2]]),
    ],
)
def test_microbatches_by_hand(budget: int, expected: list[list[int]]) -> None:
    assert [index.tolist() for index, _ in make(LENGTHS).microbatches(budget)] == expected


@pytest.mark.parametrize("budget", [1, 3, 8, 20, 64, 1000])
def test_microbatches_cover_within_the_budget(budget: int) -> None:
    generator = torch.Generator().manual_seed(budget)
    batch = make(torch.randint(1, 30, (40,), generator=generator).tolist())
    seen = []
    for index, micro in batch.microbatches(budget):
        assert micro.ids_BT.numel() <= budget or len(micro) == 1
        assert micro.ids_BT.shape[1] == int(micro.lengths_B.max())
        assert micro.lengths_B.tolist() == batch.lengths_B[index].tolist()
        assert torch.equal(micro.ids_BT, batch.ids_BT[index][:, : micro.ids_BT.shape[1]])
        seen += index.tolist()
    assert sorted(seen) == list(range(40))


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make([1]).ids_BT = torch.zeros(1, 1)  # type: ignore[misc]
