"""The summaries are the numbers one gets by hand; pass@k is the share of draws that hold a success."""

import itertools
import math
from typing import Any

import pytest

from tether.algorithms.filters.select import select_groups
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.summary import group_summary, pass_at_k, pass_rates, rollout_summary


def _turn(context: tuple[int, ...], response: tuple[int, ...], **more: Any) -> Turn:
    return Turn(context, response, (-0.5,) * len(response), FinishReason.STOP_TEXT, "", more.pop("span", None), **more)


def _trajectory(turns: list[Turn], stop: StopReason = StopReason.FAILURE, group: int = 0, member: int = 0, **more: Any) -> Trajectory:
    return Trajectory(group, member, 0, turns, stop, success=stop is StopReason.SUCCESS, **more)


def _groups() -> list[Group]:
    solved = _trajectory([_turn((1,), (2, 3), span=(0, 1), reward=1.0, valid=True, lenient=True)], StopReason.SUCCESS)
    penalised = _trajectory(
        [_turn((1,), (2, 3, 4, 5), span=(0, 3), reward=0.5, valid=True), _turn((1,), (2,), penalty=-0.1, overlong=-0.2)],
        StopReason.TURN_LIMIT,
        member=1,
    )
    failed = [
        _trajectory([_turn((1,), (2, 3), reward=reward, valid=True)], StopReason.CONTEXT_FULL, 1, m) for m, reward in enumerate((0.2, 0.6))
    ]
    nothing = [_trajectory([], StopReason.ENV_ERROR, 2, m) for m in range(2)]
    winners = [_trajectory([_turn((1,), (2, 3), reward=1.0, valid=True)], StopReason.SUCCESS, 3, m) for m in range(2)]
    return [Group(0, 0, [solved, penalised]), Group(1, 0, failed), Group(2, 0, [], nothing), Group(3, 0, winners)]


def test_rollout_summary_by_hand() -> None:
    """The two errored episodes are counted and enter nothing else."""
    rewards = [1.0, 0.2, 0.2, 0.6, 1.0, 1.0]
    mean = 4.0 / 6
    assert rollout_summary(_groups()) == pytest.approx(
        {
            "success": 3 / 6,
            "reward_mean": mean,
            "reward_std": math.sqrt(sum((r - mean) ** 2 for r in rewards) / 6),
            "turns": 7 / 6,
            "response_tokens": 15 / 7,
            "response_tokens_max": 4,
            "reasoning_tokens": 2.0,
            "format_valid": 6 / 7,
            "lenient": 1 / 7,
            "overlong": 1 / 7,
            "tokens_sampled": 15,
            "turn_limit": 1 / 6,
            "context_full": 2 / 6,
            "episodes": 6,
            "errors": 2,
            "retries": 0,
        }
    )


def test_group_summary_by_hand() -> None:
    groups = _groups()
    rewards = [t.reward for group in groups for t in group.trajectories]
    selection = select_groups(rewards, [t.group for group in groups for t in group.trajectories], strategy="top_k", keep=0.5)
    # Variances: (1, 0.2) gives 0.32, (0.2, 0.6) gives 0.08, the others none.
    variances = [0.32, 0.08, 0]
    mean = 0.4 / 3
    std = math.sqrt(sum((v - mean) ** 2 for v in variances) / 3)
    assert group_summary(groups, selection) == pytest.approx(
        {
            "rv_mean": mean,
            "rv_std": std,
            "rv_ratio": std / mean,
            "kept_ratio": 1 / 3,
            "zero_variance": 1,
            "all_fail": 1 / 3,
            "mixed": 1 / 3,
            "all_succeed": 1 / 3,
            "fail_but_varied": 1 / 3,
        }
    )


