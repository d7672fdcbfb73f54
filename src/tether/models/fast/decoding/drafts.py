"""Drafts for speculative decoding: what a response may say next, copied from where its last tokens have occurred before.

The members of a group answer the same prompt, and the turns of a conversation resemble each other, so much of a response has been written
before, by another conversation or by the same one. A draft is what followed the latest occurrence of the last few tokens, the longest match
first. No second model is needed. On a GPU the same happens on the device (kernels/drafts.py).

A draft is only a guess: the model samples at every place of it as it would have without one, with the same uniforms, and what was sampled
counts. A wrong draft costs time and changes nothing; where too many are wrong, there are none for a while.
"""

from collections.abc import Sequence

MATCHES = (8, 4, 2)
"""How many last tokens are looked up, in this order."""

NO_TOKEN = -1
TRIED_DRAFTS = 64
"""Drafts after which it is decided whether they were worth their time."""
LEAST_ACCEPTED = 0.4
"""Tokens of a draft that have to be right on average: about what a step with drafts takes longer than one without."""
PAUSED_CALLS = 4
"""Calls without drafts where they were not; twice as many each time in a row, up to the next number."""
MOST_PAUSED = 32


class Drafts:
    """The texts of some slots, and what followed each short run of tokens in them."""

    def __init__(self) -> None:
        self._texts: dict[int, list[int]] = {}
        """By slot."""
        self._followed_by: dict[tuple[int, ...], tuple[list[int], int]] = {}
        """By a run of tokens: the text and the place behind the run."""

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        """The text of a slot goes on with these tokens from a position on; one that starts at 0 is another text."""
        if start == 0:
            self._texts[slot] = []  # what the one before said may still be copied
        text = self._texts.setdefault(slot, [])
        text += [NO_TOKEN] * (start - len(text))  # a slot that was filled before drafts were asked for
        if text[start : start + len(tokens)] == list(tokens) and len(text) == start + len(tokens):
            return
        del text[start:]
        text += tokens
        for end in range(max(start, MATCHES[-1]), len(text)):
            for length in MATCHES:
                if end >= length:
                    self._followed_by[tuple(text[end - length : end])] = text, end

    def adopt(self, slot: int, source: int, length: int) -> None:
        """The text of a slot begins like another's; unknown where that is not known so far."""
        known = self._texts.get(source, [])[:length]
        self._texts[slot] = known if len(known) == length else []

    def guess(self, slot: int, count: int) -> list[int]:
        """At most so many tokens that may follow the text of a slot; none where its last ones have not occurred before."""
        text = self._texts[slot]
        for length in MATCHES:
            found = self._followed_by.get(tuple(text[-length:]))
            if found is not None:
                source, end = found
                return source[end : end + count]
        return []


class DraftPause:
    """Counts drafts and their right tokens, and says when to do without."""

    def __init__(self) -> None:
        self._num_tried = self._num_right = self._num_paused = 0
        """Drafts and their right tokens since the last decision, and calls without drafts that are still to come."""
        self._next_pause = PAUSED_CALLS

    def count(self, tried: int, right: int) -> None:
        """So many drafts were verified, and so many of their tokens were right."""
        self._num_tried, self._num_right = self._num_tried + tried, self._num_right + right
        if self._num_tried >= TRIED_DRAFTS:
            if self._num_right < LEAST_ACCEPTED * self._num_tried:
                self._num_paused, self._next_pause = self._next_pause, min(MOST_PAUSED, 2 * self._next_pause)
            else:
                self._next_pause = PAUSED_CALLS
            self._num_tried = self._num_right = 0

    def applies(self) -> bool:
        """Whether the next call goes without drafts, because the last ones were seldom right; asked once a call."""
        if not self._num_paused:
            return False
        self._num_paused -= 1
        return True
