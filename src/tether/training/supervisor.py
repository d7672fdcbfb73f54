"""`tether train --restarts N`: a run that goes on by itself when its process, a rank or its last server dies.

This process trains nothing. It runs the same command as a child (core/child.py), and where that ends by itself starts it again, which then continues
from the last checkpoint: `core.child.this_attempt` tells it that it is a further attempt. What was refused (exit code 2), what was told to stop and
what is done is not started again. An attempt that brought no new checkpoint doubles the wait before the next.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO

from tether.core.child import Attempt, Child, signal_name
from tether.core.errors import BadInput, RankFailure, TetherError
from tether.core.text import shortened, visible
from tether.runs.checkpoints import list_checkpoints, step_of
from tether.runs.lock import STALE_SECONDS, lock_holder
from tether.runs.store import CHECKPOINTS
from tether.training.interrupts import grace_seconds

FIRST_WAIT, LONGEST_WAIT = 1.0, 60.0
"""Seconds before a further attempt."""
POLL_SECONDS = 0.2
SIGNALLED = 128
"""Exit codes above this stand for a signal."""
STOPS = tuple(SIGNALLED + number for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE))
"""Exit codes of a run that was told to stop."""
TAIL = 8192
LONGEST_CAUSE = 400


def supervise(command: Sequence[str], restarts: int, folder: Path, say: Callable[[str], None]) -> int:
    """Run a command that writes the run `folder`, and start it again up to `restarts` times; returns the exit code."""
    if restarts < 0:
        raise BadInput(f"--restarts is {restarts}; give 0 or more")
    attempt, wait = Attempt(1, ""), FIRST_WAIT
    with _Signals() as signals:
        while True:
            before = _newest_step(folder)
            code, said = _run(command, attempt, signals)
            if code in (0, BadInput.exit_code, *STOPS) or signals.received:
                return code
            cause = _cause(code, said)
            if attempt.number > restarts:
                raise TetherError(f"gave up after {restarts} restarts; the last attempt ended with: {cause}")
            step = _newest_step(folder)
            wait = FIRST_WAIT if step > before or attempt.number == 1 else min(LONGEST_WAIT, 2 * wait)
            where = f"continues from step {step}" if step > 0 else "starts from scratch, as there is no checkpoint yet"
            say(f"attempt {attempt.number} ended: {cause}")
            say(f"attempt {attempt.number + 1} of {restarts + 1} begins in {wait:g} s and {where}")
            signals.wait(wait)
            _until_nobody_writes(folder, signals, say)
            if signals.received:
                return SIGNALLED + signals.received
            attempt = Attempt(attempt.number + 1, cause)


def _run(command: Sequence[str], attempt: Attempt, signals: "_Signals") -> tuple[int, bytes]:
    """One attempt; its exit code, and the end of what it complained about."""
    environment = {**os.environ, **attempt.variables()}
    child = Child(command, "guard", environment=environment, stdout=None, stderr=subprocess.PIPE)
    assert child.stderr is not None
    said = bytearray()
    reader = threading.Thread(target=_pass_on, args=(child.stderr, said), name="complaints", daemon=True)
    reader.start()
    with signals.passed_to(child):
        code = child.wait()
    reader.join(1.0)  # what outlives the attempt may still hold the pipe
    child.close()
    return code, bytes(said)


def _pass_on(stream: IO[bytes], said: bytearray) -> None:
    """Show what an attempt complains about as it comes, and remember the end of it."""
    with stream:
        while part := os.read(stream.fileno(), 1 << 16):
            said += part
            del said[:-TAIL]
            sys.stderr.buffer.write(part)
            sys.stderr.flush()


def _cause(code: int, said: bytes) -> str:
    """Why an attempt ended, in one line: its own last line, unless it was killed and could say none."""
    if code > SIGNALLED:
        return f"its process was killed by {signal_name(code - SIGNALLED)} (a machine that is out of memory does that)"
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()]
    own = [line.removeprefix("tether: ") for line in lines if line.startswith("tether: ")]
    return visible(shortened((own or lines or [f"exit code {code}"])[-1], LONGEST_CAUSE))


def _newest_step(folder: Path) -> int:
    """The step of the last checkpoint; 0 where there is none."""
    return max((step_of(path) for path in list_checkpoints(folder / CHECKPOINTS)), default=0)


def _until_nobody_writes(folder: Path, signals: "_Signals", say: Callable[[str], None]) -> None:
    """Ranks whose launcher was killed end by themselves, and until then the first of them holds the run folder."""
    deadline, told = time.monotonic() + grace_seconds() + STALE_SECONDS, False
    while (holder := lock_holder(folder)) and not signals.received:
        if time.monotonic() > deadline:
            raise RankFailure(f"run folder '{folder}' is still written by {holder}; end that process, and continue with --resume")
        if not told:
            say(f"waiting for {holder} to end, which still writes the run folder")
            told = True
        signals.wait(POLL_SECONDS)


class _Signals:
    """Ctrl-C, SIGTERM and SIGHUP while it is entered: passed on to the attempt that runs, and remembered, so that none follows."""

    _HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.received = 0
        self._child: Child | None = None
        self._came = threading.Event()

    def __enter__(self) -> "_Signals":
        handled = [number for number in self._HANDLED if signal.getsignal(number) != signal.SIG_IGN]
        self._previous = {number: signal.signal(number, self._handle) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        self._came.set()
        if self._child is not None:
            self._child.send(signal.Signals(number).name.removeprefix("SIG").encode() + b"\n")

    @contextmanager
    def passed_to(self, child: Child) -> Iterator[None]:
        self._child = child
        if self.received:  # while it was started
            self._handle(self.received, None)
        try:
            yield
        finally:
            self._child = None

    def wait(self, seconds: float) -> None:
        """For so long, or until a signal has come."""
        self._came.wait(seconds)
