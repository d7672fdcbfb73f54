"""From per-token losses to one number: each rule is a weight per token, so that loss = sum(weight * token loss).

Weights are computed for a whole minibatch before it is cut into micro-batches; the gradient is then the same however it is cut.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tether.core.errors import UnknownName, did_you_mean


def token_mean(mask_BT: Tensor, max_tokens: int) -> Tensor:
    """Every token of the minibatch weighs the same (DAPO, arXiv 2503.14476, equation 12)."""
    return mask_BT / mask_BT.sum().clamp(min=1)


def sequence_mean_token_mean(mask_BT: Tensor, max_tokens: int) -> Tensor:
    """Mean over tokens within a sequence, then over sequences (GRPO, arXiv 2402.03300, equation 3)."""
    return mask_BT / mask_BT.sum(dim=1, keepdim=True).clamp(min=1) / len(mask_BT)


def sequence_mean_token_sum(mask_BT: Tensor, max_tokens: int) -> Tensor:
    """Sum over tokens divided by a constant length, mean over sequences: long answers are not favoured (Dr. GRPO, arXiv 2503.20783)."""
    return mask_BT / float(max_tokens) / len(mask_BT)


AGGREGATIONS: dict[str, Callable[[Tensor, int], Tensor]] = {
    rule.__name__: rule for rule in (token_mean, sequence_mean_token_mean, sequence_mean_token_sum)
}


def token_weights(mask_BT: Tensor, rule: str, max_tokens: int) -> Tensor:
    """The weights of a rule by name; `max_tokens` is the constant length of the rule that needs one."""
    if rule not in AGGREGATIONS:
        raise UnknownName(f"unknown aggregation '{rule}': {did_you_mean(rule, AGGREGATIONS)}")
    return AGGREGATIONS[rule](mask_BT.to(torch.float32), max_tokens)
