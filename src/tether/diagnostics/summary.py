"""Numbers about a set of trajectories and about how a filter ranked their groups. Errored rollouts are counted and enter no other number."""

import math
from collections.abc import Sequence

import numpy as np

from tether.algorithms.filters.scores import ZERO, sample_variance
from tether.algorithms.filters.select import Selection
from tether.core.enums import StopReason
from tether.core.types import Group, Trajectory

COUNTS = ("tokens_sampled", "response_tokens_max", "errors", "retries")
"""Of the "rollout/" metrics, those that are neither shares nor means."""


def rollout_summary(groups: Sequence[Group], *, mixed: bool = False) -> dict[str, float]:
    """The "rollout/" metrics of a step; `mixed`: the run has several environments, and each gets its own rates."""
    trajectories = [t for group in groups for t in group.trajectories]
    turns = [turn for t in trajectories for turn in t.turns]
    rewards = np.array([t.reward for t in trajectories])
    thoughts = [len(turn.reasoning_ids) for turn in turns if turn.reasoning_span]
    stops = [t.stop_reason for t in trajectories]
    return {
        "success": _mean([t.success for t in trajectories]),
        "reward_mean": _mean(rewards.tolist()),
        "reward_std": float(rewards.std()) if len(rewards) else 0.0,
        "turns": _mean([len(t.turns) for t in trajectories]),
        "response_tokens": _mean([turn.num_tokens for turn in turns]),
        "response_tokens_max": max((turn.num_tokens for turn in turns), default=0),
        "reasoning_tokens": _mean(thoughts),
        "format_valid": _mean([turn.valid for turn in turns]),
        "lenient": _mean([turn.lenient for turn in turns]),
        "overlong": _mean([turn.overlong < 0 for turn in turns]),
        "tokens_sampled": sum(t.num_sampled for t in trajectories),
        "turn_limit": _mean([stop is StopReason.TURN_LIMIT for stop in stops]),
        "context_full": _mean([stop is StopReason.CONTEXT_FULL for stop in stops]),
        "episodes": len(trajectories),
        "errors": sum(len(group.errored) for group in groups),
        "retries": sum(t.retries for group in groups for t in (*group.trajectories, *group.errored)),
        **_continued(trajectories),
        **_per_environment(trajectories, mixed),
    }


def _continued(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """ "continued": of an agent's requests that send replies back, the share that continues one on its tokens; nothing without such requests."""
    sent = sum(t.measures.get("follow_ups", 0.0) for t in trajectories)
    return {"continued": sum(t.measures.get("continued", 0.0) for t in trajectories) / sent} if sent else {}


def _per_environment(trajectories: Sequence[Trajectory], mixed: bool) -> dict[str, float]:
    """ "env/{environment}/{name}": the environment's own numbers, and in a mixed run its success and reward."""
    summary: dict[str, float] = {}
    for env in sorted({trajectory.env for trajectory in trajectories}):
        played = [trajectory for trajectory in trajectories if trajectory.env == env]
        names = dict.fromkeys(name for t in played for name in t.measures)  # an agent may give a number in some episodes only
        numbers = {name: _mean([t.measures[name] for t in played if name in t.measures]) for name in names}
        if mixed:
            numbers |= {"success": _mean([t.success for t in played]), "reward_mean": _mean([t.reward for t in played])}
        summary |= {f"env/{env}/{name}": value for name, value in numbers.items()}
    return summary


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """The chance that at least one of k samples solves a prompt, of which `num_solved` of `num_samples` did; unbiased (arXiv 2107.03374, equation 1)."""
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


def pass_rates(groups: Sequence[Group]) -> dict[str, float]:
    """ "pass_at_{k}" for k = 1, 2, 4, ... up to the samples of a prompt, the mean over prompts; nothing where each has a single sample."""
    solved = [(len(group.trajectories), sum(group.successes)) for group in groups if group.trajectories]
    most = min((samples for samples, _ in solved), default=0)
    powers = [2**n for n in range(most.bit_length())] if most > 1 else []
    return {f"pass_at_{k}": _mean([pass_at_k(samples, wins, k) for samples, wins in solved]) for k in powers}


def group_summary(groups: Sequence[Group], selection: Selection) -> dict[str, float]:
    """The "groups/" metrics of a step; a group whose every member errored is counted nowhere."""
    groups = [group for group in groups if group.trajectories]
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
