"""Root-mean-square normalisation, with the addition of the residual stream before it in the same pass, and its gradient.

A row is normalised in float32, rounded to its own precision, and then scaled by the weight, as transformers does it. Rows are addressed as
heads of tokens, so that the norm of queries and keys reads them where the projection wrote them: row r starts at
`(r // heads) * token_stride + (r % heads) * width`.

Shape legend: S tokens, N width of a row, P programs of the backward pass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BACKWARD_PROGRAMS = 264
"""Two for each multiprocessor of the largest cards; each sums the weight's gradient over its share of the rows."""


@triton.jit
def _forward(
    x_ptr, delta_ptr, weight_ptr, y_ptr, sum_ptr, scale_ptr,
    x_stride, y_stride, heads, width, eps,
    HAS_DELTA: tl.constexpr, SAVE_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    x = tl.load(x_ptr + (row // heads) * x_stride + (row % heads) * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    if SAVE_SCALE:
        tl.store(scale_ptr + row, scale)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    tl.store(y_ptr + (row // heads) * y_stride + (row % heads) * width + columns, normed.to(x.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _backward(
    grad_ptr, carried_ptr, x_ptr, scale_ptr, weight_ptr, out_ptr, weight_grad_ptr,
    num_rows, width, rows_each,
    HAS_CARRIED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    weight_grad = tl.zeros([BLOCK], dtype=tl.float32)
    first = program * rows_each
    for row in range(first, tl.minimum(first + rows_each, num_rows)):
        grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        x = tl.load(x_ptr + row * width + columns, mask=inside, other=0.0)
        scale = tl.load(scale_ptr + row)
        normed = x.to(tl.float32) * scale
        weight_grad += grad * normed.to(x.dtype).to(tl.float32)
        inner = grad * weight
        out = scale * (inner - normed * (tl.sum(inner * normed, axis=0) / width))
        if HAS_CARRIED:
            out += tl.load(carried_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * width + columns, out.to(x.dtype), mask=inside)
    tl.store(weight_grad_ptr + program * width + columns, weight_grad, mask=inside)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))


def norm_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, *, save: bool, out: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, x + delta or x itself, the rows' scales or nothing); x [S, N], or [S, heads, N] with heads side by side and no delta."""
    width, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    num_rows = x.shape[0] * heads
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    total = torch.empty_like(x) if delta is not None else x
    scale = torch.empty(num_rows if save else 0, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _forward[(num_rows,)](
        x, x if delta is None else delta, weight, y, total, scale, x.stride(0), y.stride(0), heads, width, eps,
        HAS_DELTA=delta is not None, SAVE_SCALE=save, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return y, total, scale


def norm_backward(grad: Tensor, carried: Tensor | None, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the row that was normalised (plus what the residual stream carries back) and of the weight; all contiguous."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    programs = min(BACKWARD_PROGRAMS, num_rows)
    rows_each = triton.cdiv(num_rows, programs)
    out = torch.empty_like(x)
    parts_PN = torch.zeros(programs, width, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    _backward[(programs,)](
        grad, x if carried is None else carried, x, scale, weight, out, parts_PN, num_rows, width, rows_each,
        HAS_CARRIED=carried is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out, parts_PN.sum(dim=0).to(weight.dtype)
