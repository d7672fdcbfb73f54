"""Kernels over logits: log-probs and entropies with their gradient (learner, scorer), and the sampling of a token (decoder).

Log-probs: see fast/linear_logprobs.py for what they compute. Logits are float32 [n, V], rows contiguous. One program reduces a row; in the
backward pass one program takes a block of a row and writes the gradient in the precision of the product that follows.

Sampling: the vocabulary is summed in blocks; a second kernel picks a block, then a token in it, without a sort. A uniform u picks the first
token whose cumulative probability exceeds u, as `sample` defines it. The second kernel also records the token and moves each row on to
its next position, so that a step of decoding ends on the device.

Shape legend: B or n rows, V vocabulary, N blocks of it, K tokens sampled in one call.
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


@triton.jit
def _allowed(logits, column, never_ptr, NUM_NEVER: tl.constexpr):
    """Logits without those of tokens that are never sampled."""
    for number in tl.static_range(NUM_NEVER):
        logits = tl.where(column == tl.load(never_ptr + number), float("-inf"), logits)
    return logits


@triton.jit
def _sum_blocks(
    logits_ptr, never_ptr, best_ptr, total_ptr, where_ptr, rate_ptr, vocabulary, num_blocks, NUM_NEVER: tl.constexpr, BLOCK: tl.constexpr
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * tl.load(
        rate_ptr
    )
    logits = _allowed(logits, column, never_ptr, NUM_NEVER)
    best = tl.max(logits, axis=0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(total_ptr + row * num_blocks + block, tl.sum(tl.exp(logits - safe), axis=0))
    tl.store(where_ptr + row * num_blocks + block, block * BLOCK + tl.argmax(logits, axis=0))


@triton.jit(do_not_specialize=["most_steps"])
def _pick(
    logits_ptr, never_ptr, best_ptr, total_ptr, where_ptr, rate_ptr, uniforms_ptr, step_ptr, ids_ptr, positions_ptr, lengths_ptr, sampled_ptr, logprobs_ptr,
    vocabulary, num_blocks, most_steps, NUM_NEVER: tl.constexpr, GREEDY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    step = tl.load(step_ptr)
    rate = tl.load(rate_ptr)
    block = tl.arange(0, BLOCKS)
    best = tl.load(best_ptr + row * num_blocks + block, mask=block < num_blocks, other=float("-inf"))
    highest = tl.max(best, axis=0)
    weight = tl.load(total_ptr + row * num_blocks + block, mask=block < num_blocks, other=0.0) * tl.exp(best - highest)
    weight = tl.where(block < num_blocks, weight, 0.0)
    total = tl.sum(weight, axis=0)
    if GREEDY:
        token = tl.load(where_ptr + row * num_blocks + tl.argmax(best, axis=0)).to(tl.int64)
    else:
        cumulative = tl.cumsum(weight, axis=0)
        target = tl.load(uniforms_ptr + row * most_steps + step) * total
        # Rounding must not carry the sample past the last block, or the last token, that has any probability.
        last = tl.max(tl.where(weight > 0, block, 0), axis=0)
        chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), axis=0), last)
        rest = target - tl.sum(tl.where(block < chosen, weight, 0.0), axis=0)
        column = tl.arange(0, BLOCK)
        at = chosen * BLOCK + column
        logits = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * rate
        shares = tl.exp(_allowed(logits, at, never_ptr, NUM_NEVER) - highest)
        within = tl.sum((tl.cumsum(shares, axis=0) <= rest).to(tl.int32), axis=0)
        token = (chosen * BLOCK + tl.minimum(within, tl.max(tl.where(shares > 0, column, 0), axis=0))).to(tl.int64)
    logit = tl.load(logits_ptr + row * vocabulary + token).to(tl.float32) * rate
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) + 1)
    tl.store(sampled_ptr + row * most_steps + step, token)
    logprob = logit - highest - tl.log(total)
    for number in tl.static_range(NUM_NEVER):  # the log-prob is that among all tokens: -log(1 / p + p' / p) for one more of probability p'
        gap = tl.load(logits_ptr + row * vocabulary + tl.load(never_ptr + number)).to(tl.float32) * rate - logit
        higher = tl.maximum(-logprob, gap)
        logprob = -higher - tl.log(tl.exp(-logprob - higher) + tl.exp(gap - higher))
    tl.store(logprobs_ptr + row * most_steps + step, logprob)


class DecodeState:
    """The state of some rows on the device while tokens are sampled for them: everything a step reads and writes."""

    def __init__(self, num_rows: int, most_steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.most_steps = most_steps
        self.ids_B = zeros(num_rows, dtype=torch.int64)
        """The last sampled token, not fed yet."""
        self.positions_B = zeros(num_rows)
        """Where it goes."""
        self.lengths_B = zeros(num_rows)
        """Positions filled once it is fed."""
        self.uniforms_BK = zeros(num_rows, most_steps, dtype=torch.float32)
        self.sampled_BK = zeros(num_rows, most_steps, dtype=torch.int64)
        self.logprobs_BK = zeros(num_rows, most_steps, dtype=torch.float32)
        self.step_1 = zeros(1)
        self.rate_1 = torch.ones(1, device=device)
        """1 / temperature."""


def sample_step(logits_BV: Tensor, state: DecodeState, *, greedy: bool, never_N: Tensor | None = None) -> None:
    """Sample a token for each row of contiguous logits, record it, and move the rows on; `never_N`: tokens that are not sampled (int32)."""
    num_rows, vocabulary = logits_BV.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    best_BN, total_BN = (torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    where_BN = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits_BV.device)
    never, num_never = (where_BN, 0) if never_N is None else (never_N, len(never_N))
    _sum_blocks[(num_rows, num_blocks)](
        logits_BV, never, best_BN, total_BN, where_BN, state.rate_1, vocabulary, num_blocks, NUM_NEVER=num_never, BLOCK=BLOCK, num_warps=8
    )
    _pick[(num_rows,)](
        logits_BV, never, best_BN, total_BN, where_BN, state.rate_1, state.uniforms_BK, state.step_1, state.ids_B, state.positions_B,
        state.lengths_B, state.sampled_BK, state.logprobs_BK, vocabulary, num_blocks, state.most_steps,
        NUM_NEVER=num_never, GREEDY=greedy, BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    state.step_1.add_(1)
