"""What the environment and the sandbox exchange: a task is one run of a program, a report is its result.

Expected answers never enter a task: the sandbox hands back what the program printed or returned, and the comparison is made outside,
where the program cannot reach it.

`read_report` turns the output of a sandbox into a `Report`. The facts come from the supervisor and can be trusted. The message comes from the
program's own process: it decides nothing that the program could not decide by running differently, and it is parsed as untrusted text.
"""

import hmac
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from tether.core import codec
from tether.core.child import signal_name
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
    """An object that runs programs: the sandbox."""

    def run(self, code: str, tasks: Sequence[Task]) -> list[Report]:
        """One report per task, in order; tasks run concurrently up to a set number."""
        ...


class SandboxUnavailable(TetherError):
    """This machine does not support the requested isolation; the message says what is missing and what the alternative is."""

    exit_code = 2


_HEAD = 4096
_DETAIL = 400
_PLACES = sorted({os.path.dirname(os.__file__), sys.prefix, sys.base_prefix} - {"/", "/usr", "/usr/local"}, key=len, reverse=True)
"""Where this Python is, which may name its user."""


@dataclass(frozen=True, slots=True)
class Message:
    """What the program's process said about its end."""

    ending: Ending | None = None
    detail: str = ""
    word: str = ""
    value: bytes = b""

    @classmethod
    def read(cls, data: bytes) -> "Message":
        """The message in the bytes, empty if it is none. The first byte only says that the program has started."""
        head, _, value = data[1:].partition(b"\n")
        try:
            said = codec.parse(head[:_HEAD].decode())
        except ValueError:
            return cls()
        if not isinstance(said, dict) or not all(isinstance(item, str) for item in said.values()):
            return cls()
        ending: Ending | None = next((name for name in ("ok", "error", "memory", "output") if name == said.get("ending")), None)
        return cls(ending, said.get("detail", ""), said.get("word", ""), value)


def read_report(task: Task, word: str, frames: list[bytes]) -> Report:
    """How the task went, from the three frames its sandbox sent."""
    facts: dict[str, Any] = json.loads(frames[0])
    ending, value, detail = _ending(task, word, facts, frames[2])
    return Report(ending, frames[1].decode("utf-8", "replace"), value, _one_line(detail), facts["seconds"])


def _ending(task: Task, word: str, facts: dict[str, Any], result: bytes) -> tuple[Ending, Any, str]:
    if facts["limit"]:
        ending, words = facts["limit"]
        return ending, None, words
    if not facts["started"]:
        reason = result.decode("utf-8", "replace") or "exit code {code}, signal {signal}".format(**facts)
        return "killed", None, f"the sandbox could not be prepared ({reason})"
    if facts["signal"]:
        return "killed", None, f"ended by {signal_name(facts['signal'])}"
    message = Message.read(result)
    if facts["code"]:
        ending = message.ending if message.ending and message.ending != "ok" else "error"
        return ending, None, message.detail or f"exit code {facts['code']}"
    if isinstance(task, StdinTask):
        return "ok", None, ""
    if message.ending != "ok":
        return "error", None, "the program ended before it was done"
    if isinstance(task, CallTask):
        try:
            return "ok", codec.decode(message.value.decode()), ""
        except ValueError as error:
            return "error", None, f"the value cannot be read: it {error}"
    if not hmac.compare_digest(message.word.encode("utf-8", "replace"), word.encode()):
        return "error", None, "the program ended before the script did"
    return "ok", None, ""


def _one_line(detail: str) -> str:
    """Printable, of bounded length, and without the place of this machine's Python."""
    line = detail[: 2 * _DETAIL]
    for place in _PLACES:
        line = line.replace(place, "<python>")
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()[:_DETAIL]
