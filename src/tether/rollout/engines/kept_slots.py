"""What slots hold: a request computes only what no slot has of its beginning.

A client of `tether serve`, or an agent behind the gateway, sends a conversation turn by turn, each time from its beginning; its tools and instructions
are those of every other conversation. Slots of conversations that have ended are kept for the request that continues them. What several begin with, be
it a reply with two continuations or the same instructions, is taken over from any slot that holds it, kept or live. Kept slots are given up in the
order in which they were last used.

Shape legend: B slots, L positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

LEAST_SHARED = 64
"""Positions: a shorter beginning is computed in the time that it takes to share it."""


class Found(NamedTuple):
    """What there is of a prompt, but for its last token, behind which a token is sampled."""

    slot: int
    """Holds the longest beginning of it."""
    length: int
    promised: int
    """The longest beginning that any slot will hold once what waits is computed."""


class KeptSlots:
    """The tokens of every slot, and which slots are kept. To look through 128 x 2,000 tokens takes 0.2 ms."""

    def __init__(self) -> None:
        self._ended: dict[int, None] = {}
        """Kept slots; the one last used is at the end."""
        self._tokens_BL: Ints = np.zeros((0, 0), dtype=np.int64)
        self._held_B = np.zeros(0, dtype=np.int64)
        self._promised_B = np.zeros(0, dtype=np.int64)
        """How many of its tokens each slot holds, and will hold."""

    def __len__(self) -> int:
        return len(self._ended)

    def __contains__(self, slot: object) -> bool:
        return slot in self._ended

    def promise(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot will hold these tokens once the next call has computed them."""
        num_slots, num_positions = self._tokens_BL.shape
        if slot >= num_slots or len(tokens) > num_positions:
            more = max(0, slot + 1 - num_slots)
            longer = max(len(tokens) - num_positions, num_positions) if len(tokens) > num_positions else 0
            self._tokens_BL = np.pad(self._tokens_BL, ((0, more), (0, longer)))
            self._held_B, self._promised_B = (np.pad(counts_B, (0, more)) for counts_B in (self._held_B, self._promised_B))
        self._tokens_BL[slot, : len(tokens)] = tokens
        self._promised_B[slot] = len(tokens)

    def hold(self, slot: int) -> None:
        """What was promised for a slot is there."""
        self._held_B[slot] = self._promised_B[slot]

    def take_back(self) -> None:
        """Nothing is promised any more."""
        self._promised_B[:] = self._held_B

    def keep(self, slot: int, tokens: Sequence[int]) -> None:
        """A slot holds these tokens, and its conversation has ended."""
        self.promise(slot, tokens)
        self.hold(slot)
        self._ended[slot] = None

    def continued(self, prompt: Sequence[int]) -> int:
        """The kept slot that holds nothing but the longest beginning of a prompt that any slot holds; -1 where there is none.

        As `find` and `is_all_of` would say, but rows are compared only where they end as the prompt does there: most requests continue a conversation.
        """
        slots_E = np.fromiter(self._ended, dtype=np.int64, count=len(self._ended))
        lengths_E = self._held_B[slots_E]
        usable_E = (lengths_E > 0) & (lengths_E < len(prompt))
        slots_E, lengths_E = slots_E[usable_E], lengths_E[usable_E]
        prompt_T = np.array(prompt, dtype=np.int64)
        alike_E = self._tokens_BL[slots_E, lengths_E - 1] == prompt_T[lengths_E - 1]
        for length, slot in sorted(zip((-lengths_E[alike_E]).tolist(), slots_E[alike_E].tolist(), strict=True)):
            if self._begins(slot, prompt_T[:-length]):
                return -1 if self._holds_more(prompt_T, -length) else slot
        return -1

    def _holds_more(self, prompt_T: Ints, length: int) -> bool:
        """Whether any slot holds more than so many tokens of a prompt, its last one aside."""
        if length + 1 >= min(len(prompt_T), 1 + self._tokens_BL.shape[1]):
            return False
        longer_X = np.flatnonzero((self._held_B > length) & (self._tokens_BL[:, length] == prompt_T[length]))
        return any(self._begins(slot, prompt_T[: length + 1]) for slot in longer_X.tolist())

    def _begins(self, slot: int, tokens_L: Ints) -> bool:
        return bool((self._tokens_BL[slot, : len(tokens_L)] == tokens_L).all())

    def find(self, prompt: Sequence[int]) -> Found:
        """The slot that holds the longest beginning of a prompt; of several, a kept one that holds nothing else."""
        if not len(self._held_B) or not prompt:
            return Found(-1, 0, 0)
        width = min(len(prompt) - 1, self._tokens_BL.shape[1])
        differs_BL = self._tokens_BL[:, :width] != np.array(prompt[:width], dtype=np.int64)
        common_B = np.where(differs_BL.any(axis=1), differs_BL.argmax(axis=1), width) if width else np.zeros_like(self._held_B)
        held_B = np.minimum(common_B, self._held_B)
        length = int(held_B.max())
        longest_B = held_B == length
        whole = np.flatnonzero(longest_B & (self._held_B == length)).tolist()
        slot = next((slot for slot in whole if self.is_all_of(slot, length)), int(longest_B.argmax()))
        return Found(slot, length, int(np.minimum(common_B, self._promised_B).max()))

    def is_all_of(self, slot: int, length: int) -> bool:
        """Whether a slot is kept and holds so many tokens and no more: a conversation that continues them may have it."""
        return slot in self._ended and self._held_B[slot] == length > 0

    def take(self, slot: int) -> int:
        """A kept slot goes on with a conversation that continues it; returns how many tokens it holds."""
        del self._ended[slot]
        return int(self._held_B[slot])

    def drop(self, slot: int) -> None:
        """A slot holds nothing any more."""
        self._ended.pop(slot, None)
        if slot < len(self._held_B):
            self._held_B[slot] = self._promised_B[slot] = 0

    def give_up(self, but: int = -1) -> int | None:
        """The kept slot that was not used for longest, `but` excepted; the caller releases it. None where there is none."""
        slot = next((slot for slot in self._ended if slot != but), None)
        if slot is not None:
            self.drop(slot)
        return slot
