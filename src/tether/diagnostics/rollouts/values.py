"""Values of a record, looked up and checked: text, numbers, flags, token ids, chat messages; and prompt and answer as turns. Each refusal names the field.

Every assistant message of an answer is a turn; it saw the prompt and all messages before it. A message may carry its reasoning in a field of
its own (`reasoning_content`, as servers return it).
"""

import json
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

from tether.diagnostics.rollouts.record import BadRecord, Rollout, prompt_group

Record = Mapping[str, Any]
"""One line or row, as the container gives it."""

_SHOWN = 40
LARGEST = 1e50
"""Of a number: variances, and products of them, stay finite."""
_DIGITS = 20
"""Of a step that is written as text."""
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which a message may keep its reasoning apart from its content."""
THINKING_BLOCKS = ("thinking", "reasoning", "reasoning.text")
"""Types of the blocks of a message that hold reasoning."""
MISSING: Any = object()
"""What `lookup` returns where a record does not have a field."""


def lookup(record: Record, path: str) -> Any:
    """The value under a key, or at the end of a dotted walk through objects and lists. A key "*/NAME" is the first one with any single tag.

    >>> lookup({"choices": [{"text": "a"}], "info": {"Sokoban/success": True}}, "choices.0.text")
    'a'
    >>> lookup({"info": {"Sokoban/success": True}}, "info.*/success")
    True
    """
    if path in record:
        return record[path]
    value: Any = record
    for key in path.split("."):
        if isinstance(value, Mapping) and key.startswith("*/"):
            key = next((name for name in value if name.count("/") == 1 and name.endswith(key[1:])), key)
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return MISSING
    return value


def text(value: Any, field: str) -> str | None:
    """A string or null. Half a surrogate pair, which JSON can spell and no tokenizer takes, is refused."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise BadRecord(f"{field} is {shown(value)}; expected text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise BadRecord(
            f"{field} holds half a character at {error.start} (a lone surrogate, {value[error.start]!r}); expected text"
        ) from error
    return value


def number(value: Any, field: str) -> float | None:
    """A number; None for null and for what is not finite (frameworks write NaN where no reward applied)."""
    value = _scalar(value)
    if value is None:
        return None
    if not isinstance(value, int | float):
        raise BadRecord(f"{field} is {shown(value)}; expected a number")
    try:
        result = float(value)
    except OverflowError:
        return None
    if math.isfinite(result) and abs(result) > LARGEST:
        raise BadRecord(f"{field} is {result:g}; numbers beyond {LARGEST:g} cannot be computed with")
    return result if math.isfinite(result) else None


def total(value: Any, field: str) -> float | None:
    """A number, or the sum of a list of numbers, such as a reward for every token; None where no number is finite."""
    if not isinstance(value, list | tuple):
        return number(value, field)
    parts = [part for part in (number(part, f"{field}[{index}]") for index, part in enumerate(value)) if part is not None]
    return math.fsum(parts) if parts else None


def step(value: Any, field: str = "step") -> int | None:
    """A whole number or null; 3.0 is 3, as in tables that once held a gap, and "3" is 3, as older TRL wrote it."""
    if isinstance(value, str) and value.isdecimal() and len(value) > _DIGITS:
        raise BadRecord(f"{field} has {len(value)} digits; expected the number of a step")
    found = number(int(value) if isinstance(value, str) and value.isdecimal() else value, field)
    if found is None:
        if value is not None and value == value:  # not NaN, which fills the gaps of tables
            raise BadRecord(f"{field} is too large; expected the number of a step")
        return None
    if isinstance(value, bool) or found != int(found):
        raise BadRecord(f"{field} is {shown(value)}; expected a whole number")
    return int(found)


def flag(value: Any, field: str) -> bool | None:
    """True, false, 1, 0 or null."""
    value = _scalar(value)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool | int | float) and value in (0, 1):
        return bool(value)
    raise BadRecord(f"{field} is {shown(value)}; expected true or false")


def outcome(value: Any) -> bool | None:
    """A measure that may happen to be yes or no: None where it is a share, a word, or anything else."""
    return bool(value) if isinstance(value, bool | int | float) and value in (0, 1) else None


def token_ids(value: Any, field: str) -> tuple[int, ...] | None:
    """A list of token ids or null."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()  # an array or a tensor, as rows in memory hold them
    if not isinstance(value, list | tuple) or any(type(token) is not int or token < 0 for token in value):
        raise BadRecord(f"{field} is {shown(value)}; expected a list of token ids, whole numbers from 0")
    return tuple(value)


def messages(value: Any, field: str) -> list[dict[str, Any]]:
    """Chat messages, without the nulls that a table adds to make all rows alike."""
    if not isinstance(value, list) or not value:
        raise BadRecord(f"{field} is {shown(value)}; expected a list of messages")
    checked = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise BadRecord(f"{field}[{index}] is {shown(message)}; expected a message with role and content")
        checked.append(_without_nulls(message, f"{field}[{index}]"))
    return checked


def mapping(value: Any, field: str) -> Record:
    """An object."""
    if not isinstance(value, Mapping):
        raise BadRecord(f"{field} is {shown(value)}; expected an object")
    return value


def with_tool_calls(conversation: Any) -> Any:
    """Messages whose tool calls are objects again, as chat templates expect them; anything else as it is."""
    if not isinstance(conversation, list):
        return conversation
    return [
        {**message, "tool_calls": [_tool_call(parsed(call, "a tool call")) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in conversation
    ]


def parsed(value: Any, field: str) -> Any:
    """What a text of JSON says; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRecord(f"{field} is {shown(value)}; expected JSON") from error


