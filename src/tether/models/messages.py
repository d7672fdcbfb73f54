"""Chat messages as clients send them, to tokens: tools, tool calls and results, and exact continuation of what was sampled.

`read_messages` takes the messages of a request in every spelling that clients use and brings them into one: texts instead of content parts,
arguments of calls as values, `developer` as `system`. Two requests that mean the same conversation are then equal, whatever a framework dropped
or rewrote on the way (reasoning, null for empty content, the order of keys).

`AgentChat` renders them with the tokenizer's chat template. Where a request continues a recorded reply, its prompt is the recorded tokens and,
behind them, the *joint*: the text that the template writes between that reply and the next one. It is found by rendering the conversation with a
marker in the reply's place and taking what follows the marker. What was sampled is never rendered again.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2.exceptions import TemplateError

from tether.core.enums import FinishReason
from tether.core.errors import BadInput, did_you_mean
from tether.core.grammar import THINK_OPEN
from tether.core.images import IMAGE_IDS, Image, SentImages
from tether.core.importing import import_object
from tether.core.text import unusable
from tether.core.types import Completion
from tether.models.chat import ChatFormat
from tether.models.tool_formats import FORMATS, SCHEMA, Parser, Reply, Tool, ToolCall, UnreadableCall, read_reply

ROLES = ("system", "developer", "user", "assistant", "tool")
AUTO = "auto"
_MARKER = "\u27e6the reply stands here\u27e7"
_PROBE = ToolCall("probe_tool", {"word": "value", "count": 3})
"""The call that is rendered to find out a template's format: a text and a number, because formats differ in how they write them."""
_PROBE_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": _PROBE.name,
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}, "count": {"type": "integer"}}},
    },
}


@dataclass(frozen=True, slots=True)
class Message:
    """One message, in the one spelling that conversations are compared in."""

    role: str
    text: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    """Tool calls of an assistant: name, and arguments as JSON with sorted keys."""
    reasoning: str | None = None
    """Of an assistant; not compared, since many harnesses do not send it back."""
    call_ids: tuple[str, ...] = ()
    """Of an assistant's calls, or of the call that a tool message answers; not compared."""
    name: str | None = None
    """Of the tool that a message comes from, where it is said; not compared."""
    images: tuple[Image, ...] = ()
    """Those whose markers stand in the text: somebody has to hold them."""

    @property
    def key(self) -> tuple[Any, ...]:
        """What must be equal for two messages to be the same."""
        return (self.role, self.text.strip() if self.role == "assistant" else self.text, self.calls)

    def for_template(self) -> dict[str, Any]:
        """As templates read it: arguments as values, which templates write themselves."""
        shown: dict[str, Any] = {"role": self.role, "content": self.text}
        if self.calls:
            shown["tool_calls"] = [
                {"id": _template_id(call_id), "type": "function", "function": {"name": name, "arguments": json.loads(arguments)}}
                for (name, arguments), call_id in zip(self.calls, self.call_ids, strict=True)
            ]
        if self.reasoning is not None:
            shown["reasoning_content"] = self.reasoning
        if self.role == "tool":
            shown |= {"tool_call_id": _template_id(self.call_ids[0])} if self.call_ids else {}
            shown |= {"name": self.name} if self.name else {}
        return shown


def assistant_message(reply: Reply, call_ids: Sequence[str]) -> Message:
    """A reply as the message that a client sends back."""
    calls = tuple((call.name, _canonical(call.arguments)) for call in reply.calls)
    return Message("assistant", reply.content, calls, reply.reasoning, tuple(call_ids))


def read_messages(messages: Any, sees: bool = False) -> tuple[Message, ...]:
    """The messages of a request; BadInput names the first that cannot be used. `sees`: they may hold images, which become markers."""
    if not isinstance(messages, list) or not messages:
        raise BadInput("messages must be a list with at least one message")
    sent = SentImages() if sees else None
    return tuple(_read_message(message, number, sent) for number, message in enumerate(messages))


