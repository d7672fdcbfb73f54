"""From per-token losses to one number: each rule is a weight per token, so that loss = sum(weight * token loss).

A sequence is a trajectory: all rows with the same owner, one row where the whole history is read at once, several where the context is
rebuilt between turns. Weights are computed for a whole minibatch before it is cut into micro-batches; the gradient is then the same
however it is cut, and the loss is the same however a trajectory is cut into rows.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Aggregation = Callable[[Tensor, Tensor, float], Tensor]
"""(mask_BT, trajectory_index_B, length) -> weights_BT, float32 and zero outside the mask."""


def token_mean(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Every token of the minibatch weighs the same (DAPO, arXiv 2503.14476, equation 12)."""
    return mask_BT.float() / mask_BT.sum().clamp(min=1)


def sequence_mean_token_mean(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Mean over tokens within a sequence, then over sequences (GRPO, arXiv 2402.03300, equation 3)."""
    owners, sequence_B = torch.unique(trajectory_index_B, return_inverse=True)
    tokens = torch.zeros(len(owners), dtype=torch.long, device=mask_BT.device).index_add_(0, sequence_B, mask_BT.sum(dim=1).long())
    return mask_BT.float() / tokens.clamp(min=1)[sequence_B, None] / max(len(owners), 1)


def sequence_mean_token_sum(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Sum over tokens divided by a constant `length`, mean over sequences: long answers are not favoured (Dr. GRPO, arXiv 2503.20783)."""
    return mask_BT.float() / length / max(len(torch.unique(trajectory_index_B)), 1)


AGGREGATIONS: dict[str, Aggregation] = {rule.__name__: rule for rule in (token_mean, sequence_mean_token_mean, sequence_mean_token_sum)}
