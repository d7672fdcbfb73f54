"""Estimates of KL(policy || reference) from the log-probs of tokens that the policy drew (Schulman, "Approximating KL divergence", 2020).

With log r = log p_reference - log p_policy: k1 = -log r is unbiased and noisy, k2 = (log r)^2 / 2 is biased and never negative,
k3 = r - 1 - log r is unbiased and never negative. Each is one number per token; how they are averaged is aggregate.py's matter.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Divergence = Callable[[Tensor, Tensor], Tensor]


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """-log r. As a loss its gradient vanishes on average, so it belongs into the reward."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """(log r)^2 / 2; its gradient, unlike its value, is unbiased."""
    return 0.5 * (logprobs_N - reference_N).square()


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """r - 1 - log r (GRPO's choice, arXiv 2402.03300, equation 4)."""
    log_ratio_N = reference_N - logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N  # exp - 1 would cancel where the two are close


DIVERGENCES: dict[str, Divergence] = {estimate.__name__: estimate for estimate in (k1, k2, k3)}
