"""The steps between a layer's matrix products, one pass over memory each, and their gradients: norm, SwiGLU, rotary positions; and two parts of an
attention made one.

Norm: a row is normalised in float32, rounded to its own precision, and then scaled by the weight, as transformers does it; the addition of
the residual stream happens in the same pass, and where that comes in parts (kernels/products.py) their sum too. Rows are addressed as heads
of tokens, so that the norm of queries and keys reads them where the projection wrote them: row r starts at
`(r // heads) * token_stride + (r % heads) * width`.

SwiGLU: silu(gate) * up. The two halves may lie in one matrix, beside each other.

Rotary positions: queries and keys of every token are rotated by its position, and rotated back for the gradient. Angles come as tables of
cosines and sines [positions, D / 2]; the two halves of a head are the two coordinates. A second kernel writes keys and values to their
positions in a paged cache in the same pass.

Shape legend: S tokens, N width of a row, P programs of the backward pass, F width of the MLP, H query heads, K key heads, D width of a head,
R half of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.chaining import launch_options, wait_for_inputs

BACKWARD_PROGRAMS, BACKWARD_WIDTH = 264, 4096
"""Two for each multiprocessor of the largest cards, for rows of this width, and more for narrower ones, each of which waits for its rows one after the
other; a program sums the weight's gradient over its share of the rows."""


@triton.jit
def to_float8(row):
    """(a row in float8, what it was divided by): its largest value becomes 448, the type's limit."""
    scale = tl.maximum(tl.max(tl.abs(row), axis=0), 1e-12) / 448.0
    return (row / scale).to(tl.float8e4nv), scale


