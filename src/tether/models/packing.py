"""Which sequences go through the model together, so that little of what it computes is padding.

A batch is cut into micro-batches by a budget of padded tokens. Inside one, short sequences may stand behind one another in the same row:
positions that start again tell the attention where a sequence begins, and it sees nothing before that. Rows are as wide as the longest
sequence of their micro-batch, sequences are placed longest first into the first row with room, and what finds none waits for the next
micro-batch: the same lengths always give the same places. A model for which shared rows are not exact (`Policy.packs`) gets one
sequence a row. Models with a forward pass over flat tokens (`Policy.trunk`) are served by models/shared_prompt.py instead.

Shape legend: B rows of the batch, M sequences of a micro-batch, R rows and W columns of its forward pass, T tokens of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Place(NamedTuple):
    """Where a sequence stands in the forward pass of its micro-batch."""

    sequence: int
    """Its row of the batch."""
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that are computed together, in ascending order of their rows in the batch."""

    places: tuple[Place, ...]
    num_rows: int
    width: int

    @property
    def index_M(self) -> Tensor:
        """The rows of the batch in it, ascending: `batch.rows(micro.index_M)` lines up with what is computed for it."""
        return torch.tensor([place.sequence for place in self.places])

    @property
    def lengths_M(self) -> list[int]:
        return [place.length for place in self.places]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.lengths_M)

    @property
    def num_places(self) -> int:
        """Places of the forward pass, padding included."""
        return self.num_rows * self.width

    @property
    def num_saved(self) -> int:
        """Tokens that were not computed because another sequence begins with them: none, every sequence is computed whole."""
        return 0

    @property
    def shares_rows(self) -> bool:
        """Whether any row holds more than one sequence."""
        return len(self.places) > self.num_rows

    def to_padded(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and positions [R, W] of the forward pass. Padding repeats a word and goes on counting; no sequence sees it."""
        source_RW = torch.zeros(self.num_rows, self.width, dtype=torch.long)
        positions_RW = torch.zeros(self.num_rows, self.width, dtype=torch.long)
        for sequence, row, start, length in sorted(self.places, key=lambda place: place.start):
            positions_RW[row, start:] = torch.arange(self.width - start)
            source_RW[row, start : start + length] = sequence * ids_BT.shape[1] + torch.arange(length)
        return ids_BT.flatten()[source_RW.to(ids_BT.device)], positions_RW.to(ids_BT.device)


def micro_batches(lengths_B: Tensor, max_tokens: int, together: bool) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `max_tokens` padded tokens, or of one sequence where that alone is longer.

    Args:
        lengths_B: tokens of each row of the batch, padding excluded.
        max_tokens: the budget.
        together: whether sequences may share a row; ask `Policy.packs` whether the model allows it.
    """
    lengths = [int(length) for length in lengths_B.tolist()]
    return [_placed(rows, lengths) for rows in pack_rows(lengths, max_tokens, together)]


def pack_rows(lengths: Sequence[int], max_tokens: int, together: bool) -> list[list[list[int]]]:
    """Micro-batches, each a list of rows, each a list of sequences by their number.

    >>> pack_rows([3, 8, 5, 2], max_tokens=16, together=True)
    [[[1], [2, 0]], [[3]]]
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    waiting = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
    batches = []
    while waiting:
        rows, waiting = _fill(waiting, lengths, max_tokens, together)
        batches.append(rows)
    return batches


def _fill(waiting: list[int], lengths: Sequence[int], max_tokens: int, together: bool) -> tuple[list[list[int]], list[int]]:
    """The rows of one micro-batch, and who must wait for the next."""
    width = lengths[waiting[0]]
    most_rows = max(1, max_tokens // max(1, width))
    rows: list[list[int]] = []
    room: list[int] = []
    left = []
    for number in waiting:
        row = next((r for r, free in enumerate(room) if free >= lengths[number]), None) if together else None
        if row is not None:
            rows[row].append(number)
            room[row] -= lengths[number]
        elif len(rows) < most_rows:
            rows.append([number])
            room.append(width - lengths[number])
        else:
            left.append(number)
    return rows, left


def _placed(rows: list[list[int]], lengths: Sequence[int]) -> MicroBatch:
    places = []
    for row, numbers in enumerate(rows):
        start = 0
        for number in numbers:
            places.append(Place(number, row, start, lengths[number]))
            start += lengths[number]
    return MicroBatch(tuple(sorted(places)), len(rows), max(place.length for place in places))
