"""Advantages of whole trajectories, relative to their group."""

import torch
from torch import Tensor

STD_FLOOR = 1e-6


def group_relative(rewards_G: Tensor, scale_by_std: bool) -> Tensor:
    """A_g = R_g - mean(R), divided by std(R) + 1e-6 (ddof 1) if asked.

    With the division this is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without it Dr. GRPO (arXiv 2503.20783, section 3.2),
    which does not favour prompts whose rewards hardly differ. A group of one, or of equal rewards, has advantage zero.
    """
    offset_G = rewards_G - rewards_G[0]  # equal rewards are then exactly zero, whatever their mean rounds to
    centred_G = offset_G - offset_G.mean()
    if not scale_by_std or len(rewards_G) < 2:
        return centred_G
    return centred_G / (rewards_G.std(correction=1) + STD_FLOOR)


def trajectory_advantages(groups: list[list[float]], scale_by_std: bool) -> list[float]:
    """Advantages of all trajectories, group after group, computed in double precision."""
    return [value for rewards in groups for value in group_relative(torch.tensor(rewards, dtype=torch.float64), scale_by_std).tolist()]
