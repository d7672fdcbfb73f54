"""log p of given tokens, and the entropy at each, from features and a head's weights, without ever holding the logits of all of them.

Both are functions of the logits of one token, so tokens are taken a part at a time, forward and backward; the backward pass makes the
logits of a part again instead of keeping them. What is kept for a token are its features and two numbers. With l the logits over the
temperature, p their softmax and H its entropy, the gradient by a logit v of a token with target t is

    d log p_t = [v = t] - p_v        d H = -p_v (log p_v + H)

The sums over the vocabulary are in float32 whatever the model computes in, and on a GPU the product with the head is not rounded to the
model's precision first. The gradient of the weights adds up in float32 over the parts and is rounded once. On a GPU the passes over the
logits are one Triton kernel each way (models/fast/kernels/logits.py).

Shape legend: N tokens, n of a part, D width of the features, V vocabulary.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

HALVES = (torch.bfloat16, torch.float16)
LOGIT_BYTES = {"cuda": 2**29, "cpu": 2**26}
"""Memory for the float32 logits of one part, by device; beside them there is one more copy of that size, at most."""


class Head(NamedTuple):
    """What turns features into log-probs."""

    weight_VD: Tensor
    bias_V: Tensor | None
    temperature: float


def linear_logprobs(
    features_ND: Tensor, targets_N: Tensor, weight_VD: Tensor, bias_V: Tensor | None = None, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """log p of each target and the entropy of its distribution, [N] each, in float32 (float64 for float64 features), with gradient.

    An entropy that takes no part in the loss costs nothing in the backward pass.
    """
    result: tuple[Tensor, Tensor] = _LinearLogprobs.apply(features_ND, targets_N, weight_VD, bias_V, temperature)
    return result


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, features_ND: Tensor, targets_N: Tensor, weight_VD: Tensor, bias_V: Tensor | None, temperature: float
    ) -> tuple[Tensor, Tensor]:
        head = Head(weight_VD, bias_V, temperature)
        wide = torch.promote_types(features_ND.dtype, torch.float32)
        logprobs_N, entropy_N, log_sum_N = torch.empty(3, len(features_ND), dtype=wide, device=features_ND.device).unbind()
        for part in _parts(len(features_ND), weight_VD):
            logits_nV = _logits(features_ND[part], head)
            _reduce(logits_nV, targets_N[part], temperature, (logprobs_N[part], entropy_N[part], log_sum_N[part]))
            del logits_nV  # before the next part makes its own
        ctx.save_for_backward(features_ND, targets_N, weight_VD, bias_V, entropy_N, log_sum_N)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_logprobs_N: Tensor | None, by_entropy_N: Tensor | None) -> tuple[Tensor | None, ...]:
        features_ND, targets_N, weight_VD, bias_V, entropy_N, log_sum_N = ctx.saved_tensors
        wants_features, _, wants_weight, wants_bias, _ = ctx.needs_input_grad
        if by_logprobs_N is None and by_entropy_N is None:
            return None, None, None, None, None
        if by_logprobs_N is None:
            by_logprobs_N = torch.zeros_like(log_sum_N)
        head = Head(weight_VD, bias_V, ctx.temperature)
        by_features_ND = torch.empty_like(features_ND) if wants_features else None
        by_weight = _WideSum(weight_VD)
        by_bias_V = torch.zeros(len(weight_VD), dtype=log_sum_N.dtype, device=weight_VD.device) if wants_bias else None
        for part in _parts(len(features_ND), weight_VD):
            outer = (by_logprobs_N[part], None if by_entropy_N is None else by_entropy_N[part])
            by_logits_nV = _by_logits(
                _logits(features_ND[part], head),
                targets_N[part],
                ctx.temperature,
                (entropy_N[part], log_sum_N[part]),
                outer,
                weight_VD.dtype,
            )
            if by_features_ND is not None:
                torch.mm(by_logits_nV, weight_VD, out=by_features_ND[part])
            if wants_weight:
                by_weight.add_product(by_logits_nV.t(), features_ND[part])
            if by_bias_V is not None:
                by_bias_V += by_logits_nV.sum(dim=0, dtype=by_bias_V.dtype)
            del by_logits_nV
        of_bias_V = None if by_bias_V is None or bias_V is None else by_bias_V.to(bias_V.dtype)
        return by_features_ND, None, by_weight.rounded() if wants_weight else None, of_bias_V, None


def _parts(count: int, weight_VD: Tensor) -> Iterator[slice]:
    """Ranges of tokens whose logits fit the memory for them."""
    logit_bytes = LOGIT_BYTES.get(weight_VD.device.type, LOGIT_BYTES["cpu"])
    size = max(1, logit_bytes // (4 * len(weight_VD)))
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _logits(features_nD: Tensor, head: Head) -> Tensor:
    """[n, V] in float32 or better, not yet divided by the temperature."""
    logits_nV = _wide_product(features_nD, head.weight_VD.t())
    return logits_nV if head.bias_V is None else logits_nV.add_(head.bias_V)


def _reduce(logits_nV: Tensor, targets_n: Tensor, temperature: float, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Log-probs, entropies and log-sum-exps of a part; its logits are used up."""
    if logits_nV.is_cuda:
        from tether.models.fast.kernels.logits import reduce_logits

        reduce_logits(logits_nV, targets_n, temperature, into)
        return
    logprobs_n, entropy_n, log_sum_n = into
    logits_nV.div_(temperature)
    highest_n1 = logits_nV.amax(dim=-1, keepdim=True)
    # All sums are around the highest logit, so that large numbers are not subtracted from each other at their end.
    ahead_nV = logits_nV.sub_(highest_n1)
    shares_nV = ahead_nV.exp()
    sum_n = shares_nV.sum(dim=-1)
    log_n = sum_n.log()
    torch.add(highest_n1[:, 0], log_n, out=log_sum_n)
    torch.sub(ahead_nV.gather(1, targets_n[:, None])[:, 0], log_n, out=logprobs_n)
    torch.sub(log_n, shares_nV.mul_(ahead_nV).sum(dim=-1) / sum_n, out=entropy_n)


