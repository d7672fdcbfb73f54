"""The words between the environment and the sandbox: a task is one run of a program, a report is how it went.

Expected answers never enter a task: the sandbox hands back what the program printed or returned, and the comparison is made outside,
where the program cannot reach it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tether.core.errors import TetherError

Ending = Literal["ok", "error", "timeout", "memory", "output", "killed"]
"""ok: ran to its end; error: an exception or a non-zero exit; timeout: CPU or wall limit; memory, output: that limit; killed: by a signal."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one run of a program may use."""

    cpu_seconds: float = 6.0
    wall_seconds: float = 10.0
    memory_mib: int = 512
    output_kib: int = 1024
    """Of standard output, and of the value a function returns."""
    file_kib: int = 4096
    """Of each file it writes, in a folder of its own that is gone afterwards."""
    threads: int = 16


@dataclass(frozen=True, slots=True)
class StdinTask:
    """Run the program as a script with this on its standard input; the report holds what it printed."""

    stdin: str


@dataclass(frozen=True, slots=True)
class CallTask:
    """Define the program, then call this function (or this method of its class Solution); the report holds the value."""

    function: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class ScriptTask:
    """Define the program, then run this script in the same namespace; the report is ok only if its last line was passed."""

    script: str


Task = StdinTask | CallTask | ScriptTask


@dataclass(frozen=True, slots=True)
class Report:
    """How one run went."""

    ending: Ending
    stdout: str = ""
    value: Any = None
    """What the function returned, rebuilt from JSON-like parts: None, bool, int, float, str, list, tuple, set, dict, complex, bytes."""
    detail: str = ""
    """The last line of the traceback or the limit that was reached; never a path of this machine."""
    seconds: float = 0.0


class ProgramRunner(Protocol):
    """Whatever runs programs: the sandbox."""

    def run(self, code: str, tasks: Sequence[Task]) -> list[Report]:
        """One report per task, in order; tasks run concurrently up to a set number."""
        ...


class SandboxUnavailable(TetherError):
    """This machine cannot give the isolation asked for; the message says what is missing and what else there is."""

    exit_code = 2