def _tool_call(call: Any) -> Any:
    if isinstance(call, Mapping) and "function" not in call and "name" in call:
        return {"type": "function", "id": call.get("id"), "function": {"name": call["name"], "arguments": call.get("arguments", "")}}
    return call


def is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping) and "role" in value[0]


def answer_fields(message: Record, field: str) -> dict[str, Any]:
    """Response and reasoning of an assistant's message: its content, or the text blocks of it; and the reasoning that it keeps apart."""
    content = message.get("content")
    blocks = content if isinstance(content, list) else [{"text": content}]
    blocks = [block for block in blocks if isinstance(block, Mapping)]
    texts = [block.get("text") for block in blocks if block.get("type", "text") in ("text", "output_text")]
    reasoning = next((message[name] for name in REASONING_FIELDS if message.get(name)), None)
    if reasoning is None:
        apart = message.get("thinking_blocks") or message.get("reasoning_details")
        thoughts = [*blocks, *(block for block in (apart if isinstance(apart, list) else ()) if isinstance(block, Mapping))]
        parts = [block.get("thinking") or block.get("text") for block in thoughts if block.get("type") in THINKING_BLOCKS]
        reasoning = "".join(text(part, f"{field} reasoning") or "" for part in parts) or None
    return {
        "response": "".join(text(part, f"{field}.content") or "" for part in texts),
        "reasoning": text(reasoning, f"{field} reasoning"),
        "think_implied": reasoning is not None,
    }


def shown(value: Any) -> str:
    """A value for a message: its beginning, and its type."""
    if isinstance(value, Mapping):
        value = dict(value)
    whole = value[:_SHOWN] if isinstance(value, str | list | tuple) else value  # repr of a megabyte would be thrown away
    written = repr(whole)[: 2 * _SHOWN]
    return f"{written} ({type(value).__name__})"


def _scalar(value: Any) -> Any:
    """A number out of an array or a tensor that holds one, as rows in memory may have it."""
    return value.item() if hasattr(value, "item") and getattr(value, "ndim", None) == 0 else value


def _without_nulls(value: Any, field: str) -> Any:
    """The value, all its texts checked."""
    if isinstance(value, Mapping):
        return {text(key, field): _without_nulls(part, field) for key, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_without_nulls(part, field) for part in value]
    return text(value, field) if isinstance(value, str) else value


def conversation_turns(
    prompt: Any, answer: Any, where: str, *, names: tuple[str, str] = ("prompt", "response"), group: Hashable = None, **shared: Any
) -> Iterator[Rollout]:
    """The turns of one record.

    Args:
        prompt: text or messages.
        answer: text, one message, or messages.
        names: what the file calls the two, for error messages.
        group: None to take the hash of the prompt.
        shared: further fields of every turn: step, reward, success.
    """
    shared = {"step": None, **shared, "where": where, "trajectory": where}
    if isinstance(answer, dict):
        answer = [answer]
    is_chat = not isinstance(prompt, str)
    first = messages(prompt, names[0]) if is_chat else text(prompt, names[0])
    if not first:
        raise BadRecord(f"{names[0]} is empty; there is nothing that the reasoning could depend on")
    shared["group"] = prompt_group(first) if group is None else group
    if not isinstance(answer, list):
        if answer is None:
            raise BadRecord(f"{names[1]} is null; expected text")
        shared["messages" if is_chat else "prompt"] = first
        yield Rollout(**shared, turn=0, response=text(answer, names[1]))
        return
    before = list(first) if isinstance(first, list) else [{"role": "user", "content": first}]
    turn = 0
    for index, message in enumerate(messages(answer, names[1])):
        if message["role"] == "assistant":
            yield Rollout(**shared, messages=list(before), turn=turn, **answer_fields(message, f"{names[1]}[{index}]"))
            turn += 1
        before.append(message)
    if turn == 0:
        raise BadRecord(f"{names[1]} holds no assistant message; expected at least one")


def split_conversation(conversation: list[dict[str, Any]], field: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A whole conversation as the prompt (all before the first answer) and the rest."""
    for index, message in enumerate(conversation):
        if message["role"] == "assistant":
            if index == 0:
                raise BadRecord(f"{field} begins with an assistant message; expected the prompt before it")
            return conversation[:index], conversation[index:]
    raise BadRecord(f"{field} holds no assistant message, and there is no response; expected one of them")
