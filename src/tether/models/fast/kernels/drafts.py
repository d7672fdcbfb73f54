"""Drafts for speculative decoding, made, verified and learned from on the device.

A draft is what followed the latest occurrence of a row's last tokens in any text, the longest match first; decoding/drafts.py says why that
works, and does the same on the host. Here it happens between two steps of decoding, so that several drafts can be verified one after the other
before the host looks: a step guesses, feeds the guess, samples behind each of its tokens, and keeps what was sampled as far as the guess agrees with it.

The texts of all slots lie in one table of tokens. A second table has, by a hash of a few tokens, where they were last followed by another one, and
when that was: of several rows that write to one place, the latest wins, and of the same step the one that stands last, so the same run makes the
same drafts. What a place says is compared with the tokens themselves before it is believed: conversations end and others take their slots, and
two runs of tokens may have one hash.

A step has so many tokens in all, and they go where they are most likely right: a long match is worth more than a short one, and a row whose last
tokens never occurred before has only the last of them fed.

Shape legend: B rows of a call, T tokens that may be fed to each of them (the last sampled one and a draft), S tokens fed to all, K tokens that a call may
sample for each, X pages of a slot.
"""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from tether.models.fast.kernels.attention import ALIGNED
from tether.models.fast.kernels.logits import DecodeState

NUM_PLACES = 1 << 20
"""Of the table; a rollout of 128 conversations has some 200,000 runs. It takes 8 MB."""
LANES = 128


