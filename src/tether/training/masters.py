"""Float32 numbers in 16 bits: master weights beside the bfloat16 weights that they round to, bit for bit; moments rounded to bfloat16.

Numbers that round to the same bfloat16 follow each other, so a master weight is the rounded weight plus a difference in its last places, and the lower
half of its bits, taken as a signed number, is that difference. The exception is a number half-way between two that is rounded down, one of 131,072;
those are written down in full.

Whatever writes a checkpoint works in numpy, in its own thread alone: torch would ask its pool, which the run computes with. Each call of numpy gives
Python's lock away and waits for it, 5 ms where the run is computing in Python, so it is called for millions of numbers at once, in memory that is used
again. (In pieces that stay in the core's own cache it took a tenth less beside a run that waits, and eight times as long beside one that computes in
Python alone.)
"""

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

PIECE = 2**22
"""Numbers that are worked on at once."""

_kept = threading.local()


class LowBits(NamedTuple):
    """What makes bfloat16 weights the float32 weights that they were rounded from."""

    low: Tensor
    """int16, of the weights' shape: the lower half of their bits."""
    at: Tensor
    """The exceptions, counted through the flat tensor."""
    bits: Tensor
    """int32: what they are."""


def low_bits(master: Tensor) -> LowBits:
    """The lower halves of a float32 tensor."""
    exceptions: list[tuple[Tensor, Tensor]] = []
    low = torch.cat([piece.clone() for piece in low_pieces(master, exceptions)])
    at, bits = (torch.cat(parts) for parts in zip(*exceptions, strict=True))
    return LowBits(low.view(master.shape), at, bits)


def low_pieces(master: Tensor, exceptions: list[tuple[Tensor, Tensor]]) -> Iterator[Tensor]:
    """The lower halves in pieces, flat, each in the memory of the one before. Exceptions are added to the list: their places, and their bits."""
    bits = _bits(master)
    dtypes: tuple[type[np.generic], ...] = np.int16, np.int32, np.bool_, np.bool_
    low, masked, half_way_down, no_number = (_scratch(number, len(bits), dtype) for number, dtype in enumerate(dtypes))
    for start in range(0, max(1, len(bits)), PIECE):
        piece = bits[start : start + PIECE]
        here = slice(len(piece))
        low[here] = piece  # numpy keeps the lower half
        np.equal(np.bitwise_and(piece, 0x1FFFF, out=masked[here]), 0x8000, out=half_way_down[here])
        np.greater(np.bitwise_and(piece, 0x7FFFFFFF, out=masked[here]), 0x7F800000, out=no_number[here])
        found = np.logical_or(half_way_down[here], no_number[here], out=no_number[here]).nonzero()[0]
        exceptions.append((torch.from_numpy(found + start), torch.from_numpy(piece[found])))
        yield torch.from_numpy(low[here])


def joined(rounded: Tensor, saved: LowBits) -> Tensor:
    """The float32 tensor again."""
    assert rounded.dtype == torch.bfloat16
    low, at, bits = (part.to(rounded.device) for part in saved)
    found = (rounded.detach().contiguous().view(torch.int16).to(torch.int32) << 16).add_(low)
    found.view(-1)[at] = bits
    return found.view(torch.float32)


def in_bfloat16(numbers: Tensor) -> Iterator[Tensor]:
    """Float32 numbers rounded to the nearest bfloat16, as torch does it, in pieces, flat, each in the memory of the one before."""
    bits = _bits(numbers).view(np.uint32)
    rounded, half = _scratch(0, len(bits), np.uint16), _scratch(1, len(bits), np.uint32)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE]
        here = slice(len(piece))
        np.right_shift(piece, 16, out=half[here])
        half[here] &= 1
        half[here] += 0x7FFF
        half[here] += piece
        half[here] >>= 16
        rounded[here] = half[here]  # numpy keeps the lower half
        yield torch.from_numpy(rounded[here]).view(torch.bfloat16)


def _scratch(number: int, count: int, dtype: type[np.generic]) -> Any:
    """Memory for a piece of so many numbers. A thread keeps it and gets it again: to take new pages from the system takes longer than the work."""
    held = vars(_kept).setdefault("by_number", {})
    size = min(PIECE, count) * np.dtype(dtype).itemsize
    if number not in held or held[number].nbytes < size:
        held[number] = np.empty(size, np.uint8)
    return held[number][:size].view(dtype)


def _bits(numbers: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    flat: np.ndarray[tuple[int], np.dtype[np.int32]] = numbers.detach().cpu().contiguous().flatten().view(torch.int32).numpy()
    return flat
