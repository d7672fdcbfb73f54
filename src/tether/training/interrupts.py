"""Ctrl-C that never tears a step apart.

Between sections an interrupt is raised at once, as always. Inside a shielded section (an update, a write to disk) it is held back
until the section ends, so weights, optimiser and record always belong to the same step. A second Ctrl-C is raised at once wherever it comes.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Owns SIGINT while it is entered; does nothing outside the main thread."""

    def __init__(self) -> None:
        self._depth = 0
        self._pending = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle Ctrl-C until the block ends."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Hold an interrupt back until the block ends; shields may be nested."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        if self._pending and self._depth == 0:
            self._pending = False
            raise KeyboardInterrupt

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self._depth == 0 or self._pending:
            raise KeyboardInterrupt
        self._pending = True
