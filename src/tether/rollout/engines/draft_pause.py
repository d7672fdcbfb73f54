"""When speculative decoding pauses: a draft takes longer than a plain step, which pays only if enough of its tokens are right."""

TRIED_DRAFTS = 64
"""Drafts after which it is decided whether they were worth their time."""
LEAST_ACCEPTED = 0.4
"""Tokens of a draft that have to be right on average: about what a step with drafts takes longer than one without."""
PAUSED_CALLS = 4
"""Calls without drafts where they were not; twice as many each time in a row, up to the next number."""
MOST_PAUSED = 32


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