@triton.jit
def _place(texts_ptr, first, there, LENGTH: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Where the table has what followed the LENGTH tokens from `first` on."""
    mixed = first * 0 + LENGTH
    for number in tl.static_range(LENGTH):
        mixed = (mixed * 1000003 + tl.load(texts_ptr + first + number, mask=there, other=0)) & 0x7FFFFFFF
    return (mixed ^ (mixed >> 11)) % NUM_PLACES


@triton.jit
def _remember_run(texts_ptr, table_ptr, clock, at, position, there, LENGTH: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Note behind which LENGTH tokens these stand, which are `at` these places of the texts."""
    known = there & (position >= LENGTH)
    tl.atomic_max(table_ptr + _place(texts_ptr, at - LENGTH, known, LENGTH, NUM_PLACES), (clock << 32) | at, mask=known)


@triton.jit
def _remember(texts_ptr, table_ptr, clock, at, position, there, NUM_PLACES: tl.constexpr):
    """Runs of 8, 4 and 2 tokens, as decoding/drafts.py has them."""
    _remember_run(texts_ptr, table_ptr, clock, at, position, there, 8, NUM_PLACES)
    _remember_run(texts_ptr, table_ptr, clock, at, position, there, 4, NUM_PLACES)
    _remember_run(texts_ptr, table_ptr, clock, at, position, there, 2, NUM_PLACES)


@triton.jit
def _look_up(texts_ptr, table_ptr, end, length, source, LENGTH: tl.constexpr, NUM_PLACES: tl.constexpr):
    """Where the last LENGTH tokens of a text were followed by something; `source` if that is known already, 0 if they never were."""
    known = length >= LENGTH
    found = tl.load(table_ptr + _place(texts_ptr, end - LENGTH, known, LENGTH, NUM_PLACES)) & 0x7FFFFFFF
    known = known & (found >= LENGTH) & (source == 0)
    token = tl.arange(0, LENGTH)
    here = tl.load(texts_ptr + end - LENGTH + token, mask=known, other=0)
    there = tl.load(texts_ptr + found - LENGTH + token, mask=known, other=-1)
    return tl.where(tl.sum((here != there).to(tl.int32), axis=0) == 0, found, source)


@triton.jit(do_not_specialize=["num_tokens"])
def _learn(texts_ptr, table_ptr, clock_ptr, places_ptr, num_positions, num_tokens, NUM_PLACES: tl.constexpr, LANES: tl.constexpr):
    number = tl.program_id(0) * LANES + tl.arange(0, LANES)
    there = number < num_tokens
    place = tl.load(places_ptr + number, mask=there, other=0)
    _remember(texts_ptr, table_ptr, tl.load(clock_ptr), place, place % num_positions, there, NUM_PLACES)


@triton.jit
def _guess(
    texts_ptr, table_ptr, clock_ptr, slots_ptr, lengths_ptr, drafts_ptr, matches_ptr, num_positions, WIDTH: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    if row == 0:  # nobody reads the clock in this kernel
        tl.store(clock_ptr, tl.load(clock_ptr) + 1)
    begin = tl.load(slots_ptr + row).to(tl.int64) * num_positions
    length = tl.load(lengths_ptr + row)
    end = begin + length
    by_8 = _look_up(texts_ptr, table_ptr, end, length, begin * 0, 8, NUM_PLACES)
    by_4 = _look_up(texts_ptr, table_ptr, end, length, by_8, 4, NUM_PLACES)
    source = _look_up(texts_ptr, table_ptr, end, length, by_4, 2, NUM_PLACES)
    token = tl.arange(0, WIDTH)
    draft = tl.maximum(
        tl.load(texts_ptr + source - 1 + token, mask=(token > 0) & (source > 0), other=0), 0
    )  # no patches, which are negative
    tl.store(drafts_ptr + row * WIDTH + token, tl.where(token == 0, tl.load(texts_ptr + end - 1), draft))
    tl.store(matches_ptr + row, (source > 0).to(tl.int32) + (by_4 > 0).to(tl.int32))


@triton.jit
def _one_more(num, left, wants):
    """One more token for each of these rows, as long as some are left: the first rows come first."""
    wants = wants & (tl.cumsum(wants.to(tl.int32), axis=0) <= left)
    return num + wants.to(tl.int32), left - tl.sum(wants.to(tl.int32), axis=0)


@triton.jit(do_not_specialize=["num_rows", "num_fed", "most_tokens"])
def _share_out(
    drafts_ptr, matches_ptr, lengths_ptr, counts_ptr, uniforms_ptr, fed_starts_ptr, fed_counts_ptr, filled_ptr, fed_ptr, fed_uniforms_ptr,
    num_rows, num_fed, most_tokens, MOST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, FED: tl.constexpr,
):  # fmt: skip
    row = tl.arange(0, ROWS)
    is_row = row < num_rows
    match = tl.load(matches_ptr + row, mask=is_row, other=0)
    num, left = is_row.to(tl.int32), num_fed - num_rows
    # A token behind a match of four or more is right six times of seven if the ones before it are, the first one behind a shorter match four times
    # of seven: the third of the former comes before the first of the latter.
    for depth in tl.static_range(1, MOST + 2):
        if depth < MOST:
            num, left = _one_more(num, left, (match == 2) & (num == depth))
        if depth > 2:
            num, left = _one_more(num, left, (match == 1) & (num == depth - 2))
    first = tl.cumsum(num, axis=0) - num
    tl.store(fed_starts_ptr + row, first, mask=is_row)
    tl.store(fed_counts_ptr + row, num, mask=is_row)
    tl.store(filled_ptr + row, tl.load(lengths_ptr + row, mask=is_row, other=0) - 1 + num, mask=is_row)
    count = tl.load(counts_ptr + row, mask=is_row, other=0)
    for token in tl.static_range(MOST):
        is_fed = is_row & (token < num)
        tl.store(fed_ptr + first + token, tl.load(drafts_ptr + row * WIDTH + token, mask=is_fed, other=0), mask=is_fed)
        uniform = tl.load(uniforms_ptr + row * most_tokens + count + token, mask=is_fed, other=0.0)
        tl.store(fed_uniforms_ptr + first + token, uniform, mask=is_fed)
    place = tl.arange(0, FED)
    tl.store(fed_ptr + place, place * 0, mask=(place >= tl.sum(num, axis=0)) & (place < num_fed))


@triton.jit(do_not_specialize=["most_tokens"])
def _accept(
    texts_ptr, table_ptr, clock_ptr, slots_ptr, lengths_ptr, counts_ptr, fed_starts_ptr, fed_counts_ptr, fed_ptr, drawn_ptr, drawn_logprobs_ptr, sampled_ptr, logprobs_ptr,
    num_positions, most_tokens, unused_slot, WIDTH: tl.constexpr, NUM_PLACES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row)
    begin = slot.to(tl.int64) * num_positions
    length, count = tl.load(lengths_ptr + row), tl.load(counts_ptr + row)
    first, num_fed = tl.load(fed_starts_ptr + row), tl.load(fed_counts_ptr + row)
    token = tl.arange(0, WIDTH)
    drawn = tl.load(drawn_ptr + first + token, mask=token < num_fed, other=-1)
    guessed = tl.load(fed_ptr + first + token + 1, mask=token + 1 < num_fed, other=-2)
    num_new = tl.min(tl.where(drawn == guessed, num_fed - 1, token), axis=0) + 1
    is_new = token < num_new
    target = row * most_tokens + count + token
    tl.store(sampled_ptr + target, drawn.to(tl.int32), mask=is_new)
    tl.store(logprobs_ptr + target, tl.load(drawn_logprobs_ptr + first + token, mask=is_new, other=0.0), mask=is_new)
    is_known = is_new & (slot < unused_slot)  # rows that only fill up a batch say nothing
    tl.store(texts_ptr + begin + length + token, drawn.to(tl.int32), mask=is_known)
    tl.store(lengths_ptr + row, length + num_new)
    tl.store(counts_ptr + row, count + num_new)
    tl.debug_barrier()  # what follows reads tokens that other threads of this program have written
    _remember(texts_ptr, table_ptr, tl.load(clock_ptr), begin + length + token, length + token, is_known, NUM_PLACES)


class DraftState:
    """The state of some rows while drafts are verified for them, on the device: everything a step reads and writes.

    What a call gives, and what it gets, lie in one piece of memory each (the two overlap): a copy takes longer to begin than to carry them.
    """

    def __init__(
        self, num_rows: int, most_each: int, most_rounds: int, num_pages: int, device: torch.device, num_fed: int | None = None
    ) -> None:
        """A step feeds at most `most_each` tokens to a row, the last sampled one included, and `num_fed` to all; None: to all as many."""
        self.most_each, self.most_tokens = most_each, most_rounds * most_each
        num_fed = num_rows * most_each if num_fed is None else num_fed
        tokens = (num_rows, self.most_tokens)
        shapes = ((num_rows, num_pages), tokens, (num_rows,), (num_rows,), (num_rows,), tokens, tokens)
        ends = np.cumsum([-(-math.prod(shape) // ALIGNED) * ALIGNED for shape in shapes]).tolist()
        self.memory = torch.zeros(ends[-1], dtype=torch.int32, device=device)
        """Pages, uniforms, slots, lengths and counts of the rows; what was sampled for them, and its log-probs."""
        self._places = [(begin, shape) for begin, shape in zip([0, *ends], shapes, strict=False)]
        self._num_given, self._first_returned = ends[4], ends[3]
        parts = [self.memory[begin : begin + math.prod(shape)].view(shape) for begin, shape in self._places]
        self.tables_BX, uniforms_BK, self.slots_B, self.lengths_B, self.counts_B, self.sampled_BK, logprobs_BK = parts
        """`lengths_B`: tokens of each text, the last sampled one included; `counts_B`: tokens that this call has sampled."""
        self.uniforms_BK, self.logprobs_BK = uniforms_BK.view(torch.float32), logprobs_BK.view(torch.float32)
        self.drafts_BT = torch.zeros(num_rows, triton.next_power_of_2(most_each), dtype=torch.int32, device=device)
        """The last token of each row and the longest draft for it."""
        self.matches_B, self.fed_starts_B, self.fed_counts_B, self.filled_B = torch.zeros(
            4, -(-num_rows // ALIGNED) * ALIGNED, dtype=torch.int32, device=device
        )[:, :num_rows]
        """How good the match behind a draft is (0 none, 1 two tokens, 2 more); where the tokens that are fed to a row begin among all, how many they are,
        and how many positions are filled once they are fed."""
        self.fed_S = torch.zeros(num_fed, dtype=torch.int32, device=device)
        self.drawn = DecodeState(num_fed, 1, device)
        """What is sampled behind each token that is fed."""

    def given(
        self,
        tables_BX: npt.NDArray[np.int32],
        slots: Sequence[int],
        starts: Sequence[int],
        uniforms_BK: npt.NDArray[np.float32],
        unused_slot: int,
    ) -> npt.NDArray[np.int32]:
        """What a call puts at the beginning of the memory. There may be fewer slots than rows; the last sampled token of each stands at its start."""
        given = np.zeros(self._num_given, dtype=np.int32)
        tables, uniforms, slots_B, lengths_B, _ = (
            given[begin : begin + math.prod(shape)].reshape(shape) for begin, shape in self._places[:5]
        )
        num_rows, num_tokens = uniforms_BK.shape
        tables[:], slots_B[:], lengths_B[:] = tables_BX, unused_slot, 1
        uniforms.view(np.float32)[:num_rows, :num_tokens] = uniforms_BK
        slots_B[:num_rows], lengths_B[:num_rows] = slots, np.add(starts, 1)
        return given

    def returned(self, num_rows: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], npt.NDArray[np.int32]]:
        """Waits for the device: what was sampled for the first rows, its log-probs, and how many tokens these are."""
        first = self._first_returned
        memory = self.memory[first:].cpu().numpy()
        counts, sampled, logprobs = (
            memory[begin - first : begin - first + math.prod(shape)].reshape(shape)[:num_rows] for begin, shape in self._places[4:]
        )
        return sampled.astype(np.int64), logprobs.view(np.float32), counts


class TextTable:
    """The texts of all slots, and what followed each short run of tokens in them."""

    def __init__(self, num_slots: int, num_positions: int, device: torch.device) -> None:
        self.device, self._num_positions = device, num_positions
        self.unused_slot = num_slots
        """Of rows that only fill up a batch."""
        # A draft that is copied from the end of the last text reads past it.
        self._texts = torch.zeros((num_slots + 1) * num_positions + 64, dtype=torch.int32, device=device)
        self._followed_by = torch.zeros(NUM_PLACES, dtype=torch.int64, device=device)
        self._clock_1 = torch.ones(1, dtype=torch.int64, device=device)

    def forget(self) -> None:
        """Begin anew: what is drafted next depends on nothing before."""
        self._texts.zero_()
        self._followed_by.zero_()
        self._clock_1.fill_(1)

    def learn(self, ids_S: Tensor, slots_S: Tensor, positions_S: Tensor) -> None:
        """Write tokens into the texts of their slots, and note what they follow."""
        places_S = slots_S.long() * self._num_positions + positions_S
        self._texts[places_S] = ids_S.to(torch.int32)
        num_tokens = len(ids_S)
        _learn[(triton.cdiv(num_tokens, LANES),)](
            self._texts, self._followed_by, self._clock_1, places_S, self._num_positions, num_tokens,
            NUM_PLACES=NUM_PLACES, LANES=LANES, num_warps=4,
        )  # fmt: skip

    def copy(self, leader: int, followers: Tensor) -> None:
        """Let the texts of some slots be another's."""
        texts = self._texts[: (self.unused_slot + 1) * self._num_positions].view(-1, self._num_positions)
        texts[followers] = texts[leader].clone()

    def guess(self, state: DraftState) -> None:
        """Write what is fed to each row next, its last token and a draft, and the uniforms for what is sampled behind them.

        Drafts are as long as the tokens of a step allow, those with the better matches first.
        """
        num_rows, width = state.drafts_BT.shape
        _guess[(num_rows,)](
            self._texts, self._followed_by, self._clock_1, state.slots_B, state.lengths_B, state.drafts_BT, state.matches_B, self._num_positions,
            WIDTH=width, NUM_PLACES=NUM_PLACES, num_warps=1,
        )  # fmt: skip
        _share_out[(1,)](
            state.drafts_BT, state.matches_B, state.lengths_B, state.counts_B, state.uniforms_BK, state.fed_starts_B, state.fed_counts_B, state.filled_B,
            state.fed_S, state.drawn.uniforms_BK, num_rows, len(state.fed_S), state.most_tokens,
            MOST=state.most_each, WIDTH=width, ROWS=triton.next_power_of_2(num_rows), FED=triton.next_power_of_2(len(state.fed_S)), num_warps=4,
        )  # fmt: skip

    def accept(self, state: DraftState) -> None:
        """Append what was sampled to each row, as far as the draft before it is what was sampled."""
        num_rows, width = state.drafts_BT.shape
        _accept[(num_rows,)](
            self._texts, self._followed_by, self._clock_1, state.slots_B, state.lengths_B, state.counts_B, state.fed_starts_B, state.fed_counts_B, state.fed_S,
            state.drawn.sampled_BK, state.drawn.logprobs_BK, state.sampled_BK, state.logprobs_BK, self._num_positions, state.most_tokens, self.unused_slot,
            WIDTH=width, NUM_PLACES=NUM_PLACES, num_warps=1,
        )  # fmt: skip
