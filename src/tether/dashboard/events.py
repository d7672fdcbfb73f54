"""Live updates: a stream of server-sent events that names the runs whose files have changed.

The page then asks again for what it shows, so an event carries no numbers, and a page that missed some is still right after the next. Files are
compared by inode, size and time twice a second: a watch on the file system would not work on network drives, where run folders often lie.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator

from tether.dashboard.catalogue import Catalogue, Stamp

POLL_SECONDS = 0.5
HEARTBEAT_SECONDS = 15.0
"""A line is sent at least this often: it shows both sides that the connection stands."""


async def changes(catalogue: Catalogue, names: frozenset[str], stopping: threading.Event) -> AsyncIterator[str]:
    """Events for these runs, or for all runs of the folder where no name is given; a run that appears or vanishes is a change."""
    before = await asyncio.to_thread(_stamps, catalogue, names)
    silent = 0.0
    yield "retry: 1000\nevent: ready\ndata: {}\n\n"
    while not stopping.is_set():
        await asyncio.sleep(POLL_SECONDS)
        now = await asyncio.to_thread(_stamps, catalogue, names)
        changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
        before, silent = now, silent + POLL_SECONDS
        if changed:
            yield f"event: change\ndata: {json.dumps({'runs': changed})}\n\n"
            silent = 0.0
        elif silent >= HEARTBEAT_SECONDS:
            yield ": still here\n\n"
            silent = 0.0


def _stamps(catalogue: Catalogue, names: frozenset[str]) -> dict[str, tuple[Stamp, bool]]:
    return {name: (run.stamp(), run.is_training()) for name, run in catalogue.runs().items() if not names or name in names}
