"""Packing copies ids, masks, log-probs and rewards literally, a row for every context that the model read."""

from typing import Any

import pytest
import torch

from tether.core.enums import FinishReason, StopReason
from tether.core.types import Trajectory, Turn
from tether.rollout.pack import pack


def _turn(context: tuple[int, ...], response: tuple[int, ...], **more: Any) -> Turn:
    logprobs = tuple(-0.5 * (n + 1) for n in range(len(response)))
    return Turn(context, response, logprobs, FinishReason.STOP_TEXT, "", None, **more)


def _trajectory(turns: list[Turn], group: int = 0) -> Trajectory:
    return Trajectory(group, 0, 0, turns, StopReason.FAILURE)


def test_everything_is_carried_over() -> None:
    two_turns = _trajectory([_turn((11, 12), (13,), reward=1.0, penalty=-0.25), _turn((14,), (15, 16), reward=2.0, overlong=-0.5)], group=7)
    one_turn = _trajectory([_turn((21,), (22, 0), reward=0.1)], group=3)
    batch = pack([two_turns, one_turn])
    assert batch.ids_BT.tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 0, 0, 0, 0]]
    assert batch.loss_mask_BT.int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.behavior_logprobs_BT.tolist() == [[0, 0, -0.5, 0, -0.5, -1.0], [0, -0.5, -1.0, 0, 0, 0]]
    assert batch.rewards_BT.tolist() == [[0, 0, 0.75, 0, 0, 1.5], [0, 0, 0.1, 0, 0, 0]]
    assert batch.turn_ends_BT.int().tolist() == [[0, 0, 1, 0, 0, 1], [0, 0, 1, 0, 0, 0]]
    assert batch.lengths_B.tolist() == [6, 3]
    assert batch.trajectory_index_B.tolist() == [0, 1]
    assert batch.groups_B.tolist() == [7, 3]
    kinds = (
        batch.ids_BT,
        batch.loss_mask_BT,
        batch.behavior_logprobs_BT,
        batch.rewards_BT,
        batch.turn_ends_BT,
        batch.trajectory_index_B,
        batch.groups_B,
    )
    integer, truth, single, double = torch.long, torch.bool, torch.float32, torch.float64
    assert [kind.dtype for kind in kinds] == [integer, truth, single, double, truth, integer, integer]
    assert (batch.advantages_BT, batch.returns_BT, batch.values_BT, batch.reference_BT) == (None, None, None, None)


def test_a_row_for_each_context() -> None:
    """Three turns, the last two of which began anew, between two trajectories of one row each."""
    before = _trajectory([_turn((1,), (2,), reward=1.0)], group=4)
    anew = [
        _turn((11,), (12,), reward=1.0, new_context=True),
        _turn((13, 14), (15, 16), reward=2.0, new_context=True),
        _turn((17,), (18,), new_context=True),
    ]
    after = _trajectory([_turn((31,), (32,)), _turn((33,), (34,), reward=5.0)], group=4)
    batch = pack([before, _trajectory(anew, group=5), after])
    assert batch.ids_BT.tolist() == [[1, 2, 0, 0], [11, 12, 0, 0], [13, 14, 15, 16], [17, 18, 0, 0], [31, 32, 33, 34]]
    assert batch.trajectory_index_B.tolist() == [0, 1, 1, 1, 2]
    assert batch.groups_B.tolist() == [4, 5, 5, 5, 4]
    assert batch.lengths_B.tolist() == [2, 2, 4, 2, 4]
    episodes = batch.episodes()
    assert episodes.rewards_RT.tolist() == [[1, 0, 0, 0], [1, 0, 2, 0], [0, 5, 0, 0]]
    assert episodes.turn_ends_RT.int().tolist() == [[1, 0, 0, 0], [1, 0, 1, 1], [1, 1, 0, 0]]
    assert episodes.groups_R.tolist() == [4, 5, 4]


@pytest.mark.parametrize("reason", list(StopReason))
def test_the_last_row_of_a_truncated_trajectory_is_marked(reason: StopReason) -> None:
    """Two trajectories of two contexts; the first ended by itself, whatever the second did."""
    turns = [_turn((1, 2), (3, 4)), _turn((5, 6), (7,), new_context=True)]
    ended, other = _trajectory(turns), _trajectory(turns)
    ended.stop_reason, other.stop_reason = StopReason.SUCCESS, reason
    batch = pack([ended, other])
    assert batch.truncated_B is not None
    assert batch.truncated_B.tolist() == [False, False, False, reason in (StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL)]


def test_a_trajectory_that_said_nothing_is_left_out() -> None:
    batch = pack([_trajectory([], 1), _trajectory([_turn((1,), (2,))], 2), _trajectory([], 3), _trajectory([_turn((3,), (4,))], 4)])
    assert (batch.ids_BT.tolist(), batch.trajectory_index_B.tolist(), batch.groups_B.tolist()) == ([[1, 2], [3, 4]], [0, 1], [2, 4])
    for nothing in ([_trajectory([])], []):
        batch = pack(nothing)
        assert (len(batch), batch.num_trajectories, batch.ids_BT.shape) == (0, 0, (0, 0))


def test_a_turn_without_a_token_has_no_place() -> None:
    """Neither a row of its own, nor an end on a token that was not sampled."""
    silent = _turn((5, 6), (), reward=1.0, new_context=True)
    batch = pack([_trajectory([_turn((1,), (2,), reward=2.0), silent]), _trajectory([_turn((3,), (), reward=9.0), _turn((4,), (7,))])])
    assert batch.ids_BT.tolist() == [[1, 2, 0], [3, 4, 7]]
    assert batch.rewards_BT.tolist() == [[0, 2, 0], [0, 0, 0]]
    assert batch.turn_ends_BT.int().tolist() == [[0, 1, 0], [0, 0, 1]]
    assert not (batch.turn_ends_BT & ~batch.loss_mask_BT).any()


def test_returns_keep_double_precision() -> None:
    trajectory = _trajectory([_turn((1,), (2,), reward=0.1, penalty=-0.1, overlong=1e-12)])
    assert float(pack([trajectory]).rewards_BT.sum()) == pytest.approx(1e-12, rel=1e-4)
