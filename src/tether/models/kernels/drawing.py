"""One token drawn for every row of logits, in two passes without a sort: the vocabulary is summed in blocks, the draw picks a block, then a
token in it.

A uniform u picks the first token whose cumulative probability exceeds u, as `draw` defines it. The second kernel also writes down what was
drawn and moves each row on to its next position, so that a step of decoding ends on the device.

Shape legend: B rows, V vocabulary, N blocks of it, K tokens drawn in one call.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _sum_blocks(logits_ptr, best_ptr, total_ptr, where_ptr, rate_ptr, vocabulary, num_blocks, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * vocabulary + column, mask=column < vocabulary, other=float("-inf")).to(tl.float32) * tl.load(
        rate_ptr
    )
    best = tl.max(logits, axis=0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    tl.store(best_ptr + row * num_blocks + block, best)
    tl.store(total_ptr + row * num_blocks + block, tl.sum(tl.exp(logits - safe), axis=0))
    tl.store(where_ptr + row * num_blocks + block, block * BLOCK + tl.argmax(logits, axis=0))


@triton.jit(do_not_specialize=["most_steps"])
def _pick(
    logits_ptr, best_ptr, total_ptr, where_ptr, rate_ptr, uniforms_ptr, step_ptr, ids_ptr, positions_ptr, lengths_ptr, drawn_ptr, logprobs_ptr,
    vocabulary, num_blocks, most_steps, GREEDY: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
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
        # Rounding must not carry the draw past the last block, or the last token, that has any probability.
        last = tl.max(tl.where(weight > 0, block, 0), axis=0)
        chosen = tl.minimum(tl.sum((cumulative <= target).to(tl.int32), axis=0), last)
        rest = target - tl.sum(tl.where(block < chosen, weight, 0.0), axis=0)
        column = tl.arange(0, BLOCK)
        at = chosen * BLOCK + column
        logits = tl.load(logits_ptr + row * vocabulary + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) * rate
        shares = tl.exp(logits - highest)
        within = tl.sum((tl.cumsum(shares, axis=0) <= rest).to(tl.int32), axis=0)
        token = (chosen * BLOCK + tl.minimum(within, tl.max(tl.where(shares > 0, column, 0), axis=0))).to(tl.int64)
    logit = tl.load(logits_ptr + row * vocabulary + token).to(tl.float32) * rate
    tl.store(ids_ptr + row, token)
    tl.store(positions_ptr + row, tl.load(positions_ptr + row) + 1)
    tl.store(lengths_ptr + row, tl.load(lengths_ptr + row) + 1)
    tl.store(drawn_ptr + row * most_steps + step, token)
    tl.store(logprobs_ptr + row * most_steps + step, logit - highest - tl.log(total))


class DecodeState:
    """The state of some rows on the device while tokens are drawn for them: everything a step reads and writes."""

    def __init__(self, num_rows: int, most_steps: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.most_steps = most_steps
        self.ids_B = zeros(num_rows, dtype=torch.int64)
        """The last drawn token, not fed yet."""
        self.positions_B = zeros(num_rows)
        """Where it goes."""
        self.lengths_B = zeros(num_rows)
        """Positions filled once it is fed."""
        self.uniforms_BK = zeros(num_rows, most_steps, dtype=torch.float32)
        self.drawn_BK = zeros(num_rows, most_steps, dtype=torch.int64)
        self.logprobs_BK = zeros(num_rows, most_steps, dtype=torch.float32)
        self.step_1 = zeros(1)
        self.rate_1 = torch.ones(1, device=device)
        """1 / temperature."""


def draw_step(logits_BV: Tensor, ledger: DecodeState, *, greedy: bool) -> None:
    """Draw a token for each row of contiguous logits, write it down, and move the rows on."""
    num_rows, vocabulary = logits_BV.shape
    num_blocks = triton.cdiv(vocabulary, BLOCK)
    best_BN, total_BN = (torch.empty(num_rows, num_blocks, dtype=torch.float32, device=logits_BV.device) for _ in range(2))
    where_BN = torch.empty(num_rows, num_blocks, dtype=torch.int32, device=logits_BV.device)
    _sum_blocks[(num_rows, num_blocks)](
        logits_BV, best_BN, total_BN, where_BN, ledger.rate_1, vocabulary, num_blocks, BLOCK=BLOCK, num_warps=8
    )
    _pick[(num_rows,)](
        logits_BV, best_BN, total_BN, where_BN, ledger.rate_1, ledger.uniforms_BK, ledger.step_1, ledger.ids_B, ledger.positions_B,
        ledger.lengths_B, ledger.drawn_BK, ledger.logprobs_BK, vocabulary, num_blocks, ledger.most_steps,
        GREEDY=greedy, BLOCKS=triton.next_power_of_2(num_blocks), BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    ledger.step_1.add_(1)
