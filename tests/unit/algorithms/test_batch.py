"""Batch: rows are cut to their longest, trajectories stay whole and are renumbered, and sampled tokens go to Episodes and back."""

import dataclasses

import pytest
import torch

from tether.algorithms.batch import Batch

LENGTHS = [3, 7, 1, 5, 5, 2]
OWNERS = [0, 0, 1, 2, 2, 2]


def make(lengths: list[int], owners: list[int]) -> Batch:
    """Row b holds the ids 100 b + t, and the same numbers in other units in the other columns; odd ids are in the loss."""
    lengths_B, trajectory_index_B = torch.tensor(lengths, dtype=torch.long), torch.tensor(owners, dtype=torch.long)
    ids_BT = 100 * torch.arange(len(lengths))[:, None] + torch.arange(max(lengths, default=0))
    inside_BT = torch.arange(max(lengths, default=0)) < lengths_B[:, None]
    ids_BT = ids_BT * inside_BT
    mask_BT = inside_BT & (ids_BT % 2 == 1)
    return Batch(
        ids_BT,
        mask_BT,
        ids_BT * -0.5 * mask_BT,
        ids_BT.double() * mask_BT,
        mask_BT & (ids_BT % 100 % 4 == 3),
        lengths_B,
        trajectory_index_B,
        trajectory_index_B // 2 + 10,
    )


def test_length_and_trajectories() -> None:
    assert (len(make(LENGTHS, OWNERS)), make(LENGTHS, OWNERS).num_trajectories) == (6, 3)
    assert (len(make([], [])), make([], []).num_trajectories) == (0, 0)


def test_rows_are_aligned_in_order_and_cut_to_the_longest() -> None:
    part = make(LENGTHS, OWNERS).rows(torch.tensor([5, 0, 2]))
    assert part.lengths_B.tolist() == [2, 3, 1]
    assert part.ids_BT.tolist() == [[500, 501, 0], [0, 1, 2], [200, 0, 0]]
    assert part.loss_mask_BT.tolist() == [[False, True, False], [False, True, False], [False, False, False]]
    assert part.behavior_logprobs_BT.tolist() == [[0, -250.5, 0], [0, -0.5, 0], [0, 0, 0]]
    assert part.rewards_BT.tolist() == [[0, 501, 0], [0, 1, 0], [0, 0, 0]]
    assert part.trajectory_index_B.tolist() == [2, 0, 1]
    assert part.groups_B.tolist() == [11, 10, 10]
    assert part.values_BT is None


def test_optional_columns_come_along() -> None:
    batch = make(LENGTHS, OWNERS)
    full = dataclasses.replace(batch, advantages_BT=batch.ids_BT * 2.0, reference_BT=batch.ids_BT * 3.0)
    part = full.rows(torch.tensor([2, 5]))
    assert part.advantages_BT is not None and part.reference_BT is not None
    assert part.advantages_BT.tolist() == [[400, 0], [1000, 1002]]
    assert part.reference_BT.tolist() == [[600, 0], [1500, 1503]]


def test_trajectories_keep_all_their_rows_and_are_renumbered() -> None:
    part = make(LENGTHS, OWNERS).trajectories(torch.tensor([2, 0]))
    assert part.ids_BT[:, 0].tolist() == [0, 100, 300, 400, 500]
    assert part.trajectory_index_B.tolist() == [0, 0, 1, 1, 1]
    assert part.num_trajectories == 2


@pytest.mark.parametrize(("size", "firsts"), [(1, [[300, 400, 500], [0, 100], [200]]), (2, [[0, 100, 300, 400, 500], [200]])])
def test_minibatches_hold_whole_trajectories_in_the_given_order(size: int, firsts: list[list[int]]) -> None:
    parts = list(make(LENGTHS, OWNERS).minibatches(torch.tensor([2, 0, 1]), size))
    assert [part.ids_BT[:, 0].tolist() for part in parts] == firsts
    assert [part.num_trajectories for part in parts] == [size, 3 % size or 1] if size == 2 else [1, 1, 1]


