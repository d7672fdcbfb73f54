"""Being told to stop, without tearing a step apart: Ctrl-C, SIGTERM, SIGHUP, a console that is gone.

Between sections an interrupt is raised at once, as KeyboardInterrupt. Inside a shielded section (an update, a write to disk) it is held back
until the section ends, so weights, optimiser and record always belong to the same step. A second Ctrl-C is raised at once wherever it comes.

SIGTERM and SIGHUP come from schedulers and from terminals that close. They count once: a scheduler may send the same one to launcher and ranks,
or again, while the checkpoint is being written. Stopping by them may take TETHER_GRACE seconds (120 unless set); then what still waits is broken
off. A SIGHUP that is ignored when the run starts (nohup) stays ignored.

Ranks of a run on several must stop at the same place, or the others would wait for one that has left. There the signals only set a
flag, except inside `interruptible`: work that a rank does alone, after which the ranks tell each other how it ended
(distributed/process_group.py). Further signals change nothing.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from tether.core.errors import BadInput

GRACE_VARIABLE = "TETHER_GRACE"
GRACE_SECONDS = 120.0

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """Owns SIGINT, SIGTERM and SIGHUP while it is entered; does nothing outside the main thread."""

    def __init__(self, *, several_ranks: bool = False) -> None:
        self._several_ranks = several_ranks
        self._listening = 0
        self._depth = 0
        self._pending = False
        self._interruptible = False
        self._stopping = False
        self._grace: threading.Timer | None = None
        self._grace_is_over, self._seconds = False, GRACE_SECONDS
        self.received: int | None = None
        """The signal that stopped the run; None where none did."""

    @property
    def exit_code(self) -> int:
        """What a shell expects of a process that a signal stopped: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + int(self.received or signal.SIGINT)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals until the block ends; blocks may be nested."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [number for number in _STOPPING if number == signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
        self._seconds = grace_seconds()
        previous = {number: signal.signal(number, self._handle) for number in handled}
        self._listening += 1
        try:
            if self.received == signal.SIGPIPE and self._grace is None:  # the console was gone before anybody listened
                self._handle(signal.SIGTERM, None)
            yield
        finally:
            self._listening -= 1
            for number, handler in previous.items():
                signal.signal(number, handler)
            if self._grace is not None and not self._listening:
                self._grace.cancel()
                self._grace = None

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

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Inside `interruptible`: a block in which ranks wait for each other, so that an interrupt is held back until it ends."""
        before, self._interruptible = self._interruptible, False
        try:
            yield
        finally:
            self._interruptible = before
        if self._pending and before:
            raise KeyboardInterrupt

    def agreed(self) -> None:
        """All ranks stop now: what they do for that is not interrupted again."""
        self._stopping = True

    def console_closed(self) -> None:
        """Nobody reads the output any more (`tether train ... | head -1`): stop as after SIGTERM. May be called by any thread."""
        self.received = self.received or signal.SIGPIPE
        if not self._listening:
            return  # whoever listens next stops
        if threading.current_thread() is threading.main_thread():
            self._handle(signal.SIGTERM, None)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        again = self._grace is not None  # a signal that counts once has come before
        self.received = self.received or number
        if number != signal.SIGINT and not again:

            def end() -> None:
                self._grace_is_over = True
                os.kill(os.getpid(), signal.SIGTERM)  # to the main thread, wherever it waits

            self._grace = threading.Timer(self._seconds, end)
            self._grace.daemon = True
            self._grace.start()
        if self._several_ranks:
            first, self._pending = not self._pending, True
            if (first or self._grace_is_over) and self._interruptible:
                raise KeyboardInterrupt
        elif self._grace_is_over or (number == signal.SIGINT and (self._depth == 0 or self._pending)):
            raise KeyboardInterrupt
        elif number != signal.SIGINT and again:
            return
        elif self._depth == 0:
            raise KeyboardInterrupt
        else:
            self._pending = True


def grace_seconds() -> float:
    """How long a run that was told to stop may take, for its last checkpoint."""
    said = os.environ.get(GRACE_VARIABLE, "")
    try:
        seconds = float(said or GRACE_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < threading.TIMEOUT_MAX:
        raise BadInput(f"{GRACE_VARIABLE} is '{said}'; give seconds, such as {GRACE_SECONDS:.0f}")
    return seconds
