"""Products of rows in float8 (e4m3), and what makes rows of float8 for them: a step of decoding reads half the bytes of its weights.

Every row has a scale of its own: a token's activations, and the weights of one output. A row divided by its scale reaches from -448 to 448, the type's
limits. Products add up in the tensor cores' accumulators; scales are multiplied in behind the sum.

Up to MOST_ROWS tokens the product is a kernel of our own, which divides a deep weight with few rows among programs (`parts`, as in products.py); torch's
takes 30 us there where this takes 9. More tokens, or wide weights from WIDE_ROWS tokens on, are torch's.

Shape legend: S tokens, N rows of the weight, K depth, P parts, F width of the MLP.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.chaining import launch_options, wait_for_inputs
from tether.models.fast.kernels.pointwise import norm_forward, to_float8

MOST_ROWS = 256
WIDE_ROWS, WIDE_WIDTH = 128, 8192
"""From so many tokens and rows of the weight on torch's product is faster."""
ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of the largest cards."""
LEAST_DEPTH = 512
"""Of a part."""
DEPTH = 128
CONFIGS = ((32, 64, 4, 6), (64, 64, 4, 5), (128, 64, 4, 4), (256, 128, 8, 4))
"""By the most tokens: rows of the weight in a program, warps, loads under way. Measured on an H200 for the projections of 1.5B and 3B models."""


class Float8Rows(NamedTuple):
    """A matrix whose row m is values[m] * scale[m]."""

    values_MK: Tensor
    """float8_e4m3fn."""
    scale_M: Tensor
    """float32."""


def norm_float8(delta: Tensor, residual_SN: Tensor, weight_N: Tensor, eps: float) -> tuple[Float8Rows, Tensor]:
    """(norm of the sum, the sum), like `layers.add_rms_norm`."""
    values = torch.empty_like(residual_SN, dtype=torch.float8_e4m3fn)
    _, total_SN, scale_S = norm_forward(residual_SN, delta, weight_N, eps, save=True, out=values)
    return Float8Rows(values, scale_S), total_SN


@triton.jit
def _swiglu_float8(both_ptr, out_ptr, scale_ptr, width, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    wait_for_inputs(CHAINED)
    gate = tl.load(both_ptr + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both_ptr + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    values, scale = to_float8(gate / (1.0 + tl.exp(-gate)) * up)
    tl.store(out_ptr + row * width + columns, values, mask=inside)
    tl.store(scale_ptr + row, scale)


def swiglu_float8(both_S2F: Tensor) -> Float8Rows:
    """silu(first half) * second half, [S, F]."""
    num_rows, width = len(both_S2F), both_S2F.shape[1] // 2
    values = torch.empty(num_rows, width, dtype=torch.float8_e4m3fn, device=both_S2F.device)
    scale_S = torch.empty(num_rows, dtype=torch.float32, device=both_S2F.device)
    block = triton.next_power_of_2(width)
    warps = max(1, min(16, block // 512))
    _swiglu_float8[(num_rows,)](both_S2F, values, scale_S, width, BLOCK=block, num_warps=warps, **launch_options(both_S2F.device))
    return Float8Rows(values, scale_S)


@triton.jit(do_not_specialize=["num_tokens"])
def _float8_product(
    x_ptr, token_scale_ptr, weight_ptr, line_scale_ptr, out_ptr,
    num_tokens, depth, each, width,
    LINES: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    line, token, offset = block * LINES + tl.arange(0, LINES), tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    is_line, is_token = line < width, token < num_tokens
    line_scale = tl.load(line_scale_ptr + line, mask=is_line, other=0.0)
    first, last = part * each, tl.minimum((part + 1) * each, depth)
    weight = weight_ptr + line[:, None].to(tl.int64) * depth + offset[None, :]
    x = x_ptr + token[None, :].to(tl.int64) * depth + offset[:, None]
    total = tl.zeros((LINES, TOKENS), dtype=tl.float32)
    wait_for_inputs(CHAINED)
    for begin in tl.range(first, last, DEPTH, num_stages=STAGES):
        inside = begin + offset < last
        lines = tl.load(weight + begin, mask=is_line[:, None] & inside[None, :], other=0.0)
        tokens = tl.load(x + begin, mask=inside[:, None] & is_token[None, :], other=0.0)
        total = tl.dot(lines, tokens, total)
    total *= line_scale[:, None] * tl.load(token_scale_ptr + token, mask=is_token, other=0.0)[None, :]
    place = (part * num_tokens + token[None, :]).to(tl.int64) * width + line[:, None]
    tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=is_line[:, None] & is_token[None, :])


def float8_product(x_SK: Float8Rows, weight_NK: Float8Rows, dtype: torch.dtype) -> Tensor:
    """x times the weight's transpose, [S, N]."""
    num_tokens, width = len(x_SK.values_MK), len(weight_NK.values_MK)
    if _is_of_torch(x_SK, width):
        return _torch_product(x_SK, weight_NK, dtype)
    out_SN = torch.empty(num_tokens, width, dtype=dtype, device=x_SK.values_MK.device)
    _launch(x_SK, weight_NK, out_SN, x_SK.values_MK.shape[1])
    return out_SN


def float8_product_parts(x_SK: Float8Rows, weight_NK: Float8Rows, dtype: torch.dtype) -> Tensor:
    """The same as float32 parts [P, S, N], whose sum it is; [S, N] where torch computes it."""
    (num_tokens, depth), width = x_SK.values_MK.shape, len(weight_NK.values_MK)
    if _is_of_torch(x_SK, width):
        return _torch_product(x_SK, weight_NK, dtype)
    lines = _config(num_tokens)[1]
    most_parts = max(1, min(depth // LEAST_DEPTH, ENOUGH_PROGRAMS // triton.cdiv(width, lines)))
    each = triton.cdiv(triton.cdiv(depth, most_parts), DEPTH) * DEPTH
    parts_PSN = torch.empty(triton.cdiv(depth, each), num_tokens, width, dtype=torch.float32, device=x_SK.values_MK.device)
    _launch(x_SK, weight_NK, parts_PSN, each)
    return parts_PSN


def _is_of_torch(x_SK: Float8Rows, width: int) -> bool:
    num_tokens = len(x_SK.values_MK)
    return x_SK.values_MK.is_cuda and (num_tokens > MOST_ROWS or (num_tokens >= WIDE_ROWS and width >= WIDE_WIDTH))


def _torch_product(x_SK: Float8Rows, weight_NK: Float8Rows, dtype: torch.dtype) -> Tensor:
    scales = x_SK.scale_M[:, None], weight_NK.scale_M[None, :]
    return torch._scaled_mm(x_SK.values_MK, weight_NK.values_MK.t(), *scales, out_dtype=dtype, use_fast_accum=True)


def _config(num_tokens: int) -> tuple[int, int, int, int]:
    return next((config for config in CONFIGS if num_tokens <= config[0]), CONFIGS[-1])


def _launch(x_SK: Float8Rows, weight_NK: Float8Rows, out: Tensor, each: int) -> None:
    """`each` is the depth of a part; there is more than one only where `out` is [parts, S, N]."""
    (num_tokens, depth), width = x_SK.values_MK.shape, out.shape[-1]
    _, lines, warps, stages = _config(num_tokens)
    _float8_product[(triton.cdiv(width, lines), triton.cdiv(depth, each))](
        *x_SK, *weight_NK, out, num_tokens, depth, each, width,
        LINES=lines, DEPTH=DEPTH, TOKENS=max(16, triton.next_power_of_2(num_tokens)), STAGES=stages, num_warps=warps, **launch_options(out.device),
    )  # fmt: skip
