"""Which sequences of a batch go through the model together, so that little of what it computes is padding or computed twice.

A batch is cut into micro-batches by a budget of tokens. There are two kinds, with the same interface:

- `MicroBatch`: padded rows for the module's own code. Short sequences may share a row: positions that start again tell the attention
  where a sequence begins, and it sees nothing before that. Rows are as wide as the longest sequence of their micro-batch; sequences are placed
  longest first into the first row with room. A model for which shared rows are not exact (`Policy.supports_packing`) gets one sequence a row.
- `FlatBatch`: one row without padding for the Llama family's forward pass (`Policy.backbone`), in which a common prefix of several
  sequences stands once. A `Run` is a set of sequences with a common prefix; its tokens are computed once and every member's own tokens
  continue it. Sorted by their ids, sequences with a common prefix are neighbours; dynamic programming finds the cut of that order into runs
  that saves most. Runs are put into micro-batches by the tokens they cost, largest first; a run that costs more than the budget is cut, and
  each piece computes the prefix for itself. The row holds the shared prefixes first, then their continuations in the same order, then
  sequences that share nothing: so everything the attention needs is a contiguous range of the row (fast/packed_attention.py).

The same lengths and ids always give the same micro-batches.

Shape legend: B rows of the batch, M sequences of a micro-batch, R rows and W columns of padded rows, S tokens of a flat row, T tokens of a
sequence, N selected tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tether.models.fast.packed_attention import PackedAttention


class RowSlice(NamedTuple):
    """Where a sequence stands in the forward pass of its micro-batch."""

    sequence: int
    """Its row of the batch."""
    row: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Sequences that are computed together, in ascending order of their rows in the batch."""

    slices: tuple[RowSlice, ...]
    num_rows: int
    width: int

    @property
    def index_M(self) -> Tensor:
        """The rows of the batch in it, ascending: `batch.rows(micro.index_M)` lines up with what is computed for it."""
        return torch.tensor([part.sequence for part in self.slices])

    @property
    def lengths_M(self) -> list[int]:
        return [part.length for part in self.slices]

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.lengths_M)

    @property
    def num_positions(self) -> int:
        """Positions of the forward pass, padding included."""
        return self.num_rows * self.width

    @property
    def num_pairs(self) -> int:
        """Positions that these tokens look at, their own included."""
        return sum(length * (length + 1) // 2 for length in self.lengths_M)

    @property
    def num_saved(self) -> int:
        """Tokens that were not computed because another sequence begins with them: none, every sequence is computed whole."""
        return 0

    @property
    def shares_rows(self) -> bool:
        """Whether any row holds more than one sequence."""
        return len(self.slices) > self.num_rows

    def to_padded(self, ids_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Ids and positions [R, W] of the forward pass. Padding repeats a word and goes on counting; no sequence sees it."""
        source_RW = torch.zeros(self.num_rows, self.width, dtype=torch.long)
        positions_RW = torch.zeros(self.num_rows, self.width, dtype=torch.long)
        for sequence, row, start, length in sorted(self.slices, key=lambda part: part.start):
            positions_RW[row, start:] = torch.arange(self.width - start)
            source_RW[row, start : start + length] = sequence * ids_BT.shape[1] + torch.arange(length)
        return ids_BT.flatten()[source_RW.to(ids_BT.device)], positions_RW.to(ids_BT.device)


def micro_batches(lengths_B: Tensor, max_tokens: int, together: bool) -> list[MicroBatch]:
    """Cut a batch into micro-batches of at most `max_tokens` padded tokens, or of one sequence where that alone is longer.

    Args:
        lengths_B: tokens of each row of the batch, padding excluded.
        max_tokens: the budget.
        together: whether sequences may share a row; ask `Policy.supports_packing` whether the model allows it.
    """
    lengths = [int(length) for length in lengths_B.tolist()]
    batches = []
    for rows in pack_rows(lengths, max_tokens, together):
        slices = []
        for row, numbers in enumerate(rows):
            start = 0
            for number in numbers:
                slices.append(RowSlice(number, row, start, lengths[number]))
                start += lengths[number]
        batches.append(MicroBatch(tuple(sorted(slices)), len(rows), max(part.length for part in slices)))
    return batches


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
    """The rows of one micro-batch, and the sequences that wait for the next."""
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


MIN_SHARED = 64
"""A beginning shorter than this is not worth the second attention call of every layer."""
Ints = npt.NDArray[np.int64]


class Run(NamedTuple):
    """Sequences, by their rows of the batch, whose first `shared` tokens are the same."""

    members: tuple[int, ...]
    shared: int


class Layout(NamedTuple):
    """Where everything stands in the row."""

    text_lengths: list[int]
    prompt_lengths: list[int]
    follower_lengths: list[int]
    begins_M: Ints
    """Where the shared beginning of each sequence stands."""
    shared_M: Ints
    own_M: Ints
    """Where its own tokens do."""


@dataclass(frozen=True)
class FlatBatch:
    """Sequences that are computed together, in one row."""

    runs: tuple[Run, ...]
    lengths: dict[int, int]
    """Tokens of each sequence."""

    @cached_property
    def sequences(self) -> tuple[int, ...]:
        """Rows of the batch, ascending."""
        return tuple(sorted(self.lengths))

    @property
    def index_M(self) -> Tensor:
        """The same as a tensor: `batch.rows(micro.index_M)` lines up with what is computed for it."""
        return torch.tensor(self.sequences)

    @property
    def lengths_M(self) -> list[int]:
        return [self.lengths[sequence] for sequence in self.sequences]

    @cached_property
    def num_tokens(self) -> int:
        """Tokens that go through the model."""
        return sum(self.lengths.values()) - self.num_saved

    @property
    def num_positions(self) -> int:
        """Positions of the forward pass: there is no padding."""
        return self.num_tokens

    @property
    def num_pairs(self) -> int:
        """Positions that these tokens look at, their own included."""
        saved = sum(run.shared * (run.shared + 1) // 2 * (len(run.members) - 1) for run in self.runs)
        return sum(length * (length + 1) // 2 for length in self.lengths.values()) - saved

    @property
    def num_saved(self) -> int:
        """Tokens that would go through the model if nothing were shared, and do not."""
        return sum(run.shared * (len(run.members) - 1) for run in self.runs)

    @cached_property
    def layout(self) -> Layout:
        own = {run: [(member, self.lengths[member] - run.shared) for member in run.members] for run in self.runs}
        continued = [run for run in self.runs if run.shared and any(length for _, length in own[run])]
        others = [run for run in self.runs if run not in set(continued)]
        begins, shared, owns = {}, {}, {}
        texts: list[int] = []
        end = 0
        for run in continued:
            begins.update(dict.fromkeys(run.members, end))
            shared.update(dict.fromkeys(run.members, run.shared))
            texts.append(run.shared)
            end += run.shared
        followers = []
        for run in continued:
            followers.append(sum(length for _, length in own[run]))
            for member, length in own[run]:
                owns[member] = end
                texts += [length] if length else []
                end += length
        for run in others:  # alone, or several times the very same sequence
            begins.update(dict.fromkeys(run.members, end))
            shared.update(dict.fromkeys(run.members, 0))
            owns.update(dict.fromkeys(run.members, end))
            texts.append(self.lengths[run.members[0]])
            end += texts[-1]
        starts, common, rest = (np.array([found[s] for s in self.sequences], dtype=np.int64) for found in (begins, shared, owns))
        return Layout(texts, [run.shared for run in continued], followers, starts, common, rest)

    def row_positions(self, sequences_N: Tensor, columns_N: Tensor) -> Tensor:
        """Where tokens stand in the row: of the micro-batch's sequences (0 to M - 1), by their column."""
        layout = self.layout
        begins_M, shared_M, own_M = (torch.from_numpy(a).to(columns_N.device) for a in (layout.begins_M, layout.shared_M, layout.own_M))
        own_N = own_M[sequences_N] + columns_N - shared_M[sequences_N]
        return torch.where(columns_N < shared_M[sequences_N], begins_M[sequences_N] + columns_N, own_N)

    def to_flat(self, ids_BT: Tensor, places: Callable[[list[int]], Ints] | None = None) -> tuple[Tensor, Tensor]:
        """Ids and positions [S] of the forward pass; positions are [3, S] where `places` gives those of a sequence."""
        layout = self.layout
        source_S = np.empty(self.num_tokens, dtype=np.int64)
        positions_S = np.empty(self.num_tokens if places is None else (3, self.num_tokens), dtype=np.int64)
        for number, sequence in enumerate(self.sequences):
            shared, begin, own = int(layout.shared_M[number]), int(layout.begins_M[number]), int(layout.own_M[number])
            columns = np.arange(self.lengths[sequence])
            at = columns if places is None else places(ids_BT[sequence, : len(columns)].tolist())
            for part, start in ((columns[:shared], begin), (columns[shared:], own)):
                source_S[start : start + len(part)] = sequence * ids_BT.shape[1] + part
                positions_S[..., start : start + len(part)] = at[..., part]
        source, positions = (torch.from_numpy(array).to(ids_BT.device, non_blocking=True) for array in (source_S, positions_S))
        return ids_BT.flatten()[source], positions

    def attention(self, scale: float, device: torch.device) -> PackedAttention:
        """The attention of that row: which tokens see which."""
        layout = self.layout
        return PackedAttention(layout.text_lengths, layout.prompt_lengths, layout.follower_lengths, scale=scale, device=device)


def flat_batches(ids_BT: Tensor, lengths_B: Tensor, max_tokens: int, *, share: bool = True) -> list[FlatBatch]:
    """Cut a batch into flat micro-batches of at most `max_tokens` computed tokens, or of one sequence where that alone is longer.

    Args:
        ids_BT: the batch.
        lengths_B: tokens of each row, padding excluded.
        max_tokens: the budget.
        share: whether common beginnings are computed once.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    lengths: list[int] = lengths_B.tolist()
    runs = _common_runs(ids_BT.cpu().numpy(), lengths) if share else [Run((row,), 0) for row in range(len(lengths))]
    pieces = [piece for run in runs for piece in _cut(run, lengths, max_tokens)]
    bins: list[list[Run]] = []
    room: list[int] = []
    # The largest first, each into the first micro-batch with room: the same batch always gives the same micro-batches.
    for piece in sorted(pieces, key=lambda run: (-_cost(run, lengths), run.members)):
        cost = _cost(piece, lengths)
        number = next((n for n, free in enumerate(room) if free >= cost), None)
        if number is None:
            bins.append([])
            room.append(max_tokens)
            number = len(bins) - 1
        bins[number].append(piece)
        room[number] -= cost
    return [FlatBatch(tuple(found), {row: lengths[row] for run in found for row in run.members}) for found in bins]


def _cost(run: Run, lengths: Sequence[int]) -> int:
    return run.shared + sum(lengths[member] - run.shared for member in run.members)


def _cut(run: Run, lengths: Sequence[int], max_tokens: int) -> list[Run]:
    """A run in pieces that each fit the budget."""
    pieces: list[Run] = []
    members: list[int] = []
    cost = run.shared
    for member in run.members:
        own = lengths[member] - run.shared
        if members and cost + own > max_tokens:
            pieces.append(Run(tuple(members), run.shared))
            members, cost = [], run.shared
        members.append(member)
        cost += own
    pieces.append(Run(tuple(members), run.shared))
    return [piece if len(piece.members) > 1 else Run(piece.members, 0) for piece in pieces]


def _common_runs(ids_BT: npt.NDArray[np.int64], lengths: Sequence[int]) -> list[Run]:
    """The batch in runs with common beginnings, so that as few tokens as possible are computed; sequences in the order of their ids."""
    # In the order of their ids, the common prefix of a range of sequences is the shortest of the common prefixes of its neighbours. So a
    # run is a range of this order, and the best cut into ranges is found from left to right.
    order = sorted(range(len(lengths)), key=lambda row: (ids_BT[row, : lengths[row]].tolist(), row))
    common = []  # tokens that neighbours have in common before they differ
    for a, b in pairwise(order):
        length = min(lengths[a], lengths[b])
        differ = np.flatnonzero(ids_BT[a, :length] != ids_BT[b, :length])
        common.append(int(differ[0]) if len(differ) else length)
    # best[n]: the most tokens that can be saved among the first n sequences; first[n]: where the last of their runs begins.
    best, first = [0], [0]
    for stop in range(1, len(order) + 1):
        best.append(best[stop - 1])
        first.append(stop - 1)
        shared = max(lengths, default=0)
        # The last run reaches back from `stop`. Its prefix only gets shorter, so below MIN_SHARED nothing further back can help.
        for start in range(stop - 2, -1, -1):
            shared = min(shared, common[start])
            if shared < MIN_SHARED:
                break
            saved = best[start] + shared * (stop - start - 1)
            if saved > best[stop]:
                best[stop], first[stop] = saved, start
    runs: list[Run] = []
    stop = len(order)
    while stop:
        start = first[stop]
        shared = min(common[start : stop - 1], default=0)
        runs.append(Run(tuple(sorted(order[start:stop])), shared))
        stop = start
    return runs[::-1]
