"""The passes over a part's logits on a GPU, one kernel each way: see models/linear_logprobs.py for what they compute.

Importing this module needs Triton. Logits are float32 [n, V], rows contiguous; one program reduces a row, and one takes a block of a row in
the backward pass, where it writes the gradient in the precision of the product that follows.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
LOWEST = tl.constexpr(-1e30)
"""In the place of minus infinity, whose differences are not numbers."""


def reduce_logits(logits_nV: Tensor, targets_n: Tensor, temperature: float, into: tuple[Tensor, Tensor, Tensor]) -> None:
    """Write log-probs, entropies and log-sum-exps of the rows."""
    num_rows, vocabulary = logits_nV.shape
    _reduce_rows[(num_rows,)](
        logits_nV, targets_n, *into, logits_nV.stride(0), 1 / temperature, VOCABULARY=vocabulary, BLOCK=BLOCK, num_warps=8
    )


def logit_gradient(
    logits_nV: Tensor,
    targets_n: Tensor,
    temperature: float,
    kept: tuple[Tensor, Tensor],
    outer: tuple[Tensor, Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """[n, V] gradient by the undivided logits, from what was kept (entropies, log-sum-exps) and the gradients by the two results."""
    num_rows, vocabulary = logits_nV.shape
    gradient_nV = torch.empty(num_rows, vocabulary, dtype=dtype, device=logits_nV.device)
    by_logprobs_n = outer[0].contiguous()
    by_entropy_n = by_logprobs_n if outer[1] is None else outer[1].contiguous()  # not read where there is none
    _differentiate_rows[(num_rows, triton.cdiv(vocabulary, BLOCK))](
        logits_nV,
        gradient_nV,
        targets_n,
        *kept,
        by_logprobs_n,
        by_entropy_n,
        logits_nV.stride(0),
        vocabulary,
        1 / temperature,
        HAS_ENTROPY=outer[1] is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return gradient_nV


@triton.jit
def _reduce_rows(logits, targets, logprobs, entropy, log_sum, stride, inverse_temperature, VOCABULARY: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    start = logits + row.to(tl.int64) * stride
    lanes = tl.arange(0, BLOCK)
    # Every lane keeps the highest logit that it has seen, and its sums relative to that one.
    highest = tl.full([BLOCK], LOWEST, tl.float32)
    shares = tl.zeros([BLOCK], tl.float32)
    weighted = tl.zeros([BLOCK], tl.float32)
    for first in range(0, VOCABULARY, BLOCK):
        inside = first + lanes < VOCABULARY
        logit = tl.load(start + first + lanes, mask=inside, other=LOWEST) * inverse_temperature
        logit = tl.where(inside, logit, LOWEST)
        above = tl.maximum(highest, logit)
        shrink = tl.exp(highest - above)
        share = tl.where(inside, tl.exp(logit - above), 0.0)
        # Relative to the new highest: sum of share * (logit - highest).
        weighted = (weighted + shares * (highest - above)) * shrink + share * (logit - above)
        shares = shares * shrink + share
        highest = above
    top = tl.max(highest, axis=0)
    shrink = tl.exp(highest - top)
    total = tl.sum(shares * shrink, axis=0)
    # A lane that saw nothing has no share, and must not make a product of nothing and something huge.
    moved = tl.where(shares > 0, (weighted + shares * (highest - top)) * shrink, 0.0)
    log_total = tl.log(total)
    target = tl.load(targets + row)
    chosen = tl.load(start + target) * inverse_temperature
    tl.store(log_sum + row, top + log_total)
    tl.store(logprobs + row, chosen - top - log_total)
    tl.store(entropy + row, log_total - tl.sum(moved, axis=0) / total)


@triton.jit
def _differentiate_rows(
    logits,
    gradient,
    targets,
    entropy,
    log_sum,
    by_logprobs,
    by_entropy,
    stride,
    vocabulary,
    inverse_temperature,
    HAS_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < vocabulary
    logit = tl.load(logits + row.to(tl.int64) * stride + columns, mask=inside, other=0.0)
    log_share = logit * inverse_temperature - tl.load(log_sum + row)
    outer = tl.load(by_logprobs + row) * inverse_temperature
    factor = outer
    if HAS_ENTROPY:
        factor = outer + tl.load(by_entropy + row) * inverse_temperature * (log_share + tl.load(entropy + row))
    result = -tl.exp(log_share) * factor + tl.where(columns == tl.load(targets + row), outer, 0.0)
    place = gradient + row.to(tl.int64) * vocabulary + columns
    tl.store(place, result.to(gradient.dtype.element_ty), mask=inside)