def test_one_minibatch_for_a_size_beyond_the_batch() -> None:
    assert [len(part) for part in make(LENGTHS, OWNERS).minibatches(torch.tensor([1, 0, 2]), 32)] == [6]


def test_episodes_line_up_sampled_tokens_trajectory_by_trajectory() -> None:
    """Odd ids: row 0 has 1, row 1 has 101 103 105; row 2 none; rows 3 to 5 have 301 303, 401 403, 501."""
    batch = make(LENGTHS, OWNERS)
    episodes = batch.episodes(batch.ids_BT * 10.0)
    assert episodes.rewards_RT.tolist() == [[1, 101, 103, 105, 0], [0] * 5, [301, 303, 401, 403, 501]]
    assert episodes.rewards_RT.dtype == torch.float64
    assert episodes.mask_RT.tolist() == [[True] * 4 + [False], [False] * 5, [True] * 5]
    assert episodes.turn_ends_RT.tolist() == [[False, False, True, False, False], [False] * 5, [False, True, False, True, False]]
    assert episodes.groups_R.tolist() == [10, 10, 11]
    assert episodes.values_RT is not None
    assert episodes.values_RT.tolist() == [[10, 1010, 1030, 1050, 0], [0] * 5, [3010, 3030, 4010, 4030, 5010]]
    assert batch.episodes().values_RT is None


def test_spread_puts_each_token_back_in_its_place() -> None:
    batch = make(LENGTHS, OWNERS)
    episodes = batch.episodes()
    back_BT = batch.spread(episodes.rewards_RT, episodes)
    assert back_BT.dtype == torch.float32
    assert back_BT.tolist() == batch.rewards_BT.tolist()


def test_episodes_of_nothing() -> None:
    assert make([], []).episodes().mask_RT.shape == (0, 0)


def test_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make([1], [0]).ids_BT = torch.zeros(1, 1)  # type: ignore[misc]


def test_lined_up_and_spread_are_each_others_inverse() -> None:
    """Whatever stands at the sampled tokens comes back; what stood elsewhere does not."""
    batch = make(LENGTHS, OWNERS)
    episodes = batch.episodes()
    field_BT = torch.randn(batch.ids_BT.shape, generator=torch.Generator().manual_seed(0))
    lined_RT = batch.aligned(field_BT, episodes.mask_RT)
    assert lined_RT.shape == (3, 5) and lined_RT.dtype == torch.float32
    assert torch.equal(lined_RT[0, :4], torch.stack([field_BT[0, 1], field_BT[1, 1], field_BT[1, 3], field_BT[1, 5]]))
    assert torch.equal(batch.spread(lined_RT, episodes), field_BT * batch.loss_mask_BT)
    assert torch.equal(batch.aligned(batch.spread(lined_RT, episodes), episodes.mask_RT), lined_RT)


def test_trajectories_keep_their_episodes() -> None:
    """Cutting a batch and lining it up gives the same as lining it up and cutting that."""
    batch = make(LENGTHS, OWNERS)
    whole, part = batch.episodes(), batch.trajectories(torch.tensor([2])).episodes()
    assert part.rewards_RT.tolist() == whole.rewards_RT[2:].tolist()
    assert (part.groups_R.tolist(), part.mask_RT.tolist()) == ([11], [[True] * 5])


def test_no_trajectories() -> None:
    part = make(LENGTHS, OWNERS).trajectories(torch.tensor([], dtype=torch.long))
    assert (len(part), part.num_trajectories, part.ids_BT.shape) == (0, 0, (0, 0))


def test_minibatches_are_every_trajectory_once() -> None:
    batch = make(LENGTHS, OWNERS)
    parts = list(batch.minibatches(torch.tensor([1, 2, 0]), 2))
    assert sorted(first for part in parts for first in part.ids_BT[:, 0].tolist()) == [0, 100, 200, 300, 400, 500]
    assert list(batch.minibatches(torch.tensor([], dtype=torch.long), 2)) == []
