"""Servers that go away for a while: how long to wait before each further attempt, and one line when one stops answering and when it is back.

A request that can be sent again is sent again until its time-out, with growing delays. An address that has never answered is tried for a
moment only: it is more likely wrong than away. The outage of an address is said once, however many requests wait for it, and is kept until
somebody takes it for the record (`take_outages`).
"""

import logging
import threading
import time
from collections.abc import Iterator

_LOG = logging.getLogger(__name__)

FIRST_DELAY, LONGEST_DELAY = 0.1, 5.0
STRANGER_SECONDS = 1.3
"""How long an address is tried that has never answered."""
SAID_AFTER = 1.0
"""Seconds that an outage lasts before it is said: a connection that breaks now and then is none."""

_lock = threading.Lock()
_begun: dict[str, tuple[float, bool]] = {}
"""Since when an address does not answer, and whether that was said."""
_ended: dict[str, None] = {}
_known: set[str] = set()


def delays(address: str, deadline: float) -> Iterator[float]:
    """Seconds to wait before each further attempt, as long as there is time for one before the deadline (of time.monotonic)."""
    delay = FIRST_DELAY
    if address not in _known:
        deadline = min(deadline, time.monotonic() + STRANGER_SECONDS)
    while (left := deadline - time.monotonic()) > 0:
        yield min(delay, left)
        delay = min(2 * delay, LONGEST_DELAY)


def note_silence(address: str, problem: str, timeout: float) -> None:
    """An attempt has failed; said once for an address that has been silent for a moment."""
    with _lock:
        since, said = _begun.setdefault(address, (time.monotonic(), False))
        if said or time.monotonic() - since < SAID_AFTER:
            return
        _begun[address] = since, True
    _LOG.warning("%s does not answer (%s); trying again for up to %g s", address, problem, timeout)


def note_answer(address: str) -> None:
    """It has answered."""
    _known.add(address)
    if address not in _begun:  # the usual case, without the lock
        return
    with _lock:
        since, said = _begun.pop(address, (0.0, False))
        if said:
            _ended[address] = None
    if said:
        _LOG.warning("%s answers again, after %.1f s", address, time.monotonic() - since)


def take_outages() -> list[str]:
    """The addresses that were away and came back since the last call."""
    with _lock:
        found = list(_ended)
        _ended.clear()
    return found
