"""Tool calls in what a model writes: the formats that models were taught, each with a name and a parser.

A chat template says how calls are written, so which format a model has is found out by rendering one call with the template and reading it back:
the format whose parser returns that very call is the template's. A template that none of them reads has an unknown format, which is
refused, never guessed. A reply that holds a call which cannot be read goes to the agent as text, and is counted.

hermes    <tool_call>{"name": ..., "arguments": {...}}</tool_call>; Qwen2.5, Qwen3, Hermes and others
xml       <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>; Qwen3-Coder, Qwen3.5
llama3    {"name": ..., "parameters": {...}} as the whole reply, also behind <|python_tag|>
mistral   [TOOL_CALLS][{"name": ..., "arguments": {...}}], and [TOOL_CALLS]NAME[ARGS]{...}
schema    what the tokenizer's own response schema says (transformers)
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.grammar import THINK_CLOSE, THINK_OPEN
from tether.core.text import unusable

Tool = Mapping[str, Any]
"""A function tool as OpenAI's API has it: {"type": "function", "function": {"name", "description", "parameters"}}."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model wrote."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Reply:
    """What a response says, in parts."""

    content: str
    """The text outside of reasoning and calls."""
    reasoning: str | None = None
    calls: tuple[ToolCall, ...] = ()
    unparsed: int = 0
    """1 where the response begins a call that cannot be read: all of it is then content."""


class UnreadableCall(ValueError):
    """A call was begun and cannot be read."""


Parser = Callable[[str, Sequence[Tool]], tuple[str, tuple[ToolCall, ...]]]
"""Text and tools to the content outside of the calls, and the calls; UnreadableCall where one was begun and cannot be read."""


# ------------------------------------------------------------------------------------------------------------------ formats

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS = "[TOOL_CALLS]", "[ARGS]"


def _hermes(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
    content, blocks = _blocks(text)
    return content, tuple(_call(_json_object(_single_braces(block)), "arguments") for block in blocks)


def _xml(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
    content, blocks = _blocks(text)
    return content, tuple(_xml_call(block, tools) for block in blocks)


def _llama3(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
    tagged = text.strip().startswith(PYTHON_TAG)
    body = text.strip().removeprefix(PYTHON_TAG).strip()
    if not body.startswith("{") or not (tagged or '"name"' in body):
        return text, ()
    return "", tuple(_call(value, "parameters") for value in _json_sequence(body, ";"))


def _mistral(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
    content, *parts = text.split(TOOL_CALLS)
    calls: list[ToolCall] = []
    for part in parts:
        name, tagged, arguments = part.partition(ARGS)
        if tagged:
            calls.append(_call({"name": name.strip(), "arguments": _json_object(arguments)}, "arguments"))
        else:
            values = _json(part)
            calls += [_call(value, "arguments") for value in (values if isinstance(values, list) else [values])]
    return content, tuple(calls)


FORMATS: dict[str, Parser] = {"hermes": _hermes, "xml": _xml, "llama3": _llama3, "mistral": _mistral}
SCHEMA = "schema"


def _blocks(text: str) -> tuple[str, list[str]]:
    """The text outside of tool_call tags, and what stands in each pair; the last may be left open, as the end of the turn closes it too."""
    content, *rest = text.split(CALL_OPEN)
    blocks, outside = [], [content]
    for part in rest:
        block, _, after = part.partition(CALL_CLOSE)
        blocks.append(block)
        outside.append(after)
    return "".join(piece for piece in outside if piece.strip()) if rest else text, blocks


def _single_braces(block: str) -> str:
    """A call without the second braces in which the template of Qwen2.5-Coder shows it to the model, which then writes it so."""
    text = block.strip()
    return text[1:-1] if text.startswith("{{") and text.endswith("}}") else text


def _xml_call(block: str, tools: Sequence[Tool]) -> ToolCall:
    head, opened, body = block.partition("<function=")
    name, closed, body = body.partition(">")
    if head.strip() or not opened or not closed:
        raise UnreadableCall("a tool call without <function=NAME>")
    kinds = _parameter_kinds(name.strip(), tools)
    arguments: dict[str, Any] = {}
    for part in body.partition("</function>")[0].split("<parameter=")[1:]:
        key, closed, value = part.partition(">")
        if not closed or "</parameter>" not in value:
            raise UnreadableCall("a parameter that is not closed")
        text = value.rpartition("</parameter>")[0].removeprefix("\n").removesuffix("\n")
        arguments[key.strip()] = text if kinds.get(key.strip(), "string") == "string" else _json_or_text(text)
    return _call({"name": name.strip(), "arguments": arguments}, "arguments")


def _parameter_kinds(name: str, tools: Sequence[Tool]) -> dict[str, Any]:
    """The declared type of each parameter of a tool."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            properties = (function.get("parameters") or {}).get("properties") or {}
            return {key: value.get("type") for key, value in properties.items() if isinstance(value, Mapping)}
    return {}


def _call(value: Any, field: str) -> ToolCall:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(field, {}) if isinstance(value, dict) else None
    if isinstance(arguments, str):  # some models write the arguments as JSON in a text
        arguments = _json(arguments)
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise UnreadableCall(f"a tool call needs a name and {field}")
    if (problem := unusable([name, arguments])) is not None:
        raise UnreadableCall(f"a tool call that {problem}")
    return ToolCall(name, arguments)


def _json_object(text: str) -> dict[str, Any]:
    value = _json(text)
    if not isinstance(value, dict):
        raise UnreadableCall("a tool call that is no JSON object")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableCall(f"a tool call that is not JSON ({error})") from error


def _json_sequence(text: str, separator: str) -> list[Any]:
    """JSON values with a separator between."""
    values, at, decoder = [], 0, json.JSONDecoder()
    while at < len(text):
        try:
            value, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UnreadableCall(f"a tool call that is not JSON ({error})") from error
        values.append(value)
        at = len(text) - len(text[at:].lstrip(separator + " \n"))
    return values


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


# ------------------------------------------------------------------------------------------------------------------ reading


def read_reply(text: str, parse: Parser | None, tools: Sequence[Tool] = (), *, thinking: bool = False) -> Reply:
    """The parts of a response.

    Args:
        text: the response without the token that ended its turn.
        parse: the format of the model's calls; None reads none.
        tools: those of the request.
        thinking: the prompt ended with an opening think tag.
    """
    reasoning, rest = None, text
    opened = thinking or text.lstrip().startswith(THINK_OPEN)
    if opened and THINK_CLOSE in text:
        thought, _, rest = text.partition(THINK_CLOSE)
        reasoning = thought.lstrip().removeprefix(THINK_OPEN).strip()
    if parse is None:
        return Reply(rest, reasoning)
    try:
        content, calls = parse(rest, tools)
    except UnreadableCall:
        return Reply(text, None, unparsed=1)
    return Reply(content, reasoning, calls)
