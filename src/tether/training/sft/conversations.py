"""Demonstrations from a JSONL file of conversations, one a line, checked line by line before torch is loaded.

    {"messages": [{"role": "system", "content": "..."}, {"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}
    {"prompt": "...", "response": "..."}

The system message is optional; user and assistant take turns, and the assistant has the last word. Every assistant message is a response to
be imitated. Models that Tether trains reason between tags, and the prompt of a rollout ends with the opening think tag: so a response must
close it, and an opening tag that it begins with is the prompt's. Other keys of a line are ignored.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.errors import BadInput, did_you_mean
from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.training.sft.demonstration import Demonstration, Exchange, demonstrate_turns, demonstration

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat  # transformers: not before the source was checked

ROLES = ("system", "user", "assistant")
KEYS = ("messages", "prompt", "response")


@dataclass(frozen=True, slots=True)
class Conversation:
    """One line of the file."""

    system: str | None
    exchanges: list[Exchange]


def read_conversations(path: Path) -> list[Conversation]:
    """Every conversation of a file; the first line that is none is refused with its number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadInput(f"cannot read '{path}': {error.strerror}; check the path") from error
    except UnicodeDecodeError as error:
        raise BadInput(f"'{path}' is not UTF-8 text; save it as UTF-8") from error
    found = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                found.append(_conversation(line))
            except ValueError as error:
                raise BadInput(f"line {number} of '{path}': {error}") from None
    if not found:
        raise BadInput(f"'{path}' holds no conversation; write one JSON object a line, with messages or with prompt and response")
    return found


def tokenized(conversations: Sequence[Conversation], chat: "ChatFormat", end_of_turn: bool) -> list[Demonstration]:
    """The conversations in the token layout of a rollout. Those with the same system message and first question are of one prompt."""
    return [
        demonstration(
            f"{each.system}\n{each.exchanges[0][0]}",
            demonstrate_turns(chat, each.system, each.exchanges, end_of_turn),
        )
        for each in conversations
    ]


def _conversation(line: str) -> Conversation:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise ValueError(f"a {type(row).__name__}; write an object with messages, or with prompt and response")
    if "messages" in row:
        return _of_messages([_message(number, message) for number, message in enumerate(_list(row["messages"]), start=1)])
    if "prompt" in row and "response" in row:
        return Conversation(None, [(_text("prompt", row["prompt"]), _response("response", row["response"]))])
    strange = next((key for key in row if key not in KEYS), "nothing")
    raise ValueError(f"neither messages nor prompt and response, but '{strange}': {did_you_mean(strange, KEYS)}")


def _list(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is not a list of messages; write [{'role': ..., 'content': ...}, ...]")
    return messages


def _message(number: int, message: Any) -> tuple[str, str]:
    if not isinstance(message, dict) or "role" not in message or "content" not in message:
        raise ValueError(f"message {number} has no role and content; write {{'role': ..., 'content': ...}}")
    role = message["role"]
    if role not in ROLES:
        raise ValueError(f"message {number} has the unknown role {role!r}: {did_you_mean(str(role), ROLES)}")
    content = message["content"]
    return role, _response(f"message {number}", content) if role == "assistant" else _text(f"message {number}", content)


def _of_messages(messages: list[tuple[str, str]]) -> Conversation:
    system = messages[0][1] if messages[0][0] == "system" else None
    rest = messages if system is None else messages[1:]
    roles = [role for role, _ in rest]
    if not roles or roles != ["user", "assistant"] * (len(roles) // 2):
        raise ValueError(
            f"the roles are {', '.join(role for role, _ in messages)}; after an optional system message, user and assistant alternate"
        )
    texts = [text for _, text in rest]
    return Conversation(system, list(zip(texts[::2], texts[1::2], strict=True)))


def _text(what: str, content: Any) -> str:
    if not isinstance(content, str) or not content.strip():
        raise ValueError(f"{what} is {'empty' if isinstance(content, str) else 'no text'}; write it as a string")
    return content


def _response(what: str, content: Any) -> str:
    """What follows the opening think tag, which the prompt ends with."""
    text = _text(what, content)
    if THINK_CLOSE not in text:
        raise ValueError(f"{what} has no {THINK_CLOSE}; write the response as {THINK_OPEN} reasoning {THINK_CLOSE} and then the answer")
    return text.lstrip().removeprefix(THINK_OPEN) if text.lstrip().startswith(THINK_OPEN) else text