def _read_message(message: Any, number: int, sent: SentImages | None) -> Message:
    def refuse(why: str) -> BadInput:
        return BadInput(f"messages[{number}] {why}")

    if not isinstance(message, dict):
        raise refuse(f"is a {type(message).__name__}; send an object with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise refuse(f"has the role {role!r:.40}; send one of {', '.join(ROLES)}")
    num_before = len(sent.held) if sent is not None else 0
    text = _text_of(message.get("content"), refuse, sent)
    calls, call_ids = [], []
    made = message.get("tool_calls") or []
    for call in made if isinstance(made, list) else [made]:
        function = call.get("function") if isinstance(call, dict) else None
        if role != "assistant" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise refuse("has tool_calls that are no function calls of an assistant; send them as they came")
        calls.append((function["name"], _canonical(_arguments(function.get("arguments"), refuse))))
        call_ids.append(str(call.get("id", "")))
    if message.get("function_call") is not None:
        raise refuse("has function_call, which tool_calls replaced; send tool_calls")
    if role == "tool" and message.get("tool_call_id") is not None:
        call_ids.append(str(message["tool_call_id"]))
    reasoning = message.get("reasoning_content", message.get("reasoning"))
    if not text and not calls and role == "user":
        raise refuse("has no content; send a text")
    return Message(
        "system" if role == "developer" else str(role),
        text,
        tuple(calls),
        reasoning if isinstance(reasoning, str) and role == "assistant" else None,
        tuple(call_ids),
        message["name"] if isinstance(message.get("name"), str) else None,
        tuple(sent.held[num_before:]) if sent is not None else (),
    )


def _text_of(content: Any, refuse: Callable[[str], BadInput], sent: SentImages | None) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise refuse(f"has content that is a {type(content).__name__}; send a text, or parts of text")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in ("image_url", "input_image") and sent is not None:
            shown = part.get("image_url")
            try:
                texts.append(sent.read(shown.get("url") if isinstance(shown, dict) else shown, "image_url").marker)
            except BadInput as error:
                raise refuse(f"has a part of which {error}") from error
            continue
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(part.get("text", part.get("refusal")), str):
            reads = "text only" if sent is None else "text, and images as image_url with a data URL"
            raise refuse(f"has a part of type {kind!r:.40}; the model reads {reads}")
        texts.append(part.get("text", part.get("refusal")))
    return "".join(texts)


def _arguments(given: Any, refuse: Callable[[str], BadInput]) -> dict[str, Any]:
    try:
        value = json.loads(given) if isinstance(given, str) and given.strip() else given or {}
    except (ValueError, RecursionError):
        raise refuse("has a tool call whose arguments are no JSON; send them as they came") from None
    if not isinstance(value, dict):
        raise refuse("has a tool call whose arguments are no object; send them as they came")
    if (problem := unusable(value)) is not None:
        raise refuse(f"has a tool call that {problem}")
    return value


def _canonical(arguments: Mapping[str, Any]) -> str:
    return json.dumps(arguments, sort_keys=True, ensure_ascii=False)


def _template_id(call_id: str) -> str:
    """Nine letters and digits, which is what some templates insist on."""
    kept = "".join(letter for letter in call_id if letter.isalnum())
    return (kept + "0" * 9)[-9:] if len(kept) >= 9 else kept.rjust(9, "0")


def read_tools(tools: Any) -> tuple[Tool, ...]:
    """The function tools of a request."""
    if not tools:
        return ()
    if not isinstance(tools, list):
        raise BadInput(f"tools is a {type(tools).__name__}; send a list of function tools")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type", "function") != "function" or not isinstance(function.get("name"), str):
            kind = tool.get("type") if isinstance(tool, dict) else type(tool).__name__
            raise BadInput(f"tools[{number}] is of type {kind!r:.40}; send function tools with a name")
        if function.get("parameters") is not None and not isinstance(function["parameters"], dict):
            raise BadInput(f"tools[{number}] has parameters that are no JSON schema; send an object")
    return tuple({"type": "function", "function": tool["function"]} for tool in tools)


class AgentChat:
    """The chat template of one tokenizer, for conversations of messages and tools."""

    def __init__(self, chat: ChatFormat, tool_format: str = AUTO) -> None:
        """`tool_format`: auto, a name of `tool_formats.FORMATS`, schema, or module:function."""
        self._chat = chat
        self.tokenizer = chat.tokenizer
        self.sees = chat.sees
        self._wanted = tool_format
        self._parsers: dict[str, Parser] = {}
        if tool_format != AUTO:
            self._named_parser(tool_format)

    # -------------------------------------------------------------------------------------------------------------- render

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: a text of more than so many times its tokens cannot be."""
        return max(map(len, self.tokenizer.get_vocab()), default=1)

    def num_characters(self, messages: Sequence[Message], tools: Sequence[Tool]) -> int:
        """Of all that a prompt has to hold: one that is too long whatever its tokens are need not be rendered."""
        texts = (text for message in messages for text in (message.text, *(arguments for _, arguments in message.calls)))
        return sum(map(len, texts)) + (len(json.dumps(tools)) if tools else 0)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...]:
        """Tokens of a whole conversation, up to where the reply begins."""
        return self._chat.encode(self._rendered([message.for_template() for message in messages], tools))

    def joint(
        self, before: Sequence[Message], after: Sequence[Message], tools: Sequence[Tool], response_ids: Sequence[int]
    ) -> tuple[int, ...] | None:
        """Tokens between a recorded reply and the next one: `before` ends where the reply stands, `after` follows it.

        None where the template does not show what follows a reply, so that the conversation has to be rendered whole.
        """
        shown = [message.for_template() for message in before]
        marked = [*shown, {"role": "assistant", "content": _MARKER}, *(message.for_template() for message in after)]
        try:
            text = self._rendered(marked, tools)
        except BadInput:
            return None
        if text.count(_MARKER) != 1:
            return None
        ids = self._chat.encode(text.partition(_MARKER)[2])
        ended = bool(response_ids) and response_ids[-1] in self._chat.end_of_turn_ids and ids[:1] == tuple(response_ids[-1:])
        return ids[1:] if ended else ids

    def _rendered(self, messages: list[dict[str, Any]], tools: Sequence[Tool]) -> str:
        merged = self._chat.with_system_in_front(messages)
        try:
            arguments: dict[str, Any] = {"tools": list(tools)} if tools else {}
            return self._chat.rendered(merged, **arguments)
        except TemplateError as error:
            raise BadInput(f"the chat template refuses these messages: {error}") from error
        except (TypeError, KeyError, AttributeError, ValueError) as error:  # what templates raise on what they did not foresee
            raise BadInput(f"the chat template cannot render these messages: {type(error).__name__}: {error}") from error

    def decode(self, ids: Sequence[int]) -> str:
        return self._chat.decode(tuple(ids))

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        return self._chat.tokens_before(ids, num_chars)

    def reply_text(self, completion: Completion) -> str:
        """The text of a reply, without the token that ended its turn."""
        ended = completion.finish is FinishReason.END_OF_TURN
        return self.decode(completion.token_ids[:-1] if ended else completion.token_ids)

    def opens_thinking(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a prompt ends with an opening think tag."""
        words = tuple(token for token in prompt_ids[-8:] if token < IMAGE_IDS)
        return self._chat.decode(words).rstrip().endswith(THINK_OPEN)

    # --------------------------------------------------------------------------------------------------------------- parse

    def parser(self, tools: Sequence[Tool]) -> Parser | None:
        """What reads the calls of a reply; None without tools. BadInput where the format is unknown."""
        if not tools:
            return None
        name = self.tool_format if self._wanted == AUTO else self._wanted
        return self._named_parser(name)

    def read(self, text: str, tools: Sequence[Tool], *, thinking: bool) -> Reply:
        return read_reply(text, self.parser(tools), tools, thinking=thinking)

    @property
    def tool_format(self) -> str:
        """The format that the template writes calls in, found by rendering one."""
        if AUTO not in self._parsers:
            name = self._find_format()
            self._parsers[AUTO] = self._named_parser(name)
            self._found = name
        return self._found

    def _find_format(self) -> str:
        if getattr(self.tokenizer, "response_schema", None):
            return SCHEMA
        user = {"role": "user", "content": "u"}
        call = Message("assistant", "", ((_PROBE.name, _canonical(_PROBE.arguments)),), None, ("abcdefgh1",)).for_template()
        try:
            plain = self._chat.rendered([user, {"role": "assistant", "content": _MARKER}], prompt=False, tools=[_PROBE_TOOL])
            written = self._chat.rendered([user, call], prompt=False, tools=[_PROBE_TOOL])
        except (TemplateError, TypeError, KeyError, AttributeError, ValueError):
            plain, written = "", ""
        before, _, after = plain.partition(_MARKER)
        body = written.removeprefix(before).removesuffix(after) if plain else ""
        for token in self.tokenizer.all_special_tokens:
            if token not in ("<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"):
                body = body.replace(token, "")
        for name, parse in FORMATS.items():
            try:
                _, calls = parse(body, [_PROBE_TOOL])
            except UnreadableCall:
                continue
            if calls == (_PROBE,):
                return name
        raise BadInput(
            f"the chat template of '{self.tokenizer.name_or_path}' writes tool calls in no format that is known here; name one as "
            f"agent.tool_format, or --tool-format of a server ({', '.join((*FORMATS, SCHEMA))}, or module:function)"
        )

    def _named_parser(self, name: str) -> Parser:
        if name in self._parsers:
            return self._parsers[name]
        if name in FORMATS:
            parse = FORMATS[name]
        elif name == SCHEMA:
            parse = self._schema_parser()
        elif ":" in name:
            parse = import_object(name, "tool format", callable)
        else:
            raise BadInput(f"agent.tool_format '{name}' is not known: {did_you_mean(name, (*FORMATS, SCHEMA))}")
        self._parsers[name] = parse
        return parse

    def _schema_parser(self) -> Parser:
        tokenizer: Any = self.tokenizer
        if not getattr(tokenizer, "response_schema", None):
            raise BadInput(f"agent.tool_format is schema, and the tokenizer of '{tokenizer.name_or_path}' has no response schema")

        def parse(text: str, tools: Sequence[Tool]) -> tuple[str, tuple[ToolCall, ...]]:
            try:
                parsed = tokenizer.parse_response(text)
                functions = [call["function"] for call in parsed.get("tool_calls") or []]
                return parsed.get("content") or "", tuple(ToolCall(each["name"], dict(each["arguments"])) for each in functions)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UnreadableCall(str(error)) from error

        return parse
