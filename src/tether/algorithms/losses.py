"""Per-token losses of policy and critic. How tokens are averaged is another matter (aggregate.py)."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped objective of N tokens and what was clipped."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    bounded_N: Tensor
    """True where the dual clip decides."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The clipped regression of N values and what was clipped."""

    loss_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(
    logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log p_new - log p_sampled); for A < 0 at most -dual_clip * A.

    PPO (arXiv 1707.06347, equation 7) with DAPO's separate upper bound (arXiv 2503.14476, equation 10) and, if asked, dual clip
    (arXiv 1912.09729, equation 5). A token counts as clipped or bounded where the bound, not the ratio, decides: there its gradient
    is zero.
    """
    ratio_N = torch.exp(logprobs_N - sampled_N)
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N)
    bounded_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        bounded_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(bounded_N, ceiling_N, loss_N)
    return PolicyLoss(
        loss_N=loss_N,
        ratio_N=ratio_N.detach(),
        clipped_low_N=(ratio_N < 1 - clip_low) & (advantages_N < 0),
        clipped_high_N=(ratio_N > 1 + clip_high) & (advantages_N > 0),
        bounded_N=bounded_N,
    )


def clipped_value_loss(values_N: Tensor, before_N: Tensor, returns_N: Tensor, clip: float) -> ValueLoss:
    """max((v - return)^2, (clip(v, before - c, before + c) - return)^2) / 2: the critic gains nothing by moving further than c.

    Not in the PPO paper; the form of its authors' implementation, which verl and TRL's former PPO trainer share. A value counts as
    clipped where the bound decides: there its gradient is zero.
    """
    free_N = (values_N - returns_N).square()
    held_N = (torch.clamp(values_N, before_N - clip, before_N + clip) - returns_N).square()
    return ValueLoss(loss_N=0.5 * torch.maximum(free_N, held_N), clipped_N=held_N > free_N)
