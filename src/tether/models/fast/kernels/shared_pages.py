"""Attention of new tokens to pages that several texts share, read once for all of them.

Members of a group begin with the same prompt, whose full pages they share in the cache. The queries of some members (a block) are rows of one product, so
a page is read once a block instead of once a text. What is left for every query is the state of a running softmax; `attend_new_tokens` continues from
it with the pages that the text has alone.

Shape legend: S new tokens of all texts, B texts, N blocks, M texts of a block, X pages of a text, H query heads, K key heads, D width of a head.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.chaining import launch_options, start_next

BLOCK_ROWS = 128
"""Queries of a block."""
MOST_MEMBERS = 16
MORE_BLOCKS = 8
"""Than full ones: members of a group that have ended leave blocks that are not full."""
SPLITS = 8
"""Programs that share the pages of a block and a key head: there are few blocks, and a program takes as long as its pages are many."""
LEAST_SHARING_ROWS = 96
"""Rows of a step in which shared pages are read for several of them at once: with fewer, attention takes little time either way."""
LEAST_SAVED = 1
"""Pages a row that are not read again, in the mean: with fewer, a second kernel takes longer than it saves."""


class SharedPages(NamedTuple):
    """Which texts of a step read pages together; int32, on the device."""

    members_NM: Tensor
    """The texts of each block, its first one in front; -1 where there is none."""
    pages_N: Tensor
    """How many pages they share, which are their first ones; 0 for a block that is not used."""
    read_B: Tensor
    """How many pages of each text its block reads."""

    @classmethod
    def within(cls, flat: Tensor, num_texts: int, num_members: int) -> "SharedPages":
        """The parts of the numbers of `find_shared`."""
        members, pages, read = flat.split([(size := num_blocks(num_texts, num_members)) * num_members, size, num_texts])
        return cls(members.view(size, num_members), pages, read)


class Softmax(NamedTuple):
    """A softmax under way for every query, in SPLITS parts: mixed values [parts x S x H, D], the highest score and the sum behind it [parts x S x H, 2]."""

    mixed: Tensor
    sums: Tensor


def members_of_block(num_heads: int, num_kv_heads: int, most_new: int) -> int:
    """Texts whose queries make a block, where each has so many new tokens at most; with one there is nothing to share."""
    rows = triton.next_power_of_2(most_new) * triton.next_power_of_2(num_heads // num_kv_heads)
    return max(1, min(MOST_MEMBERS, BLOCK_ROWS // rows))


def num_blocks(num_texts: int, num_members: int) -> int:
    """The most blocks of a step."""
    return num_texts // num_members + MORE_BLOCKS


def nothing_shared(num_texts: int, num_members: int) -> npt.NDArray[np.int32]:
    """What `SharedPages.within` reads, of texts that read all pages by themselves."""
    size = num_blocks(num_texts, num_members)
    return np.repeat(np.array([-1, 0], dtype=np.int32), [size * num_members, size + num_texts])


def find_shared(tables_BX: npt.NDArray[np.int32], num_texts: int, num_members: int) -> npt.NDArray[np.int32] | None:
    """What `SharedPages.within` reads, of texts with these pages, filled up to so many texts; None where too little is shared."""
    size = num_blocks(num_texts, num_members)
    flat = nothing_shared(num_texts, num_members)
    members, pages, read = np.split(flat, [size * num_members, size * num_members + size])
    order = np.argsort(tables_BX[:, 0], kind="stable")
    alike = np.split(order, np.flatnonzero(np.diff(tables_BX[order, 0])) + 1)
    number = saved = 0
    for texts in sorted(alike, key=len, reverse=True):
        if len(texts) == 1:
            break
        same_X = (tables_BX[texts] == tables_BX[texts[0]]).all(axis=0) & (tables_BX[texts[0]] > 0)  # page 0 stands behind the last one
        count = len(same_X) if same_X.all() else int(same_X.argmin())
        for start in range(0, len(texts) - 1, num_members):
            if number == size:
                break
            block = texts[start : start + num_members]
            first = number * num_members
            members[first : first + len(block)], pages[number], read[block] = block, count, count
            saved += (len(block) - 1) * count
            number += 1
    return flat if saved >= LEAST_SAVED * len(tables_BX) else None


@triton.jit
def rotated(first, second, cos, sin, dtype: tl.constexpr):
    """Two halves turned by a position, rounded as the module rounds them."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _attend_shared(
    query_ptr, key_cache_ptr, value_cache_ptr, tables_ptr, lengths_ptr, firsts_ptr, counts_ptr, shifts_ptr, cos_ptr, sin_ptr, members_ptr, pages_ptr,
    part_ptr, sums_ptr, query_stride, table_stride, num_heads, num_kv_heads, half, scale_log2, num_tokens,
    RAGGED: tl.constexpr, SHIFTED: tl.constexpr, MEMBERS: tl.constexpr, NEW_ROWS: tl.constexpr, GROUP: tl.constexpr, GROUP_ROWS: tl.constexpr,
    ROWS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    block, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start_next(CHAINED)
    dtype: tl.constexpr = query_ptr.dtype.element_ty
    num_pages = tl.load(pages_ptr + block)
    each = tl.cdiv(num_pages, SPLITS)
    if split * each < num_pages:
        width = 2 * half
        row, offset = tl.arange(0, ROWS), tl.arange(0, PAGE)
        turn, column = tl.arange(0, HALF), tl.arange(0, WIDTH)
        in_half, in_width = turn < half, column < width
        member, token, head = row // (NEW_ROWS * GROUP_ROWS), row // GROUP_ROWS % NEW_ROWS, row % GROUP_ROWS
        text = tl.load(members_ptr + block * MEMBERS + member, mask=member < MEMBERS, other=-1).to(tl.int64)
        is_member = text >= 0
        text = tl.maximum(text, 0)
        if RAGGED:
            first_new, num_new = tl.load(firsts_ptr + text).to(tl.int64), tl.load(counts_ptr + text)
        else:
            first_new, num_new = text, token * 0 + 1
        is_query = is_member & (token < num_new) & (head < GROUP)
        position = tl.load(lengths_ptr + text) - num_new + tl.minimum(token, num_new - 1)
        if SHIFTED:
            position = tl.maximum(position + tl.load(shifts_ptr + text), 0)
        angle = position.to(tl.int64)[:, None] * half + turn[None, :]
        there = is_query[:, None] & in_half[None, :]
        cos = tl.load(cos_ptr + angle, mask=there, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + angle, mask=there, other=0.0).to(tl.float32)
        rows = query_ptr + (first_new + token)[:, None] * query_stride + (kv_head * GROUP + head)[:, None] * width + turn[None, :]
        query_a, query_b = rotated(tl.load(rows, mask=there, other=0.0), tl.load(rows + half, mask=there, other=0.0), cos, sin, dtype)
        table = tables_ptr + tl.load(members_ptr + block * MEMBERS).to(tl.int64) * table_stride
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        mixed = tl.zeros([ROWS, WIDTH], tl.float32)
        for index in range(split * each, tl.minimum((split + 1) * each, num_pages)):
            page = tl.load(table + index).to(tl.int64)
            lines = (page * num_kv_heads + kv_head) * PAGE * width + offset[:, None] * width
            keys = key_cache_ptr + lines + turn[None, :]
            scores = tl.dot(query_a, tl.trans(tl.load(keys, mask=in_half[None, :], other=0.0)), input_precision=PRECISION)
            scores = tl.dot(query_b, tl.trans(tl.load(keys + half, mask=in_half[None, :], other=0.0)), scores, input_precision=PRECISION)
            scores = scores * scale_log2
            higher = tl.maximum(best, tl.max(scores, axis=1))  # every query sees every position of a shared page
            shares = tl.exp2(scores - higher[:, None])
            shrink = tl.exp2(best - higher)
            total = total * shrink + tl.sum(shares, axis=1)
            value = tl.load(value_cache_ptr + lines + column[None, :], mask=in_width[None, :], other=0.0)
            mixed = mixed * shrink[:, None] + tl.dot(shares.to(dtype), value, input_precision=PRECISION)
            best = higher
        number = (split * num_tokens + first_new + token) * num_heads + kv_head * GROUP + head
        tl.store(part_ptr + number[:, None] * WIDTH + column[None, :], mixed, mask=is_query[:, None])
        tl.store(sums_ptr + number * 2, best, mask=is_query)
        tl.store(sums_ptr + number * 2 + 1, total, mask=is_query)


