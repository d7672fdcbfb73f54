"""Float32 numbers in 16 bits: master weights beside the bfloat16 weights that they round to, bit for bit; moments rounded to bfloat16.

Numbers that round to the same bfloat16 follow each other, so a master weight is the rounded weight plus a difference in its last places, and the lower
half of its bits, taken as a signed number, is that difference. The exception is a number half-way between two that is rounded down, one of 131,072;
those are written down in full.

Whatever writes a checkpoint works in numpy, in its own thread alone: torch would ask its pool, which the run computes with.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

PIECE = 2**17
"""Numbers that are worked on at once: they stay in the core's own cache. Of a million the rounding takes four times as long."""


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
    bits = _bits(master)
    low = bits.astype(np.int16)  # numpy keeps the lower half
    found = []
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE]
        half_way_down = (piece & 0x1FFFF) == 0x8000
        no_number = (piece & 0x7FFFFFFF) > 0x7F800000
        found.append(start + (half_way_down | no_number).nonzero()[0])
    at = np.concatenate(found) if found else np.empty(0, np.int64)
    return LowBits(torch.from_numpy(low).view(master.shape), torch.from_numpy(at), torch.from_numpy(bits[at]))


def joined(rounded: Tensor, saved: LowBits) -> Tensor:
    """The float32 tensor again."""
    assert rounded.dtype == torch.bfloat16
    low, at, bits = (part.to(rounded.device) for part in saved)
    found = (rounded.detach().contiguous().view(torch.int16).to(torch.int32) << 16).add_(low)
    found.view(-1)[at] = bits
    return found.view(torch.float32)


def in_bfloat16(numbers: Tensor) -> Tensor:
    """Float32 numbers rounded to the nearest bfloat16, as torch does it."""
    bits = _bits(numbers).view(np.uint32)
    rounded, scratch = np.empty(len(bits), np.uint16), np.empty(min(PIECE, len(bits)), np.uint32)
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE]
        half = np.right_shift(piece, 16, out=scratch[: len(piece)])
        half &= 1
        half += 0x7FFF
        half += piece
        rounded[start : start + PIECE] = np.right_shift(half, 16, out=half)
    return torch.from_numpy(rounded).view(torch.bfloat16).view(numbers.shape)


def _bits(numbers: Tensor) -> "np.ndarray[tuple[int], np.dtype[np.int32]]":
    flat: np.ndarray[tuple[int], np.dtype[np.int32]] = numbers.detach().cpu().contiguous().flatten().view(torch.int32).numpy()
    return flat
