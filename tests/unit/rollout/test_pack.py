"""Packing copies ids, masks and log-probs literally; the summaries are the numbers one gets by hand."""

import math
from typing import Any

import pytest

from tether.algorithms.filters.select import select_groups
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.rollout.pack import pack
from tether.rollout.summary import group_summary, rollout_summary


def _turn(context: tuple[int, ...], response: tuple[int, ...], **more: Any) -> Turn:
    logprobs = tuple(-0.5 * (n + 1) for n in range(len(response)))
    return Turn(context, response, logprobs, FinishReason.STOP_TEXT, "", more.pop("span", None), **more)


def _trajectory(turns: list[Turn], stop: StopReason = StopReason.FAILURE, group: int = 0, member: int = 0) -> Trajectory:
    return Trajectory(group, member, 0, turns, stop, success=stop is StopReason.SUCCESS)


def test_everything_is_carried_over() -> None:
    two_turns = _trajectory([_turn((11, 12), (13,)), _turn((14,), (15, 16))])
    one_turn = _trajectory([_turn((21,), (22, 0))])
    batch = pack([two_turns, one_turn], [1.5, -2.0])
    assert batch.ids_BT.tolist() == [[11, 12, 13, 14, 15, 16], [21, 22, 0, 0, 0, 0]]
    assert batch.loss_mask_BT.int().tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.logprobs_BT.tolist() == [[0, 0, -0.5, 0, -0.5, -1.0], [0, -0.5, -1.0, 0, 0, 0]]
    assert batch.advantages_BT.tolist() == [[0, 0, 1.5, 0, 1.5, 1.5], [0, -2, -2, 0, 0, 0]]
    assert batch.lengths_B.tolist() == [6, 3]


def test_a_trajectory_that_said_nothing_is_left_out() -> None:
    batch = pack([_trajectory([]), _trajectory([_turn((1,), (2,))]), _trajectory([])], [9.0, 1.0, 9.0])
    assert (batch.ids_BT.tolist(), batch.advantages_BT.tolist()) == ([[1, 2]], [[0, 1]])
    assert len(pack([_trajectory([])], [1.0])) == 0
    assert len(pack([], [])) == 0


def test_as_many_advantages_as_trajectories() -> None:
    with pytest.raises(ValueError, match="shorter"):
        pack([_trajectory([_turn((1,), (2,))])], [])


def _groups() -> list[Group]:
    solved = _trajectory([_turn((1,), (2, 3), span=(0, 1), reward=1.0, valid=True)], StopReason.SUCCESS)
    penalised = _trajectory(
        [_turn((1,), (2, 3, 4, 5), span=(0, 3), reward=0.5, valid=True), _turn((1,), (2,), penalty=-0.1)], StopReason.TURN_LIMIT, member=1
    )
    failed = [
        _trajectory([_turn((1,), (2, 3), reward=reward, valid=True)], StopReason.CONTEXT_FULL, 1, m) for m, reward in enumerate((0.2, 0.6))
    ]
    nothing = [_trajectory([], StopReason.ENV_ERROR, 2, m) for m in range(2)]
    winners = [_trajectory([_turn((1,), (2, 3), reward=1.0, valid=True)], StopReason.SUCCESS, 3, m) for m in range(2)]
    return [Group(0, 0, [solved, penalised]), Group(1, 0, failed), Group(2, 0, nothing), Group(3, 0, winners)]


def test_rollout_summary_by_hand() -> None:
    rewards = [1.0, 0.4, 0.2, 0.6, 0.0, 0.0, 1.0, 1.0]
    mean = 4.2 / 8
    assert rollout_summary(_groups()) == pytest.approx(
        {
            "success": 3 / 8,
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / 8),
            "turns": 7 / 8,
            "response_tokens": 15 / 7,
            "reasoning_tokens": 2.0,
            "format_valid": 6 / 7,
            "tokens_sampled": 15,
            "turn_limit": 1 / 8,
            "context_full": 2 / 8,
            "errors": 2,
        }
    )


def test_group_summary_by_hand() -> None:
    groups = _groups()
    rewards = [t.reward for group in groups for t in group.trajectories]
    selection = select_groups(rewards, [t.group for group in groups for t in group.trajectories], strategy="top_k", keep=0.5)
    # Variances: (1, 0.4) gives 0.18, (0.2, 0.6) gives 0.08, the others none.
    variances = [0.18, 0.08, 0, 0]
    std = math.sqrt(sum((v - 0.065) ** 2 for v in variances) / 4)
    assert group_summary(groups, selection) == pytest.approx(
        {
            "rv_mean": 0.065,
            "rv_std": std,
            "rv_ratio": std / 0.065,
            "kept_ratio": 0.5,
            "zero_variance": 2,
            "all_fail": 0.5,
            "mixed": 0.25,
            "all_succeed": 0.25,
            "fail_but_varied": 0.25,
        }
    )