def _by_logits(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature: float,
    kept: tuple[Tensor, Tensor],
    outer: tuple[Tensor, Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """The gradient by the undivided logits of a part, which are used up; `kept` are entropies and log-sum-exps."""
    if logits_nV.is_cuda:
        from tether.models.fast.kernels.logits import logit_gradient

        return logit_gradient(logits_nV, targets_n, temperature, kept, outer, dtype)
    entropy_n, log_sum_n = kept
    by_logprobs_n1 = (outer[0] / temperature)[:, None]
    logits_nV.div_(temperature).sub_(log_sum_n[:, None])
    shares_nV = logits_nV.exp()
    if outer[1] is None:
        gradient_nV = shares_nV.mul_(-by_logprobs_n1)
    else:
        by_entropy_n1 = (outer[1] / temperature)[:, None]
        gradient_nV = shares_nV.mul_(logits_nV.add_(entropy_n[:, None]).mul_(by_entropy_n1).add_(by_logprobs_n1)).neg_()
    return gradient_nV.scatter_add_(1, targets_n[:, None], by_logprobs_n1).to(dtype)


class _WideSum:
    """A sum of matrix products in float32, for a tensor that may hold less."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._sum: Tensor | None = None

    def add_product(self, left: Tensor, right: Tensor) -> None:
        if self._sum is None:
            self._sum = _wide_product(left, right)
        elif left.dtype not in HALVES:
            self._sum.addmm_(left, right)
        elif adds_to_the_accumulator(left.device.type, left.dtype):
            torch.addmm(self._sum, left, right, out_dtype=torch.float32, out=self._sum)
        else:
            self._sum.add_(_wide_product(left, right))

    def rounded(self) -> Tensor:
        """The sum in the tensor's own type."""
        return torch.zeros_like(self._like) if self._sum is None else self._sum.to(self._like.dtype)


def _wide_product(left: Tensor, right: Tensor) -> Tensor:
    """A product in float32 or better, not rounded on the way there where the device can do that."""
    if keeps_the_accumulator(left.device.type, left.dtype):
        return torch.mm(left, right, out_dtype=torch.float32)
    product = torch.mm(left, right)
    return product.to(torch.promote_types(product.dtype, torch.float32))


@lru_cache
def keeps_the_accumulator(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a product in half precision can be had in the float32 that it is summed in."""
    if dtype not in HALVES:
        return False
    small = torch.ones(16, 16, dtype=dtype, device=device_type)
    try:
        return torch.mm(small, small, out_dtype=torch.float32).dtype == torch.float32
    except (RuntimeError, TypeError):  # a device, or a torch, that cannot
        return False


@lru_cache
def adds_to_the_accumulator(device_type: str, dtype: torch.dtype) -> bool:
    """Whether such a product can be added to a float32 matrix in place."""
    small = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.full((16, 16), 0.5, device=device_type)
    try:
        torch.addmm(total, small, small, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 16.5).all())


def float32_product(head: torch.nn.Linear, features_SD: Tensor) -> Tensor:
    """Logits of a head in half precision, in the float32 that they are summed in."""
    if keeps_the_accumulator(features_SD.device.type, features_SD.dtype):
        logits_SV = torch.mm(features_SD, head.weight.t(), out_dtype=torch.float32)
    else:
        logits_SV = features_SD.float() @ head.weight.float().t()
    return logits_SV if head.bias is None else logits_SV + head.bias
