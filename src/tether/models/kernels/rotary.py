"""Rotary positions: queries and keys of every token turned by its position, in one pass; turned back for the gradient.

Angles come as tables of cosines and sines [positions, D / 2], the halves of a head being turned against each other. The same kernel writes
keys and values to their places in a paged cache, where one is given.

Shape legend: S tokens, H query heads, K key heads, D width of a head, R half of it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


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


@triton.jit(do_not_specialize=["table_stride"])
def _rotate_and_store(
    query_ptr, key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, positions_ptr, rows_ptr, tables_ptr, cos_ptr, sin_ptr,
    query_stride, key_stride, value_stride, table_stride, num_heads, num_kv_heads, half,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int64)
    row = tl.load(rows_ptr + token).to(tl.int64)
    page = tl.load(tables_ptr + row * table_stride + position // PAGE).to(tl.int64)
    column = tl.arange(0, HALF)
    cos = tl.load(cos_ptr + position * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + position * half + column, mask=column < half, other=0.0).to(tl.float32)[None, :]
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
) -> None:
    """Turn queries in place; turn keys into their cache and copy values into theirs. `rows_S` is each token's row of the page tables.

    Caches are [pages, K, page, D]; the heads of a token stand beside each other in `states` (queries, keys, values).
    """
    query_SHD, key_SKD, value_SKD = states
    num_heads, num_kv_heads, half = query_SHD.shape[1], key_SKD.shape[1], query_SHD.shape[2] // 2
    _rotate_and_store[(len(query_SHD),)](
        query_SHD, key_SKD, value_SKD, *caches, positions_S, rows_S, tables_BX, *angles,
        query_SHD.stride(0), key_SKD.stride(0), value_SKD.stride(0), tables_BX.stride(0), num_heads, num_kv_heads, half,
        **_blocks(num_heads, num_kv_heads, half), PAGE=caches[0].shape[2], num_warps=4,
    )  # fmt: skip
