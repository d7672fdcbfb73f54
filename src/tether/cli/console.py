"""The console of the verbs: safe to show what models write, and standard output that a long run survives.

A run must not end because nobody can be told about it. A pipe that is closed (`tether train ... | head -1`) is taken as the wish to stop: the run
ends as after Ctrl-C, with a checkpoint. Anything else that keeps lines from being written (a terminal that vanished, a log on a full disk)
silences the output, once said on the other stream, and the run goes on.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions
from rich.segment import Segment
from rich.table import Table

from tether.core.text import visible

FILE_WIDTH = 240
"""Characters of a table's line in a file or a pipe."""


class SafeConsole(Console):
    """A Console that never passes on what is shown as commands to the terminal: control characters are spelled out.

    Rich knows what it sends to the terminal itself (colours, cursor) from what it is given to show; only the latter is changed. So a model
    that writes escape sequences cannot change a title, a colour or the clipboard of whoever looks at its rollouts. Brackets and colons are text,
    too, unless a call asks for rich's markup: names of models and runs may hold them.
    """

    def __init__(self, **look: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **look})

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)

    def say(self, line: str, style: str | None = None) -> None:
        """A line as it is: whatever it quotes, brackets and numbers too, is shown plainly and not broken."""
        self.print(line, style=style, highlight=False, markup=False, soft_wrap=True)


def show_table(table: Table, below: str = "") -> None:
    """A table on standard output, and a line below it; a file or a pipe has no margin, so no cell is folded there."""
    console = SafeConsole(highlight=False)
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(table)
    if below:
        console.say(below, "dim")


def plain_table(*titles: str, right: Iterable[str] = (), **look: Any) -> Table:
    """A table without lines, the columns of the titles `right` set to the right; `look` is rich's."""
    table = Table(box=None, pad_edge=False, **look)
    for title in titles:
        table.add_column(title, justify="right" if title in right else "left")
    return table


class SafeStream:
    """A text stream whose writes never raise; whatever else is asked of it goes to the stream itself."""

    def __init__(self, stream: TextIO, on_closed: Callable[[], None], other: TextIO | None = None) -> None:
        """`on_closed` is called once, when nobody reads any more; `other` is told once when nothing can be written."""
        self._stream, self._on_closed, self._other = stream, on_closed, other
        self._silent = False

    def write(self, text: str) -> int:
        if not self._silent:
            self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        if not self._silent:
            self._try(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, act: Callable[[], Any]) -> None:
        try:
            act()
        except UnicodeEncodeError as unknown:  # a terminal that knows few letters: the others are replaced
            encoding, text = self._stream.encoding or "ascii", str(unknown.object)
            self._try(lambda: self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding)))
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self._silent = True
            discard_output(self._stream)
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                self._on_closed()
            elif self._other is not None:
                SafeStream(self._other, lambda: None).write(f"tether: cannot write to the console ({error}); the run goes on without it\n")


def discard_output(stream: TextIO) -> None:
    """Let what is written to this stream from now on, by anybody, go nowhere: the interpreter flushes it once more when it exits."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):  # a stream without a file of its own, or one that is closed: nothing is left to lose
        return


@contextmanager
def surviving_console(on_closed: Callable[[], None]) -> Iterator[None]:
    """Standard output and standard error cannot end what runs in this block."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = SafeStream(out, on_closed, err), SafeStream(err, lambda: None)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err
