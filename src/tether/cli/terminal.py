"""The console of the verbs: text of models, environments and files is shown with its control characters spelled out.

Rich knows what it sends to the terminal itself (colours, cursor) from what it is given to show; only the latter is changed. So a model
that writes escape sequences cannot change a title, a colour or the clipboard of whoever looks at its rollouts.
"""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.segment import Segment

from tether.core.text import visible


class SafeConsole(Console):
    """A Console that never passes on what is shown as commands to the terminal."""

    def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(visible(segment.text), segment.style)
