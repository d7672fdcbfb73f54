"""Attention kernels without gradient: over a paged cache (decoder), and over texts in a row that continue stored prefixes (scorer).

Paged: the new tokens are at the end of their texts. A program takes some queries of one text and one key head (a block, see `text_blocks`), and
reads that text's pages up to the last position its queries may see.

New tokens: a step of decoding has one new token a text, one that verifies drafts a few, not as many for each. One kernel puts their positions into queries and keys,
writes keys and values to the cache, and attends. Where texts are too few to fill the GPU, the pages of each are split among programs; the one that
arrives last adds up the parts.

Texts: a query sees all of its text's prefix, then its own text up to itself. Both go into one softmax; nothing is copied or padded.

In all of them, the query heads that share a key head are rows of the same block, so keys and values are read once for all of them.

Shape legend: S new tokens of all texts, B texts, N blocks, X pages of a text or tokens of all prefixes, H query heads, K key heads, D width of a head,
G = H / K.
"""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.chaining import launch_options, wait_for_inputs
from tether.models.fast.kernels.products import MOST_ROWS

ENOUGH_PROGRAMS = 264
"""Two for each multiprocessor of the largest cards."""
MOST_SPLITS = 16
PROMPT_ROWS = 128
NO_BLOCK = 1 << 20
"""The number of a block that no text reaches."""
ALIGNED = 4
"""Places of numbers of 4 bytes that callers keep to: the compiler makes another kernel, in a second, for pointers that are no multiple of 16 bytes."""


