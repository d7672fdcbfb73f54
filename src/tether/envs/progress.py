"""A line about every load that takes longer than two seconds: what is read, how far it is, and how long it took.

Data files, corpora and indexes of real size take minutes, and a program that says nothing for minutes looks dead. A load that is quick says
nothing. The lines are warnings of the logger `tether.envs.progress`, because Python shows nothing below a warning unless it is asked to.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

FIRST_SECONDS = 2.0
"""A load that takes longer is announced."""
EVERY_SECONDS = 10.0
"""Between two lines of the same load."""

_LOG = logging.getLogger(__name__)

T = TypeVar("T")


def with_progress(items: Iterable[T], doing: str, unit: str, clock: Callable[[], float] = time.monotonic) -> Iterator[T]:
    """The items as they are. `doing` and `unit` make the line: "metamathqa: reading train.jsonl: 40,000 rows in 2 s, continuing".

    The time of whoever takes the items counts too: parsing a row, or indexing a document.
    """
    started = clock()
    due = started + FIRST_SECONDS
    count, said = 0, False
    for count, item in enumerate(items, 1):
        yield item
        now = clock()
        if now >= due:
            _LOG.warning("%s: %s %s in %.0f s, continuing", doing, f"{count:,}", unit, now - started)
            due, said = now + EVERY_SECONDS, True
    seconds = clock() - started
    if said or seconds >= FIRST_SECONDS:
        _LOG.warning("%s: %s %s, done in %.1f s", doing, f"{count:,}", unit, seconds)
