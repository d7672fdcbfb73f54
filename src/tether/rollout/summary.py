"""Numbers about a set of trajectories and about how a filter saw their groups."""

from collections.abc import Sequence

import numpy as np

from tether.algorithms.filters.scores import ZERO, sample_variance
from tether.algorithms.filters.select import Selection
from tether.core.enums import StopReason
from tether.core.types import Group


def rollout_summary(groups: Sequence[Group]) -> dict[str, float]:
    """The "rollout/" metrics of a step."""
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    rewards = np.array([t.reward for t in trajectories])
    thoughts = [len(turn.reasoning_ids) for turn in turns if turn.reasoning_span]
    stops = [t.stop_reason for t in trajectories]
    return {
        "success": _mean([t.success for t in trajectories]),
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "turns": _mean([len(t.turns) for t in trajectories]),
        "response_tokens": _mean([len(turn.response_ids) for turn in turns]),
        "reasoning_tokens": _mean(thoughts),
        "format_valid": _mean([turn.valid for turn in turns]),
        "tokens_sampled": sum(t.num_sampled for t in trajectories),
        "turn_limit": _mean([stop is StopReason.TURN_LIMIT for stop in stops]),
        "context_full": _mean([stop is StopReason.CONTEXT_FULL for stop in stops]),
        "errors": sum(stop is StopReason.ENV_ERROR for stop in stops),
    }


def group_summary(groups: Sequence[Group], selection: Selection) -> dict[str, float]:
    """The "groups/" metrics of a step."""
    solved = [sum(group.successes) / len(group.trajectories) for group in groups]
    varied = [sample_variance(np.array(group.rewards)) > ZERO for group in groups]
    return {
        "rv_mean": selection.rv_mean,
        "rv_std": selection.rv_std,
        "rv_ratio": selection.rv_ratio,
        "kept_ratio": selection.kept_ratio,
        "zero_variance": selection.zero_variance,
        "all_fail": _mean([share == 0 for share in solved]),
        "mixed": _mean([0 < share < 1 for share in solved]),
        "all_succeed": _mean([share == 1 for share in solved]),
        "fail_but_varied": _mean([share == 0 and varies for share, varies in zip(solved, varied, strict=True)]),
    }


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