@triton.jit(do_not_specialize=["table_stride"])  # one kernel for all sizes of a batch
def _attend_pages(
    query_ptr, key_ptr, value_ptr, tables_ptr, starts_ptr, lengths_ptr, blocks_ptr, out_ptr,
    query_stride, out_stride, table_stride, num_kv_heads, width, scale_log2,
    GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    text, block, kv_head = tl.load(blocks_ptr + 2 * tl.program_id(0)), tl.load(blocks_ptr + 2 * tl.program_id(0) + 1), tl.program_id(1)
    first_token = tl.load(starts_ptr + text)
    num_new = tl.load(starts_ptr + text + 1) - first_token
    length = tl.load(lengths_ptr + text)  # positions filled, the new ones included
    token = block * (ROWS // GROUP_ROWS) + tl.arange(0, ROWS) // GROUP_ROWS
    head = tl.arange(0, ROWS) % GROUP_ROWS
    is_query = (token < num_new) & (head < GROUP)
    if block * (ROWS // GROUP_ROWS) < num_new:
        column = tl.arange(0, WIDTH)
        in_width = column < width
        rows = (first_token + token).to(tl.int64) * query_stride + (kv_head * GROUP + head) * width
        query = tl.load(query_ptr + rows[:, None] + column[None, :], mask=is_query[:, None] & in_width[None, :], other=0.0)
        position = length - num_new + token
        visible = tl.minimum(length, length - num_new + (block + 1) * (ROWS // GROUP_ROWS))
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        offset = tl.arange(0, PAGE)
        for index in range(0, tl.cdiv(visible, PAGE)):
            page = tl.load(tables_ptr + text.to(tl.int64) * table_stride + index).to(tl.int64)
            base = (page * num_kv_heads + kv_head) * PAGE * width
            place = base + offset[:, None] * width + column[None, :]
            there = (index * PAGE + offset < length)[:, None] & in_width[None, :]
            key = tl.load(key_ptr + place, mask=there, other=0.0)
            scores = tl.dot(query, tl.trans(key), input_precision=PRECISION) * scale_log2
            seen = (index * PAGE + offset)[None, :] <= position[:, None]
            scores = tl.where(seen, scores, float("-inf"))
            higher = tl.maximum(best, tl.max(scores, axis=1))
            safe = tl.where(higher == float("-inf"), 0.0, higher)
            shares = tl.exp2(scores - safe[:, None])
            shrink = tl.exp2(best - safe)
            total = total * shrink + tl.sum(shares, axis=1)
            value = tl.load(value_ptr + place, mask=there, other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(shares.to(value.dtype), value, input_precision=PRECISION)
            best = higher
        out = mixed / total[:, None]
        target = (first_token + token).to(tl.int64) * out_stride + (kv_head * GROUP + head) * width
        tl.store(out_ptr + target[:, None] + column[None, :], out.to(query.dtype), mask=is_query[:, None] & in_width[None, :])


def block_tokens(num_heads: int, num_kv_heads: int) -> int:
    """New tokens of a text that one program of `paged_attention` takes."""
    group_rows = triton.next_power_of_2(num_heads // num_kv_heads)
    return max(PROMPT_ROWS, group_rows) // group_rows


def num_blocks(num_tokens: int, num_texts: int, tokens_each: int) -> int:
    """The most blocks that so many texts with so many new tokens in all can have."""
    return num_tokens // tokens_each + num_texts


def text_blocks(num_new_B: npt.NDArray[np.int64], size: int, tokens_each: int) -> npt.NDArray[np.int64]:
    """[N, 2]: the text of every block and its number there, filled up to `size` with blocks behind the end of the first text."""
    blocks_B = -(-num_new_B // tokens_each)
    texts = np.repeat(np.arange(len(num_new_B)), blocks_B)
    numbers = np.arange(len(texts)) - np.repeat(np.cumsum(blocks_B) - blocks_B, blocks_B)
    unused = np.full((size - len(texts), 2), [0, NO_BLOCK])
    return np.concatenate([np.stack([texts, numbers], axis=1), unused])


def paged_attention(
    query_SHD: Tensor,
    caches: tuple[Tensor, Tensor],
    tables_BX: Tensor,
    starts_B1: Tensor,
    lengths_B: Tensor,
    blocks_N2: Tensor,
    scale: float,
    out_SHD: Tensor | None = None,
) -> Tensor:
    """[S, H, D] contiguous.

    Args:
        query_SHD: the new tokens of all texts, one text after another; heads side by side, tokens may stand apart.
        caches: keys and values [pages, K, page, D], the new tokens' already written.
        tables_BX: the pages of each text, in order (int32).
        starts_B1: where each text's new tokens begin among all, and their number at the end, B + 1 in all (int32).
        lengths_B: how many positions each text fills, the new ones included (int32).
        blocks_N2: which new tokens each program takes, as `text_blocks` has them (int32).
        scale: of the scores.
        out_SHD: where the result goes; a new tensor if not given. Tokens that belong to no text are left as they are, there zero.
    """
    num_tokens, num_heads, width = query_SHD.shape
    num_kv_heads, page = caches[0].shape[1], caches[0].shape[2]
    group = num_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    rows = max(PROMPT_ROWS, group_rows)
    if out_SHD is None:
        out_SHD = torch.zeros(num_tokens, num_heads, width, dtype=query_SHD.dtype, device=query_SHD.device)
    full = query_SHD.dtype == torch.float32
    _attend_pages[(len(blocks_N2), num_kv_heads)](
        query_SHD, *caches, tables_BX, starts_B1, lengths_B, blocks_N2, out_SHD,
        query_SHD.stride(0), out_SHD.stride(0), tables_BX.stride(0), num_kv_heads, width, scale * 1.4426950408889634,
        GROUP=group, GROUP_ROWS=group_rows, ROWS=rows, WIDTH=max(16, triton.next_power_of_2(width)), PAGE=page,
        PRECISION="ieee" if full else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    return out_SHD


@triton.jit
def _rotated(first, second, cos, sin, dtype: tl.constexpr):
    """Two halves turned by a position, rounded as the module rounds them."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _attend_new_tokens(
    query_ptr, key_ptr, value_ptr, key_cache_ptr, value_cache_ptr, tables_ptr, lengths_ptr, firsts_ptr, counts_ptr, shifts_ptr, cos_ptr, sin_ptr,
    out_ptr, part_ptr, sums_ptr, arrived_ptr,
    query_stride, key_stride, value_stride, table_stride, num_heads, num_kv_heads, half, scale_log2, num_tokens,
    RAGGED: tl.constexpr, SHIFTED: tl.constexpr, NEW_ROWS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    text, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    length = tl.load(lengths_ptr + text)
    if RAGGED:  # where the new tokens of a text begin among all, and how many they are
        first_new, num_new = tl.load(firsts_ptr + text).to(tl.int64), tl.load(counts_ptr + text)
    else:
        first_new, num_new = text, 1
    width = 2 * half
    row, offset = tl.arange(0, ROWS), tl.arange(0, PAGE)
    token, head = row // GROUP_ROWS, row % GROUP_ROWS
    turn, column = tl.arange(0, HALF), tl.arange(0, WIDTH)
    in_half, in_width, is_query = turn < half, column < width, (token < num_new) & (head < GROUP)
    position = length - num_new + tl.minimum(token, num_new - 1)
    if SHIFTED:  # rows that fill up a batch have places, too
        shift = tl.load(shifts_ptr + text)
        angle = tl.maximum(position + shift, 0).to(tl.int64)[:, None] * half + turn[None, :]
    else:
        angle = position.to(tl.int64)[:, None] * half + turn[None, :]
    cos = tl.load(cos_ptr + angle, mask=in_half[None, :], other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=in_half[None, :], other=0.0).to(tl.float32)
    num_pages = tl.cdiv(length, PAGE)
    each = tl.cdiv(num_pages, SPLITS)
    new = tl.arange(0, NEW_ROWS)
    at = length - num_new + new
    is_mine = (new < num_new) & (
        split == at // PAGE // each
    )  # this program reads the page, and no other does: it writes the new tokens there
    new_page = tl.load(tables_ptr + text * table_stride + at // PAGE, mask=is_mine, other=0).to(tl.int64)
    target = ((new_page * num_kv_heads + kv_head) * PAGE + at % PAGE)[:, None] * width
    half_mine, all_mine = is_mine[:, None] & in_half[None, :], is_mine[:, None] & in_width[None, :]
    if SHIFTED:
        new_angle = tl.maximum(at + shift, 0).to(tl.int64)[:, None] * half + turn[None, :]
    else:
        new_angle = at.to(tl.int64)[:, None] * half + turn[None, :]
    new_cos = tl.load(cos_ptr + new_angle, mask=half_mine, other=0.0).to(tl.float32)
    new_sin = tl.load(sin_ptr + new_angle, mask=half_mine, other=0.0).to(tl.float32)
    wait_for_inputs(CHAINED)
    rows = query_ptr + (first_new + token)[:, None] * query_stride + (kv_head * GROUP + head)[:, None] * width + turn[None, :]
    there = is_query[:, None] & in_half[None, :]
    query_a, query_b = _rotated(tl.load(rows, mask=there, other=0.0), tl.load(rows + half, mask=there, other=0.0), cos, sin, dtype)
    new_keys = key_ptr + (first_new + new)[:, None] * key_stride + kv_head * width + turn[None, :]
    new_a, new_b = _rotated(
        tl.load(new_keys, mask=half_mine, other=0.0), tl.load(new_keys + half, mask=half_mine, other=0.0), new_cos, new_sin, dtype
    )
    tl.store(key_cache_ptr + target + turn[None, :], new_a, mask=half_mine)
    tl.store(key_cache_ptr + target + half + turn[None, :], new_b, mask=half_mine)
    new_values = value_ptr + (first_new + new)[:, None] * value_stride + kv_head * width + column[None, :]
    tl.store(value_cache_ptr + target + column[None, :], tl.load(new_values, mask=all_mine, other=0.0), mask=all_mine)
    if split >= (length - num_new) // PAGE // each:
        tl.debug_barrier()  # the loop below reads what other threads of this program have written
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for index in range(split * each, tl.minimum((split + 1) * each, num_pages)):
        page = tl.load(tables_ptr + text * table_stride + index).to(tl.int64)
        lines = (page * num_kv_heads + kv_head) * PAGE * width + offset[:, None] * width
        filled = (index * PAGE + offset < length)[:, None]
        keys = key_cache_ptr + lines + turn[None, :]
        key_a = tl.load(keys, mask=filled & in_half[None, :], other=0.0)
        key_b = tl.load(keys + half, mask=filled & in_half[None, :], other=0.0)
        scores = tl.dot(query_a, tl.trans(key_a), input_precision=PRECISION)
        scores = tl.dot(query_b, tl.trans(key_b), scores, input_precision=PRECISION) * scale_log2
        scores = tl.where((index * PAGE + offset)[None, :] <= position[:, None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, axis=1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)  # a page may lie behind the first new tokens
        shares = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(shares, axis=1)
        value = tl.load(value_cache_ptr + lines + column[None, :], mask=filled & in_width[None, :], other=0.0)
        mixed = mixed * shrink[:, None] + tl.dot(shares.to(dtype), value, input_precision=PRECISION)
        best = higher
    first = (first_new + token) * num_heads + kv_head * GROUP + head
    out = out_ptr + first[:, None] * width + column[None, :]
    whole = is_query[:, None] & in_width[None, :]
    if SPLITS == 1:
        tl.store(out, (mixed / total[:, None]).to(dtype), mask=whole)
    else:
        stride = num_tokens * num_heads
        number = split * stride + first
        tl.store(part_ptr + number[:, None] * WIDTH + column[None, :], mixed, mask=is_query[:, None])
        tl.store(sums_ptr + number * 2, best, mask=is_query)
        tl.store(sums_ptr + number * 2 + 1, total, mask=is_query)
        tl.debug_barrier()
        # The program that arrives last adds up the parts of all, in their order: no second kernel, and the same bits every time.
        if tl.atomic_add(arrived_ptr + text * num_kv_heads + kv_head, 1, sem="acq_rel") == SPLITS - 1:
            # No load waits for another: each takes as long as a page of keys.
            places = tl.arange(0, SPLITS)[:, None] * stride + first[None, :]
            best = tl.max(tl.load(sums_ptr + places * 2, mask=is_query[None, :], other=0.0, cache_modifier=".cg"), axis=0)
            total = tl.zeros([ROWS], tl.float32)
            mixed = tl.zeros([ROWS, WIDTH], tl.float32)
            for part in tl.static_range(SPLITS):
                place = part * stride + first
                part_best = tl.load(sums_ptr + place * 2, mask=is_query, other=0.0, cache_modifier=".cg")
                grow = tl.exp2(part_best - best)  # a part that saw nothing has -inf, and no weight
                total += grow * tl.load(sums_ptr + place * 2 + 1, mask=is_query, other=1.0, cache_modifier=".cg")
                part_mixed = tl.load(
                    part_ptr + place[:, None] * WIDTH + column[None, :], mask=is_query[:, None], other=0.0, cache_modifier=".cg"
                )
                mixed += grow[:, None] * part_mixed
            tl.store(out, (mixed / total[:, None]).to(dtype), mask=whole)
            tl.store(arrived_ptr + text * num_kv_heads + kv_head, 0)


def attend_new_tokens(
    states: tuple[Tensor, Tensor, Tensor],
    caches: tuple[Tensor, Tensor],
    tables_BX: Tensor,
    lengths_B: Tensor,
    angles: tuple[Tensor, Tensor],
    scale: float,
    arrived: Tensor,
    out_SHD: Tensor | None = None,
    *,
    ragged: tuple[Tensor, Tensor, int] | None = None,
    shifts_B: Tensor | None = None,
    chained: bool = True,
) -> Tensor:
    """[S, H, D] contiguous: new tokens, one or a few for each text, in one kernel: positions, cache, attention, sum of the splits.

    Args:
        states: queries, keys and values of the new tokens, one text after another, before positions; the heads of a token stand beside each other.
        caches: keys and values [pages, K, page, D]; the new tokens' are written here.
        tables_BX: the pages of each text, in order (int32).
        lengths_B: how many positions each text fills, the new ones included (int32).
        angles: cosines and sines of every position, [P, D / 2].
        scale: of the scores.
        arrived: at least B x K zeros (int32), to count programs in; they are zeros again afterwards.
        out_SHD: where the result goes; a new tensor if not given.
        ragged: where each text's new tokens begin among all, how many they are (int32, at least one), and how many one has at most. None:
            every text has one. Of tokens that belong to no text nothing is written.
        shifts_B: how far the places of each text's new tokens lie from their positions (int32); None: nowhere.
        chained: whether it may start before the kernel before it has ended, if tokens are few.
    """
    query_SHD, key_SKD, value_SKD = states
    num_texts, (num_tokens, num_heads, width) = len(lengths_B), query_SHD.shape
    firsts_B, counts_B, most_new = ragged or (lengths_B, lengths_B, 1)
    num_kv_heads, page = caches[0].shape[1], caches[0].shape[2]
    group = num_heads // num_kv_heads
    group_rows = triton.next_power_of_2(group)
    wide = max(16, triton.next_power_of_2(width))
    new_rows = triton.next_power_of_2(most_new)
    rows = max(16, new_rows * group_rows)
    # The program that adds up the parts does so alone: the more rows they have, the fewer they should be.
    most_splits = max(1, MOST_SPLITS * 16 // rows)
    splits = min(most_splits, triton.next_power_of_2(max(1, ENOUGH_PROGRAMS // (num_texts * num_kv_heads))))
    if out_SHD is None:
        out_SHD = torch.empty(num_tokens, num_heads, width, dtype=query_SHD.dtype, device=query_SHD.device)
    size = splits * num_tokens * num_heads if splits > 1 else 0
    parts = torch.empty(size, wide, dtype=torch.float32, device=query_SHD.device)
    sums = torch.empty(size, 2, dtype=torch.float32, device=query_SHD.device)
    full = query_SHD.dtype == torch.float32
    _attend_new_tokens[(num_texts, num_kv_heads, splits)](
        query_SHD, key_SKD, value_SKD, *caches, tables_BX, lengths_B, firsts_B, counts_B, lengths_B if shifts_B is None else shifts_B, *angles, out_SHD, parts, sums, arrived,
        query_SHD.stride(0), key_SKD.stride(0), value_SKD.stride(0), tables_BX.stride(0), num_heads, num_kv_heads, width // 2,
        scale * 1.4426950408889634, num_tokens,
        RAGGED=ragged is not None, SHIFTED=shifts_B is not None, NEW_ROWS=new_rows, GROUP=group, GROUP_ROWS=group_rows, ROWS=rows,
        HALF=max(16, triton.next_power_of_2(width // 2)), WIDTH=wide, PAGE=page,
        SPLITS=splits, PRECISION="ieee" if full else "tf32", num_warps=4, num_stages=2 if full else 3,
        # behind the library's products, an early start costs a little
        **(launch_options(query_SHD.device) if chained and num_tokens <= MOST_ROWS else {"CHAINED": False}),
    )  # fmt: skip
    return out_SHD


TEXT_ROWS = 128
TEXT_KEYS = 64


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
def _attend_texts(
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
    rows = max(TEXT_ROWS, group_rows)
    num_texts = len(starts_B1) - 1
    if prefix is None:
        prefix = key_SKD, key_SKD, torch.zeros(num_texts, 2, dtype=torch.int32, device=query_SHD.device)
    out_SHD = torch.empty(num_tokens, num_heads, width, dtype=query_SHD.dtype, device=query_SHD.device)
    full = query_SHD.dtype == torch.float32
    _attend_texts[(triton.cdiv(most_tokens, rows // group_rows), num_kv_heads, num_texts)](
        query_SHD, key_SKD, value_SKD, *prefix[:2], starts_B1, prefix[2], out_SHD,
        query_SHD.stride(0), key_SKD.stride(0), value_SKD.stride(0), prefix[0].stride(0), out_SHD.stride(0), width, scale * 1.4426950408889634,
        GROUP=group, GROUP_ROWS=group_rows, ROWS=rows, KEYS=TEXT_KEYS, WIDTH=max(16, triton.next_power_of_2(width)),
        PRECISION="ieee" if full else "tf32", num_warps=8, num_stages=2,
    )  # fmt: skip
    return out_SHD
