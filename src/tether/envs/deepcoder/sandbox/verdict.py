"""From what came out of a cell to a `Report`.

The facts are the supervisor's and hold. The message is from the program's own process: it decides nothing that the program could not decide
by running differently, and it is read as text from an enemy, so that the worst it can do is to be unreadable.
"""

import hmac
import json
import os
import signal
import sys
from dataclasses import dataclass
from typing import Any

from tether.envs.deepcoder.sandbox import codec
from tether.envs.deepcoder.sandbox.jobs import CallTask, Ending, Report, StdinTask, Task

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
        """The message in the bytes, empty if it is none. The first byte only says that the program had begun."""
        head, _, value = data[1:].partition(b"\n")
        try:
            said = codec.parse(head[:_HEAD].decode())
        except ValueError:
            return cls()
        if not isinstance(said, dict) or not all(isinstance(item, str) for item in said.values()):
            return cls()
        ending: Ending | None = next((name for name in ("ok", "error", "memory", "output") if name == said.get("ending")), None)
        return cls(ending, said.get("detail", ""), said.get("word", ""), value)


def report(task: Task, word: str, frames: list[bytes]) -> Report:
    """How the task went, from the three frames its cell sent."""
    facts: dict[str, Any] = json.loads(frames[0])
    ending, value, detail = _ending(task, word, facts, frames[2])
    return Report(ending, frames[1].decode("utf-8", "replace"), value, _one_line(detail), facts["seconds"])


def _ending(task: Task, word: str, facts: dict[str, Any], result: bytes) -> tuple[Ending, Any, str]:
    if facts["limit"]:
        ending, words = facts["limit"]
        return ending, None, words
    if not facts["started"]:
        reason = result.decode("utf-8", "replace") or "exit code {code}, signal {signal}".format(**facts)
        return "killed", None, f"the cell could not be prepared ({reason})"
    if facts["signal"]:
        return "killed", None, f"ended by {_signal_name(facts['signal'])}"
    message = Message.read(result)
    if facts["code"]:
        ending = message.ending if message.ending and message.ending != "ok" else "error"
        return ending, None, message.detail or f"exit code {facts['code']}"
    if isinstance(task, StdinTask):
        return "ok", None, ""
    if message.ending != "ok":
        return "error", None, "the program ended before it was done"
    if isinstance(task, CallTask):
        return _value(message)
    if not hmac.compare_digest(message.word.encode("utf-8", "replace"), word.encode()):
        return "error", None, "the program ended before the script did"
    return "ok", None, ""


def _value(message: Message) -> tuple[Ending, Any, str]:
    try:
        return "ok", codec.decode(message.value.decode()), ""
    except ValueError as error:
        return "error", None, f"the value cannot be read: {error}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _one_line(detail: str) -> str:
    """Printable, of bounded length, and without the place of this machine's Python."""
    line = detail[: 2 * _DETAIL]
    for place in _PLACES:
        line = line.replace(place, "<python>")
    return "".join(letter if letter.isprintable() else " " for letter in line).strip()[:_DETAIL]