@triton.jit
def _norm_forward(
    x_ptr, delta_ptr, weight_ptr, y_ptr, sum_ptr, scale_ptr,
    x_stride, y_stride, part_stride, heads, width, eps,
    HAS_DELTA: tl.constexpr, PARTS: tl.constexpr, SAVE_SCALE: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < width
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    wait_for_inputs(CHAINED)
    x = tl.load(x_ptr + (row // heads) * x_stride + (row % heads) * width + columns, mask=inside, other=0.0)
    if HAS_DELTA:
        delta = tl.load(delta_ptr + row * width + columns, mask=inside, other=0.0)
        for part in tl.static_range(1, PARTS):
            delta += tl.load(delta_ptr + part * part_stride + row * width + columns, mask=inside, other=0.0)
        x = (x.to(tl.float32) + delta.to(x.dtype).to(tl.float32)).to(x.dtype)
        tl.store(sum_ptr + row * width + columns, x, mask=inside)
    wide = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=0) / width + eps)
    normed = (wide * scale).to(x.dtype).to(tl.float32) * weight.to(tl.float32)
    if y_ptr.dtype.element_ty == tl.float8e4nv:
        values, scale = to_float8(normed)
    else:
        values = normed.to(x.dtype)
    if SAVE_SCALE:
        tl.store(scale_ptr + row, scale)
    tl.store(y_ptr + (row // heads) * y_stride + (row % heads) * width + columns, values, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "rows_each"])
def _norm_backward(
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
    """(normed, x + delta or x itself, the rows' scales or nothing); x [S, N], or [S, heads, N] with heads side by side and no delta.

    Into an `out` of float8 a row is written in its units, and its scale is the unit.

    Delta is [S, N], or [parts, S, N] in float32, of which it is the sum: as products of few rows leave it.
    """
    width, heads = x.shape[-1], x.shape[1] if x.ndim == 3 else 1
    num_rows = x.shape[0] * heads
    y = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    total = torch.empty_like(x) if delta is not None else x
    scale = torch.empty(num_rows if save else 0, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(width)
    in_parts = delta is not None and delta.ndim == 3
    _norm_forward[(num_rows,)](
        x, x if delta is None else delta, weight, y, total, scale, x.stride(0), y.stride(0), num_rows * width, heads, width, eps,
        HAS_DELTA=delta is not None, PARTS=len(delta) if delta is not None and in_parts else 1, SAVE_SCALE=save, BLOCK=block,
        num_warps=_warps(block), **(launch_options(x.device) if in_parts else {"CHAINED": False}),
    )  # fmt: skip
    return y, total, scale


def norm_backward(grad: Tensor, carried: Tensor | None, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the row that was normalised (plus what the residual stream carries back) and of the weight; all contiguous."""
    width = x.shape[-1]
    num_rows = x.numel() // width
    block = triton.next_power_of_2(width)
    programs = min(BACKWARD_PROGRAMS * max(1, BACKWARD_WIDTH // block), num_rows)
    rows_each = triton.cdiv(num_rows, programs)
    out = torch.empty_like(x)
    parts_PN = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        grad, x if carried is None else carried, x, scale, weight, out, parts_PN, num_rows, width, rows_each,
        HAS_CARRIED=carried is not None, BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return out, parts_PN.sum(dim=0).to(weight.dtype)


BLOCK = 1024


@triton.jit
def _swiglu_forward(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = wide / (1.0 + tl.exp(-wide))
    tl.store(out_ptr + row * width + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _swiglu_backward(grad_ptr, gate_ptr, up_ptr, by_gate_ptr, by_up_ptr, gate_stride, up_stride, by_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    silu = wide * share
    tl.store(by_up_ptr + row * by_stride + columns, (grad * silu).to(gate.dtype), mask=inside)
    slope = share * (1.0 + wide * (1.0 - share))
    tl.store(by_gate_ptr + row * by_stride + columns, (grad * up * slope).to(gate.dtype), mask=inside)


def swiglu_forward(gate_SF: Tensor, up_SF: Tensor) -> Tensor:
    """Contiguous [S, F]; the rows of both inputs may stand apart."""
    num_rows, width = gate_SF.shape
    out_SF = torch.empty(num_rows, width, dtype=gate_SF.dtype, device=gate_SF.device)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _swiglu_forward[grid](gate_SF, up_SF, out_SF, gate_SF.stride(0), up_SF.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out_SF


def swiglu_backward(grad_SF: Tensor, gate_SF: Tensor, up_SF: Tensor) -> Tensor:
    """Gradients of gate and up beside each other, [S, 2F], from a contiguous gradient of the product."""
    num_rows, width = gate_SF.shape
    by_both_S2F = torch.empty(num_rows, 2 * width, dtype=grad_SF.dtype, device=grad_SF.device)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _swiglu_backward[grid](
        grad_SF, gate_SF, up_SF, by_both_S2F, by_both_S2F[:, width:], gate_SF.stride(0), up_SF.stride(0), 2 * width, width,
        BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return by_both_S2F


@triton.jit
def _rotate_head(source, target, cos, sin, half, inside, BACK: tl.constexpr):
    """One block of heads: [heads, R] of offsets to the first halves."""
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + half, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if BACK:
        sin = -sin
    tl.store(target, (a * cos - b * sin).to(first.dtype), mask=inside)
    tl.store(target + half, (b * cos + a * sin).to(first.dtype), mask=inside)


@triton.jit
def _rotate(
    query_ptr, key_ptr, out_query_ptr, out_key_ptr, positions_ptr, cos_ptr, sin_ptr,
    query_stride, key_stride, out_query_stride, out_key_stride, num_heads, num_kv_heads, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, HALF)
    place = tl.load(positions_ptr + token).to(tl.int64) * half + column
    cos = tl.load(cos_ptr + place, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + place, mask=column < half, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    offset = head * 2 * half + column[None, :]
    inside = (head < num_heads) & (column[None, :] < half)
    _rotate_head(query_ptr + token * query_stride + offset, out_query_ptr + token * out_query_stride + offset, cos, sin, half, inside, BACK)
    head = tl.arange(0, KV_HEADS)[:, None]
    offset = head * 2 * half + column[None, :]
    inside = (head < num_kv_heads) & (column[None, :] < half)
    _rotate_head(key_ptr + token * key_stride + offset, out_key_ptr + token * out_key_stride + offset, cos, sin, half, inside, BACK)


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _rotate_and_store(
    query_ptr, key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, positions_ptr, rows_ptr, tables_ptr, cos_ptr, sin_ptr, places_ptr, axes_ptr,
    query_stride, key_stride, value_stride, table_stride, num_heads, num_kv_heads, half, num_tokens,
    PLACED: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    page = tl.load(tables_ptr + row * table_stride + position // PAGE).to(tl.int64)
    column = tl.arange(0, HALF)
    if PLACED:  # every rotation goes by the token's place in time, height or width
        axis = tl.load(axes_ptr + column, mask=column < half, other=0)
        angle = tl.load(places_ptr + axis * num_tokens + token).to(tl.int64) * half + column
    else:
        angle = position * half + column
    cos = tl.load(cos_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angle, mask=column < half, other=0.0).to(tl.float32)[None, :]
    head = tl.arange(0, HEADS)[:, None]
    offset = head * 2 * half + column[None, :]
    inside = (head < num_heads) & (column[None, :] < half)
    query = query_ptr + token * query_stride + offset
    _rotate_head(query, query, cos, sin, half, inside, False)
    head = tl.arange(0, KV_HEADS)[:, None]
    offset = head * 2 * half + column[None, :]
    inside = (head < num_kv_heads) & (column[None, :] < half)
    place = ((page * num_kv_heads + head) * PAGE + position % PAGE) * 2 * half + column[None, :]
    _rotate_head(key_ptr + token * key_stride + offset, key_cache_ptr + place, cos, sin, half, inside, False)
    value = value_ptr + token * value_stride + offset
    tl.store(value_cache_ptr + place, tl.load(value, mask=inside), mask=inside)
    tl.store(value_cache_ptr + place + half, tl.load(value + half, mask=inside), mask=inside)


def _blocks(num_heads: int, num_kv_heads: int, half: int) -> dict[str, int]:
    return {
        "HEADS": triton.next_power_of_2(num_heads),
        "KV_HEADS": triton.next_power_of_2(num_kv_heads),
        "HALF": triton.next_power_of_2(half),
    }


def rotate(query_SHD: Tensor, key_SKD: Tensor, positions_S: Tensor, cos_PR: Tensor, sin_PR: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    """Both turned forward or back, in new memory. The heads of a token stand beside each other; tokens may stand apart."""
    num_heads, num_kv_heads, half = query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[2] // 2
    out_query, out_key = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query_SHD, key_SKD))
    _rotate[(len(query_SHD),)](
        query_SHD, key_SKD, out_query, out_key, positions_S, cos_PR, sin_PR,
        query_SHD.stride(0), key_SKD.stride(0), out_query.stride(0), out_key.stride(0), num_heads, num_kv_heads, half,
        BACK=back, **_blocks(num_heads, num_kv_heads, half), num_warps=4,
    )  # fmt: skip
    return out_query, out_key


def rotate_and_store(
    states: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    positions_S: Tensor,
    rows_S: Tensor,
    tables_BX: Tensor,
    angles: tuple[Tensor, Tensor],
    placed: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Turn queries in place; turn keys into their cache and copy values into theirs. `rows_S` is each token's row of the page tables.

    Caches are [pages, K, page, D]; the heads of a token stand beside each other in `states` (queries, keys, values). `placed`: the places [3, S] of
    tokens in time, height and width, and by which of them each rotation goes [R] (int32); None: all go by the position.
    """
    query_SHD, key_SKD, value_SKD = states
    num_heads, num_kv_heads, half = query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[2] // 2
    _rotate_and_store[(len(query_SHD),)](
        query_SHD, key_SKD, value_SKD, *caches, positions_S, rows_S, tables_BX, *angles, *(placed or (positions_S, rows_S)),
        query_SHD.stride(0), key_SKD.stride(0), value_SKD.stride(0), tables_BX.stride(0), num_heads, num_kv_heads, half, len(query_SHD),
        PLACED=placed is not None, **_blocks(num_heads, num_kv_heads, half), PAGE=caches[0].shape[2], num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["sums_stride", "other_stride"])
def _merge_attention(
    out_ptr, other_ptr, sums_ptr, other_sums_ptr, sums_stride, other_stride, num_heads, width,
    HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)[None, :]
    present = head < num_heads
    own_sum = tl.load(sums_ptr + head * sums_stride + token, mask=present, other=0.0)
    other_sum = tl.load(other_sums_ptr + head * other_stride + token, mask=present, other=0.0)
    highest = tl.maximum(own_sum, other_sum)
    own_part, other_part = tl.exp(own_sum - highest), tl.exp(other_sum - highest)
    tl.store(sums_ptr + head * sums_stride + token, highest + tl.log(own_part + other_part), mask=present)
    share = (other_part / (own_part + other_part))[:, None]
    place = (token * num_heads + head[:, None]) * width + column
    inside = present[:, None] & (column < width)
    own = tl.load(out_ptr + place, mask=inside, other=0.0)
    other = tl.load(other_ptr + place, mask=inside, other=0.0).to(tl.float32)
    wide = own.to(tl.float32)
    tl.store(out_ptr + place, (wide + share * (other - wide)).to(own.dtype), mask=inside)


def merge_attention(out_SHD: Tensor, sums_HS: Tensor, other_SHD: Tensor, other_sums_HS: Tensor) -> None:
    """Make outputs and log-sum-exps over some keys, in place, those over these keys and others; outputs are contiguous."""
    num_heads, width = out_SHD.shape[1:]
    _merge_attention[(len(out_SHD),)](
        out_SHD, other_SHD, sums_HS, other_sums_HS, sums_HS.stride(0), other_sums_HS.stride(0), num_heads, width,
        HEADS=triton.next_power_of_2(num_heads), WIDTH=triton.next_power_of_2(width), num_warps=4,
    )  # fmt: skip
