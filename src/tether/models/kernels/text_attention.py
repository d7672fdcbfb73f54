"""Attention inside texts that stand behind one another, each of which may continue a stored prefix that others continue too.

A query sees all of its text's prefix, then its own text up to itself; both go into one softmax, and nothing is copied, padded or merged
afterwards. The query heads that share a key head are rows of the same block.

Shape legend: S tokens of the row, B texts in it, H query heads, K key heads, D width of a head, X tokens of all prefixes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
KEYS = 64


@triton.jit
def _take_in(
    query, state, key_ptr, value_ptr, first, start, stop, limit, key_stride, value_stride, head_offset, width, scale_log2,
    ONLY_BEFORE: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Keys `start` to `stop` behind `first`, taken into the running softmax; ONLY_BEFORE: each row sees keys up to its limit."""
    best, total, mixed = state
    column, offset = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    in_width = column < width
    for begin in range(start, stop, KEYS):
        at = begin + offset
        row = (first + at).to(tl.int64)[:, None]
        offsets = head_offset + column[None, :]
        there = (at < stop)[:, None] & in_width[None, :]
        key = tl.load(key_ptr + row * key_stride + offsets, mask=there, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
        seen = (at < stop)[None, :]
        if ONLY_BEFORE:
            seen = seen & (at[None, :] <= limit[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shares = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(shares, axis=1)
        value = tl.load(value_ptr + row * value_stride + offsets, mask=there, other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
        best = higher
    return best, total, mixed


@triton.jit
def _attend(
    query_ptr, key_ptr, value_ptr, prefix_key_ptr, prefix_value_ptr, starts_ptr, prefixes_ptr, out_ptr,
    query_stride, key_stride, value_stride, prefix_stride, out_stride, width, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, kv_head, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(starts_ptr + text)
    num_tokens = tl.load(starts_ptr + text + 1) - first
    begin = block * (ROWS // GROUP_ROWS)
    if begin < num_tokens:
        token = begin + tl.arange(0, ROWS) // GROUP_ROWS
        head = tl.arange(0, ROWS) % GROUP_ROWS
        column = tl.arange(0, WIDTH)
        inside = ((token < num_tokens) & (head < GROUP))[:, None] & (column < width)[None, :]
        offset = ((kv_head * GROUP + head) * width)[:, None] + column[None, :]
        query = tl.load(query_ptr + (first + token).to(tl.int64)[:, None] * query_stride + offset, mask=inside, other=0.0)
        state = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, WIDTH], tl.float32)
        prefix = tl.load(prefixes_ptr + 2 * text)
        num_before = tl.load(prefixes_ptr + 2 * text + 1) - prefix
        state = _take_in(
            query, state, prefix_key_ptr, prefix_value_ptr, prefix, 0, num_before, token, prefix_stride, prefix_stride, kv_head * width,
            width, scale_log2, False, WIDTH, KEYS, PRECISION,
        )  # fmt: skip
        stop = tl.minimum(num_tokens, begin + ROWS // GROUP_ROWS)
        _, total, mixed = _take_in(
            query, state, key_ptr, value_ptr, first, 0, stop, token, key_stride, value_stride, kv_head * width,
            width, scale_log2, True, WIDTH, KEYS, PRECISION,
        )  # fmt: skip
        out = (mixed / total[:, None]).to(query.dtype)
        tl.store(out_ptr + (first + token).to(tl.int64)[:, None] * out_stride + offset, out, mask=inside)


def text_attention(
    query_SHD: Tensor,
    key_SKD: Tensor,
    value_SKD: Tensor,
    starts_B1: Tensor,
    most_tokens: int,
    scale: float,
    prefix: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """[S, H, D] contiguous.

    Args:
        query_SHD: heads side by side; tokens may stand apart. Keys and values likewise.
        key_SKD: keys.
        value_SKD: values.
        starts_B1: where each text begins, and the number of tokens at the end, B + 1 in all (int32).
        most_tokens: of a text.
        scale: of the scores.
        prefix: stored keys and values [X, K, D], contiguous, and where among them each text's prefix starts and stops [B, 2] (int32).
    """
    num_tokens, num_heads, width = query_SHD.shape
    num_kv_heads = key_SKD.shape[1]
    group = num_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    rows = max(ROWS, group_rows)
    num_texts = len(starts_B1) - 1
    if prefix is None:
        prefix = key_SKD, key_SKD, torch.zeros(num_texts, 2, dtype=torch.int32, device=query_SHD.device)
    out_SHD = torch.empty(num_tokens, num_heads, width, dtype=query_SHD.dtype, device=query_SHD.device)
    full = query_SHD.dtype == torch.float32
    _attend[(triton.cdiv(most_tokens, rows // group_rows), num_kv_heads, num_texts)](
        query_SHD, key_SKD, value_SKD, *prefix[:2], starts_B1, prefix[2], out_SHD,
        query_SHD.stride(0), key_SKD.stride(0), value_SKD.stride(0), prefix[0].stride(0), out_SHD.stride(0), width, scale * 1.4426950408889634,
        GROUP=group, GROUP_ROWS=group_rows, ROWS=rows, KEYS=KEYS, WIDTH=max(16, triton.next_power_of_2(width)),
        PRECISION="ieee" if full else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    return out_SHD
