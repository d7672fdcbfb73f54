"""The way back of attention from many queries to few keys that all of them see, as of the rows of a group to the prompt they share.

Torch's flash kernel has a program for every block of keys, which goes through all queries: of one prompt and a hundred rows these are a few programs
on a card of 132 multiprocessors. Here the queries of a block of keys are divided among programs too, each of which writes its share of what
the keys get; the shares are added up in one order, so equal inputs have equal gradients. What a query gets is a kernel of its own, whose programs
divide the queries.

As in flash attention, probabilities are computed again: exp(score - log-sum-exp), of a softmax that may be over more keys than these.

Shape legend: S queries, X keys, H query heads, K key heads, D width of a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, KEYS = 64, 64
"""Queries and keys of a block."""
ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of the largest cards."""
LEAST_BLOCKS = 4
"""Blocks of queries that are worth a program."""
LOG2_E = 1.4426950408889634


@triton.jit(do_not_specialize=["num_queries"])
def _differentiate_queries(
    query_ptr, key_ptr, value_ptr, out_ptr, by_out_ptr, sums_ptr, query_starts_ptr, key_starts_ptr, by_query_ptr, inner_ptr,
    query_stride, key_stride, value_stride, out_stride, num_queries, width, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, head, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_starts_ptr + text)
    token = block * ROWS + tl.arange(0, ROWS)
    is_token = token < tl.load(query_starts_ptr + text + 1) - first
    if block * ROWS < tl.load(query_starts_ptr + text + 1) - first:
        row = (first + token).to(tl.int64)
        column = tl.arange(0, WIDTH)
        in_width = (column < width)[None, :]
        inside = is_token[:, None] & in_width
        place = row[:, None] * out_stride + head * width + column[None, :]
        query = tl.load(query_ptr + row[:, None] * query_stride + head * width + column[None, :], mask=inside, other=0.0)
        by_out = tl.load(by_out_ptr + place, mask=inside, other=0.0)
        out = tl.load(out_ptr + place, mask=inside, other=0.0)
        inner = tl.sum(by_out.to(tl.float32) * out.to(tl.float32), axis=1)
        tl.store(inner_ptr + head * num_queries + row, inner, mask=is_token)
        sums = tl.load(sums_ptr + head * num_queries + row, mask=is_token, other=float("inf")) * LOG2_E
        first_key = tl.load(key_starts_ptr + text)
        num_keys = tl.load(key_starts_ptr + text + 1) - first_key
        by_query = tl.zeros([ROWS, WIDTH], tl.float32)
        for begin in range(0, num_keys, KEYS):
            at = begin + tl.arange(0, KEYS)
            there = (at < num_keys)[:, None] & in_width
            key_row = (first_key + at).to(tl.int64)[:, None]
            offset = (head // GROUP) * width + column[None, :]
            key = tl.load(key_ptr + key_row * key_stride + offset, mask=there, other=0.0)
            value = tl.load(value_ptr + key_row * value_stride + offset, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * (scale * LOG2_E)
            # The 0 of a key that is not there may be so far above all others that its share would be infinite.
            shares = tl.exp2(tl.where((at < num_keys)[None, :], scores, float("-inf")) - sums[:, None])
            by_shares = tl.dot(by_out, tl.trans(value), input_precision=PRECISION)
            by_query += tl.dot((shares * (by_shares - inner[:, None])).to(key.dtype), key, input_precision=PRECISION)
        by_query_place = (row[:, None] * tl.num_programs(1) + head) * width + column[None, :]
        tl.store(by_query_ptr + by_query_place, (by_query * scale).to(query.dtype), mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_keys_all", "splits"])
def _differentiate_keys(
    query_ptr, key_ptr, value_ptr, by_out_ptr, sums_ptr, inner_ptr, query_starts_ptr, key_starts_ptr, by_key_ptr, by_value_ptr,
    query_stride, key_stride, value_stride, out_stride, num_queries, num_keys_all, splits, num_kv_heads, width, scale,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, LOG2_E: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    block, part, text = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_head, split = part % num_kv_heads, part // num_kv_heads
    first_key = tl.load(key_starts_ptr + text)
    num_keys = tl.load(key_starts_ptr + text + 1) - first_key
    if block * KEYS < num_keys:
        at = block * KEYS + tl.arange(0, KEYS)
        column = tl.arange(0, WIDTH)
        in_width = (column < width)[None, :]
        there = (at < num_keys)[:, None] & in_width
        key_row = (first_key + at).to(tl.int64)[:, None]
        offset = kv_head * width + column[None, :]
        key = tl.load(key_ptr + key_row * key_stride + offset, mask=there, other=0.0)
        value = tl.load(value_ptr + key_row * value_stride + offset, mask=there, other=0.0)
        first = tl.load(query_starts_ptr + text)
        num_tokens = tl.load(query_starts_ptr + text + 1) - first
        # The blocks of queries of all heads that share these keys, one behind the other.
        blocks = tl.cdiv(num_tokens, ROWS)
        each = tl.cdiv(blocks * GROUP, splits)
        by_key, by_value = tl.zeros([KEYS, WIDTH], tl.float32), tl.zeros([KEYS, WIDTH], tl.float32)
        for index in range(split * each, tl.minimum(split * each + each, blocks * GROUP)):
            head = kv_head * GROUP + index // blocks
            token = (index % blocks) * ROWS + tl.arange(0, ROWS)
            is_token = token < num_tokens
            row = (first + token).to(tl.int64)
            inside = is_token[:, None] & in_width
            query = tl.load(query_ptr + row[:, None] * query_stride + head * width + column[None, :], mask=inside, other=0.0)
            by_out = tl.load(by_out_ptr + row[:, None] * out_stride + head * width + column[None, :], mask=inside, other=0.0)
            sums = tl.load(sums_ptr + head * num_queries + row, mask=is_token, other=float("inf")) * LOG2_E
            inner = tl.load(inner_ptr + head * num_queries + row, mask=is_token, other=0.0)
            scores = tl.dot(key, tl.trans(query), input_precision=PRECISION) * (scale * LOG2_E)
            shares = tl.exp2(tl.where((at < num_keys)[:, None], scores, float("-inf")) - sums[None, :])
            by_value += tl.dot(shares.to(by_out.dtype), by_out, input_precision=PRECISION)
            by_shares = tl.dot(value, tl.trans(by_out), input_precision=PRECISION)
            by_key += tl.dot((shares * (by_shares - inner[None, :])).to(query.dtype), query, input_precision=PRECISION)
        place = ((split.to(tl.int64) * num_keys_all + key_row) * num_kv_heads + kv_head) * width + column[None, :]
        tl.store(by_key_ptr + place, by_key * scale, mask=there)
        tl.store(by_value_ptr + place, by_value, mask=there)


def prompt_gradients(
    by_out_SHD: Tensor,
    states: tuple[Tensor, Tensor, Tensor],
    result: tuple[Tensor, Tensor],
    starts: tuple[Tensor, Tensor],
    longest: tuple[int, int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value.

    Args:
        by_out_SHD: by the outputs, heads side by side.
        states: queries, keys and values; the heads of a token stand beside each other.
        result: outputs, laid out as their gradient, and log-sum-exps [H, S], contiguous; perhaps those of a softmax over more keys.
        starts: where the queries of each text begin, and their number at the end; the same of the keys (int32).
        longest: bounds on the queries and on the keys of a text.
        scale: of the scores.
    """
    query_SHD, key_XKD, value_XKD = states
    (num_queries, num_heads, width), (num_keys, num_kv_heads) = query_SHD.shape, key_XKD.shape[:2]
    group, num_texts = num_heads // num_kv_heads, len(starts[0]) - 1
    by_query_SHD = torch.empty(query_SHD.shape, dtype=query_SHD.dtype, device=query_SHD.device)
    inner_HS = torch.empty(num_heads, num_queries, dtype=torch.float32, device=query_SHD.device)
    wide = max(16, triton.next_power_of_2(width))
    rows, keys = (ROWS, KEYS) if wide <= 128 else (ROWS // 2, KEYS // 2)  # an accumulator of a program has a row for each
    sizes = {"GROUP": group, "ROWS": rows, "KEYS": keys, "WIDTH": wide, "LOG2_E": LOG2_E, "num_warps": 4, "num_stages": 2}
    sizes["PRECISION"] = "ieee" if query_SHD.dtype == torch.float32 else "tf32"
    strides = query_SHD.stride(0), key_XKD.stride(0), value_XKD.stride(0), by_out_SHD.stride(0)
    _differentiate_queries[(triton.cdiv(longest[0], rows), num_heads, num_texts)](
        *states, result[0], by_out_SHD, result[1], *starts, by_query_SHD, inner_HS, *strides, num_queries, width, scale, **sizes
    )
    key_blocks, query_blocks = triton.cdiv(num_keys, keys), triton.cdiv(num_queries, rows) * group
    splits = max(1, min(ENOUGH_PROGRAMS // (key_blocks * num_kv_heads), query_blocks // LEAST_BLOCKS))
    parts_2PXKD = torch.empty(2, splits, *key_XKD.shape, dtype=torch.float32, device=query_SHD.device)
    _differentiate_keys[(triton.cdiv(longest[1], keys), splits * num_kv_heads, num_texts)](
        *states, by_out_SHD, result[1], inner_HS, *starts, *parts_2PXKD, *strides, num_queries, num_keys, splits, num_kv_heads, width, scale,
        **sizes,
    )  # fmt: skip
    by_key_XKD, by_value_XKD = parts_2PXKD.sum(dim=1).to(key_XKD.dtype)
    return by_query_SHD, by_key_XKD, by_value_XKD