def attend_shared_pages(
    query_SHD: Tensor,
    caches: tuple[Tensor, Tensor],
    tables_BX: Tensor,
    lengths_B: Tensor,
    angles: tuple[Tensor, Tensor],
    scale: float,
    shared: SharedPages,
    ragged: tuple[Tensor, Tensor, int] | None,
    shifts_B: Tensor | None,
) -> Softmax:
    """The softmax of new tokens over the pages that their texts share; arguments as those of `attend_new_tokens`."""
    num_tokens, num_heads, width = query_SHD.shape
    num_kv_heads, page = caches[0].shape[1], caches[0].shape[2]
    firsts_B, counts_B, most_new = ragged or (lengths_B, lengths_B, 1)
    size, num_members = shared.members_NM.shape
    new_rows, group_rows = triton.next_power_of_2(most_new), triton.next_power_of_2(num_heads // num_kv_heads)
    rows, wide = max(16, num_members * new_rows * group_rows), max(16, triton.next_power_of_2(width))
    mixed = torch.empty(SPLITS * num_tokens * num_heads, wide, dtype=torch.float32, device=query_SHD.device)
    sums = torch.empty(len(mixed), 2, dtype=torch.float32, device=query_SHD.device)
    full = query_SHD.dtype == torch.float32
    _attend_shared[(size, num_kv_heads, SPLITS)](
        query_SHD, *caches, tables_BX, lengths_B, firsts_B, counts_B, lengths_B if shifts_B is None else shifts_B, *angles, shared.members_NM,
        shared.pages_N, mixed, sums, query_SHD.stride(0), tables_BX.stride(0), num_heads, num_kv_heads, width // 2, scale * 1.4426950408889634, num_tokens,
        RAGGED=ragged is not None, SHIFTED=shifts_B is not None, MEMBERS=num_members, NEW_ROWS=new_rows, GROUP=num_heads // num_kv_heads,
        GROUP_ROWS=group_rows, ROWS=rows, HALF=max(16, triton.next_power_of_2(width // 2)), WIDTH=wide, PAGE=page, SPLITS=SPLITS,
        PRECISION="ieee" if full else "tf32", num_warps=4 if rows <= 64 else 8, num_stages=2,
        CHAINED=launch_options(query_SHD.device)["CHAINED"],
    )  # fmt: skip
    return Softmax(mixed, sums)
