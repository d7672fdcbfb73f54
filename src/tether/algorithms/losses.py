"""Per-token losses. How tokens are averaged is another matter (aggregate.py)."""

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


def clipped_policy_loss(logprobs_N: Tensor, sampled_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log p_new - log p_sampled).

    PPO (arXiv 1707.06347, equation 7) with DAPO's separate upper bound (arXiv 2503.14476, equation 10). A token counts as clipped
    where the bound, not the ratio, decides: there its gradient is zero.
    """
    ratio_N = torch.exp(logprobs_N - sampled_N)
    bounded_N = ratio_N.clamp(1 - clip_low, 1 + clip_high)
    loss_N = -torch.minimum(ratio_N * advantages_N, bounded_N * advantages_N)
    return PolicyLoss(
        loss_N=loss_N,
        ratio_N=ratio_N.detach(),
        clipped_low_N=(ratio_N < 1 - clip_low) & (advantages_N < 0),
        clipped_high_N=(ratio_N > 1 + clip_high) & (advantages_N > 0),
    )


def k3_divergence(logprobs_N: Tensor, sampled_N: Tensor) -> Tensor:
    """k3 = r - 1 - log r, an unbiased and never negative estimate of KL(sampled || new) (Schulman, 2020)."""
    log_ratio_N = logprobs_N - sampled_N
    return torch.expm1(log_ratio_N) - log_ratio_N  # exp - 1 would cancel where the two are close
