"""What environments print: shown on standard error, with control characters spelled out, and no more than a few pages of it.

An environment may print megabytes, clear the screen, or print where a verb prints JSON. In this process `sys.stdout` and `sys.stderr` are replaced,
once, by streams that know whether the thread that writes is inside an environment's code (`environment_output`); everything else passes
through. The output of an environment's own process comes over a pipe (envs/remote/hosts.py) to `show_output`.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tether.core.text import visible

MOST_SHOWN = 20_000
"""Characters of all environments' output together that are shown."""

_LOCK = threading.Lock()
_room = MOST_SHOWN


class _Inside(threading.local):
    depth = 0


_INSIDE = _Inside()


class _Watched:
    """A standard stream. What a thread writes inside an environment's code goes to `show_output`."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: Any) -> Any:
        if not _INSIDE.depth or not isinstance(text, str | bytes | bytearray | memoryview):
            return self.stream.write(text)
        show_output(text if isinstance(text, str) else bytes(text).decode("utf-8", "replace"))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    @property
    def buffer(self) -> Any:
        return self if _INSIDE.depth else self.stream.buffer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def environment_output() -> Iterator[None]:
    """The block runs an environment's code: what it prints is shown as its output."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Watched):
            setattr(sys, name, _Watched(stream))
    _INSIDE.depth += 1
    try:
        yield
    finally:
        _INSIDE.depth -= 1


def show_output(text: str) -> None:
    """Show what an environment printed, as far as there is room."""
    global _room
    with _LOCK:
        room, _room = _room, max(0, _room - len(text))
    stream = sys.stderr
    while isinstance(stream, _Watched):
        stream = stream.stream
    if stream is None or not room:
        return
    stream.write(visible(text[:room]))
    if len(text) >= room:
        stream.write(f"\n(what environments print beyond {MOST_SHOWN:,} characters is not shown)\n")
    stream.flush()
