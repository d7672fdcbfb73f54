"""Products of few rows with a weight: what a step of decoding does with every matrix of the model.

Their time is that of reading the weight. A program takes some rows of it, and where these are too few to keep the device busy, a share of
the depth; the shares are left apart in float32 (`parts`), for the norm that reads them next to add up in their order. The weight is the first operand:
its rows fill the tensor cores' side of 64, the tokens the one that may be narrow. The MLP's first product holds the same rows of gate and up in one
program, and applies SwiGLU before it writes.

Shape legend: S tokens, K depth, N rows of the weight, P parts, F width of the MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.chaining import launch_options, wait_for_inputs

MOST_ROWS = 32
"""Of tokens; the library is faster with more."""
LINES = 64
"""Of the weight, in one program: the tensor cores' own number."""
ENOUGH_PROGRAMS = ((16, 264), (MOST_ROWS, 132))
"""By the most tokens: two for each multiprocessor of the largest cards, or one where a program has more to do."""
LEAST_DEPTH = 256
"""Of a part: shorter ones end before their loads are under way."""
BLOCK = 128
STAGES = 4
"""Loads under way at a time, each BLOCK deep."""


@triton.jit
def _weight_tile(weight, begin, last, offset, is_line):
    return tl.load(weight + begin, mask=is_line[:, None] & (begin + offset < last)[None, :], other=0.0)


@triton.jit
def _token_tile(x, begin, last, offset, is_token):
    return tl.load(x + begin, mask=(begin + offset < last)[:, None] & is_token[None, :], other=0.0)


@triton.jit(do_not_specialize=["num_tokens"])
def _product(
    x_ptr, weight_ptr, bias_ptr, out_ptr,
    num_tokens, depth, each, out_width,
    HAS_BIAS: tl.constexpr, SWIGLU: tl.constexpr, IN_PARTS: tl.constexpr, LINES: tl.constexpr, DEPTH: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    block, part = tl.program_id(0), tl.program_id(1)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    number = tl.arange(0, LINES)
    if SWIGLU:  # the first half of the lines are the gate's, the second the same ones of up, `out_width` rows further down
        column = block * (LINES // 2) + number % (LINES // 2)
        line = column + (number // (LINES // 2)) * out_width
    else:
        column = block * LINES + number
        line = column
    is_line = column < out_width
    token, offset = tl.arange(0, TOKENS), tl.arange(0, DEPTH)
    is_token = token < num_tokens
    first, last = part * each, tl.minimum((part + 1) * each, depth)
    weight = weight_ptr + line[:, None].to(tl.int64) * depth + offset[None, :]
    x = x_ptr + token[None, :].to(tl.int64) * depth + offset[:, None]
    # Three tiles of the weight are read while the kernel before still runs: there the memory has little to do.
    second_begin, third_begin = first + DEPTH, first + 2 * DEPTH
    first_lines = _weight_tile(weight, first, last, offset, is_line)
    second_lines = _weight_tile(weight, second_begin, last, offset, is_line)
    third_lines = _weight_tile(weight, third_begin, last, offset, is_line)
    wait_for_inputs(CHAINED)
    total = tl.dot(first_lines, _token_tile(x, first, last, offset, is_token), input_precision=PRECISION)
    total = tl.dot(second_lines, _token_tile(x, second_begin, last, offset, is_token), total, input_precision=PRECISION)
    total = tl.dot(third_lines, _token_tile(x, third_begin, last, offset, is_token), total, input_precision=PRECISION)
    for begin in tl.range(first + 3 * DEPTH, last, DEPTH, num_stages=STAGES):
        lines = _weight_tile(weight, begin, last, offset, is_line)
        total = tl.dot(lines, _token_tile(x, begin, last, offset, is_token), total, input_precision=PRECISION)
    if IN_PARTS:
        place = (part * num_tokens + token[None, :]).to(tl.int64) * out_width + column[:, None]
        tl.store(out_ptr + place, total, mask=is_line[:, None] & is_token[None, :])
    elif SWIGLU:
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, LINES // 2, TOKENS)), (1, 2, 0)))
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)  # rounded as where the product is one of its own
        product = gate / (1.0 + tl.exp(-gate)) * up
        column = block * (LINES // 2) + tl.arange(0, LINES // 2)
        place = token[None, :].to(tl.int64) * out_width + column[:, None]
        tl.store(out_ptr + place, product.to(dtype), mask=(column < out_width)[:, None] & is_token[None, :])
    else:
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=is_line, other=0.0).to(tl.float32)[:, None]
        place = token[None, :].to(tl.int64) * out_width + column[:, None]
        tl.store(out_ptr + place, total.to(dtype), mask=is_line[:, None] & is_token[None, :])


def product(x_SK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """x times the weight's transpose plus the bias, [S, N]."""
    out_SN = torch.empty(len(x_SK), len(weight_NK), dtype=x_SK.dtype, device=x_SK.device)
    _launch(x_SK, weight_NK, bias_N, out_SN, x_SK.shape[1], swiglu=False)
    return out_SN


def product_parts(x_SK: Tensor, weight_NK: Tensor) -> Tensor:
    """The same without a bias as float32 parts [P, S, N], whose sum it is."""
    depth, width = x_SK.shape[1], len(weight_NK)
    enough = next(programs for most_tokens, programs in ENOUGH_PROGRAMS if len(x_SK) <= most_tokens)
    most_parts = max(1, min(depth // LEAST_DEPTH, enough // triton.cdiv(width, LINES)))
    each = triton.cdiv(triton.cdiv(depth, most_parts), BLOCK) * BLOCK
    parts_PSN = torch.empty(triton.cdiv(depth, each), len(x_SK), width, dtype=torch.float32, device=x_SK.device)
    _launch(x_SK, weight_NK, None, parts_PSN, each, swiglu=False)
    return parts_PSN


def product_swiglu(x_SK: Tensor, weight_NK: Tensor) -> Tensor:
    """silu(x times the first half of the weight) times (x times the second half), [S, F]."""
    out_SF = torch.empty(len(x_SK), len(weight_NK) // 2, dtype=x_SK.dtype, device=x_SK.device)
    _launch(x_SK, weight_NK, None, out_SF, x_SK.shape[1], swiglu=True)
    return out_SF


def _launch(x_SK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out: Tensor, each: int, *, swiglu: bool) -> None:
    """`each` is the depth of a part; there is more than one only where `out` is [parts, S, N]."""
    assert x_SK.is_contiguous()
    assert weight_NK.is_contiguous()
    (num_tokens, depth), width = x_SK.shape, out.shape[-1]
    full = x_SK.dtype == torch.float32
    _product[(triton.cdiv(width, LINES // 2 if swiglu else LINES), triton.cdiv(depth, each))](
        x_SK, weight_NK, x_SK if bias_N is None else bias_N, out, num_tokens, depth, each, width,
        HAS_BIAS=bias_N is not None, SWIGLU=swiglu, IN_PARTS=out.ndim == 3, LINES=LINES, DEPTH=BLOCK // 2 if full else BLOCK,
        TOKENS=max(16, triton.next_power_of_2(num_tokens)), STAGES=STAGES, PRECISION="ieee" if full else "tf32", num_warps=4,
        **launch_options(x_SK.device),
    )  # fmt: skip