def _mixed() -> list[Group]:
    pushed = [
        _trajectory([_turn((1,), (2,), reward=3.0)], StopReason.SUCCESS, env="sokoban", measures={"boxes": 1.0}),
        _trajectory([_turn((1,), (2,), reward=1.0)], env="sokoban", measures={"boxes": 0.0}),
        _trajectory([], StopReason.ENV_ERROR, env="sokoban", measures={"boxes": 0.0}),
    ]
    bought = [_trajectory([_turn((1,), (2,), reward=0.5)], group=1, env="shop", measures={"score": 0.5, "price": 8.0})]
    return [Group(0, 0, pushed), Group(1, 0, bought)]


def test_numbers_of_the_environments() -> None:
    own = {"env/shop/score": 0.5, "env/shop/price": 8.0, "env/sokoban/boxes": 1 / 3}
    found = rollout_summary(_mixed())
    assert {name: value for name, value in found.items() if name.startswith("env/")} == pytest.approx(own)
    rates = {"env/shop/success": 0, "env/shop/reward_mean": 0.5, "env/sokoban/success": 1 / 3, "env/sokoban/reward_mean": 4 / 3}
    found = rollout_summary(_mixed(), mixed=True)
    assert {name: value for name, value in found.items() if name.startswith("env/")} == pytest.approx({**own, **rates})


def test_numbers_that_some_episodes_of_an_agent_have() -> None:
    """An episode that a budget ended has no number of the agent's own; of five follow-ups in all, three continued."""
    counts = (
        {"follow_ups": 4.0, "continued": 3.0},
        {"follow_ups": 1.0, "continued": 0.0, "steps": 3.0},
        {"follow_ups": 0.0, "continued": 0.0},
    )
    found = rollout_summary([Group(0, 0, [_trajectory([_turn((1,), (2,))], env="agent", measures=each) for each in counts])])
    assert found["env/agent/steps"] == 3 and found["continued"] == pytest.approx(0.6)
    assert "continued" not in rollout_summary(_mixed())


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_success(num_samples: int) -> None:
    for num_solved in range(num_samples + 1):
        outcomes = [True] * num_solved + [False] * (num_samples - num_solved)
        for k in range(1, num_samples + 1):
            draws = [any(draw) for draw in itertools.combinations(outcomes, k)]
            assert pass_at_k(num_samples, num_solved, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_literal_pass_at_k() -> None:
    assert pass_at_k(10, 3, 1) == pytest.approx(0.3)
    assert pass_at_k(10, 3, 2) == pytest.approx(1 - 42 / 90)
    assert pass_at_k(200, 7, 100) == pytest.approx(1 - math.prod((93 + n) / (193 + n) for n in range(1, 8)))
    assert pass_at_k(4, 0, 4) == 0.0 and pass_at_k(4, 1, 4) == 1.0


def _solved(*counts: tuple[int, int]) -> list[Group]:
    stops = {True: StopReason.SUCCESS, False: StopReason.FAILURE}
    return [Group(g, 0, [_trajectory([], stops[m < wins], g, m) for m in range(size)]) for g, (size, wins) in enumerate(counts)]


def test_pass_rates_by_hand() -> None:
    # Of 6 samples 2 succeed: 1 - 4/6, 1 - 6/15, 1 - 1/15; of 6 samples none; of 6 samples all.
    assert pass_rates(_solved((6, 2), (6, 0), (6, 6))) == pytest.approx(
        {"pass_at_1": (1 / 3 + 1) / 3, "pass_at_2": (9 / 15 + 1) / 3, "pass_at_4": (14 / 15 + 1) / 3}
    )
    assert list(pass_rates(_solved((8, 1)))) == ["pass_at_1", "pass_at_2", "pass_at_4", "pass_at_8"]
    assert list(pass_rates(_solved((2, 1)))) == ["pass_at_1", "pass_at_2"]
    assert list(pass_rates(_solved((4, 1), (2, 1)))) == ["pass_at_1", "pass_at_2"], "as far as every prompt has samples"
    assert pass_rates(_solved((1, 1), (1, 0))) == pass_rates([]) == {}, "one sample a prompt is success itself"
