"""Slots of conversations that have ended, kept for the request that continues them.

A client of `tether serve` sends a conversation turn by turn, each time from its beginning. What the turns before left in the cache is found again by
their tokens, so that only the new ones are computed. Slots are given up in the order in which they were last used.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

TAIL = 8
"""So many last tokens tell most conversations of one length apart; what they leave open is compared whole."""


class KeptSlots:
    """From the tokens in the slots of ended conversations to the slots."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[int, list[int]] = OrderedDict()
        """The slot last used is at the end."""
        self._at: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        """From length and last tokens to slots."""
        self._lengths: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._tokens)

    def __contains__(self, slot: object) -> bool:
        return slot in self._tokens

    def keep(self, slot: int, tokens: list[int]) -> None:
        """A slot holds these tokens, and its conversation has ended."""
        self._tokens[slot] = tokens
        self._at.setdefault(_key(tokens, len(tokens)), []).append(slot)
        self._lengths[len(tokens)] += 1

    def take(self, prompt: Sequence[int]) -> tuple[int, int] | None:
        """The slot that holds the longest beginning of a prompt, and how long that is. At least one token is left to be computed."""
        for length in sorted(self._lengths, reverse=True):
            if length < len(prompt):
                for slot in self._at.get(_key(prompt, length), ()):
                    if self._tokens[slot] == list(prompt[:length]):
                        self._remove(slot)
                        return slot, length
        return None

    def give_up(self) -> int:
        """The slot that was not used for longest; the caller releases it."""
        slot = next(iter(self._tokens))
        self._remove(slot)
        return slot

    def _remove(self, slot: int) -> None:
        tokens = self._tokens.pop(slot)
        key = _key(tokens, len(tokens))
        self._at[key].remove(slot)
        if not self._at[key]:
            del self._at[key]
        self._lengths[len(tokens)] -= 1
        if not self._lengths[len(tokens)]:
            del self._lengths[len(tokens)]


def _key(tokens: Sequence[int], length: int) -> tuple[int, tuple[int, ...]]:
    return length, tuple(tokens[max(0, length - TAIL) : length])
