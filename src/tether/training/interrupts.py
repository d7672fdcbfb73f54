"""Ctrl-C that never tears a step apart.

Between sections an interrupt is raised at once, as always. Inside a shielded section (an update, a write to disk) it is held back
until the section ends, so weights, optimiser and record always belong to the same step. A second Ctrl-C is raised at once wherever it comes.

Ranks of a run on several must stop at the same place, or the others would wait for one that has left. There Ctrl-C and SIGTERM only set a
flag, except inside `interruptible`: work that a rank does alone, after which the ranks tell each other how it ended
(distributed/process_group.py). Further signals change nothing: a scheduler may send the same one to launcher and ranks.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Owns SIGINT, with several ranks also SIGTERM, while it is entered; does nothing outside the main thread."""

    def __init__(self, *, several_ranks: bool = False) -> None:
        self._several_ranks = several_ranks
        self._depth = 0
        self._pending = False
        self._interruptible = False
        self._stopping = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals until the block ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = (signal.SIGINT, signal.SIGTERM) if self._several_ranks else (signal.SIGINT,)
        previous = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Hold an interrupt back until the block ends; shields may be nested."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and self._depth == 0 and not self._several_ranks:
            self._pending = False
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """With several ranks: raise an interrupt that came before or comes inside the block, unless a shield holds it back."""
        self._interruptible = self._depth == 0 and not self._stopping
        try:
            if self._pending and self._interruptible:
                raise KeyboardInterrupt
            yield
        finally:
            self._interruptible = False

    def agreed(self) -> None:
        """All ranks stop now: what they do for that is not interrupted again."""
        self._stopping = True

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._several_ranks:
            first, self._pending = not self._pending, True
            if first and self._interruptible:
                raise KeyboardInterrupt
        elif self._depth == 0 or self._pending:
            raise KeyboardInterrupt
        else:
            self._pending = True
