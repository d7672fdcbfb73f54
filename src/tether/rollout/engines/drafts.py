"""Drafts for speculative decoding: what a response may say next, copied from where its last tokens have occurred before.

The members of a group answer the same prompt, and the turns of a conversation resemble each other, so much of a response has been written
before, by another row or by the same one. A draft is what followed the latest occurrence of the last few tokens, the longest match first. No
second model is needed.

A draft is only a guess: the model samples at every place of it as it would have without one, with the same uniforms, and what was sampled
counts. A wrong draft costs time and changes nothing; where too many are wrong, there are none for a while.
"""

from collections.abc import Sequence

MATCHES = (8, 4, 2)
"""How many last tokens are looked up, in this order."""
TRIED_DRAFTS = 64
"""Drafts after which it is decided whether they were worth their time."""
LEAST_ACCEPTED = 0.6
"""Tokens of a draft that have to be right on average: about what a call with drafts takes longer than one without."""
PAUSED_CALLS = 16
"""Calls without drafts where they were not."""


class Drafts:
    """Texts that grow, and what followed each short run of tokens in them."""

    def __init__(self) -> None:
        self._followed_by: dict[tuple[int, ...], tuple[list[int], int]] = {}
        """By a run of tokens: the text and the place behind the run."""
        self._num_known: dict[int, int] = {}
        """By the identity of a text: how many of its tokens are known."""
        self._texts: list[list[int]] = []
        """Keeps their identities from being used again."""
        self._beginnings: set[tuple[int, ...]] = set()
        """The texts as they were first seen: the prompt of a group is looked at once."""
        self._num_tried = self._num_right = self._num_paused = 0
        """Drafts and their right tokens since the last decision, and calls without drafts that are still to come."""

    def learn(self, text: list[int]) -> None:
        """Look at what is new in a text; the list itself is kept, and may grow."""
        if id(text) not in self._num_known:
            self._texts.append(text)
            beginning = tuple(text)
            self._num_known[id(text)] = len(text) if beginning in self._beginnings else 0
            self._beginnings.add(beginning)
        for end in range(max(self._num_known[id(text)], MATCHES[-1]), len(text)):
            for length in MATCHES:
                if end >= length:
                    self._followed_by[tuple(text[end - length : end])] = text, end
        self._num_known[id(text)] = len(text)

    def guess(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most so many tokens that may follow; none where the last ones have not occurred before."""
        for length in MATCHES:
            found = self._followed_by.get(tuple(tokens[-length:]))
            if found is not None:
                text, end = found
                return text[end : end + count]
        return []

    def count(self, tried: int, right: int) -> None:
        """So many drafts were verified, and so many of their tokens were right."""
        self._num_tried, self._num_right = self._num_tried + tried, self._num_right + right
        if self._num_tried >= TRIED_DRAFTS:
            self._num_paused = PAUSED_CALLS if self._num_right < LEAST_ACCEPTED * self._num_tried else 0
            self._num_tried = self._num_right = 0

    def pauses(self) -> bool:
        """Whether the next call goes without drafts, because the last ones were seldom right; asked once a call."""
        if not self._num_paused:
            return False
        self._num_paused -= 1
        return True
