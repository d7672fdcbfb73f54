"""OpenAI's chat completions as `tether serve` and the gateway both speak them: the fields of a request, and the reply, whole or as events.

Every field that clients send is taken, taken without effect, or refused by name.
"""

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import Field

from tether.core.config import Settings, validate
from tether.core.enums import FinishReason
from tether.core.errors import BadInput
from tether.core.text import unusable
from tether.core.types import Completion
from tether.models.messages import Message, read_messages, read_tools
from tether.models.tool_formats import Reply, Tool

if TYPE_CHECKING:
    from fastapi import Response

MOST_STOPS, LONGEST_STOP = 64, 1000
"""Texts that end a response are looked for behind every token; longer lists would slow everybody in the batch down."""

Budget = Annotated[int, Field(ge=1, lt=2**31)]
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Stop | Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)]
B = TypeVar("B", bound=Settings)


class StreamOptions(Settings):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextFormat(Settings):
    type: Literal["text"] = "text"


class ResponseEnd(Settings):
    """Where a response ends: fields that all routes share."""

    max_tokens: Budget | None = None
    stop: Stops | None = None
    user: str | None = None
    """Without meaning here."""

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(text for text in ([self.stop] if isinstance(self.stop, str) else self.stop or []) if text)


class ChatFields(ResponseEnd):
    """POST /v1/chat/completions: all but how tokens are drawn."""

    model: str | None = None
    """Any name: there is one model."""
    messages: list[Any]
    tools: list[Any] = []
    tool_choice: Literal["auto", "none"] = "auto"
    max_completion_tokens: Budget | None = None
    """OpenAI's newer name of max_tokens."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: TextFormat = TextFormat()
    modalities: list[Literal["text"]] = ["text"]
    # Without meaning here.
    store: bool = False
    metadata: dict[str, Any] = {}
    parallel_tool_calls: bool = True
    service_tier: str | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @property
    def budget(self) -> int | None:
        """Tokens of the reply, where they are limited."""
        return min((limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None), default=None)

    def conversation(self, sees: bool) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
        """The messages, and the tools that the model may call. `sees`: it reads images, too."""
        messages, tools = read_messages(self.messages, sees), read_tools(self.tools)
        return messages, () if self.tool_choice == "none" else tools


def read_fields(body: Mapping[str, Any], kind: type[B]) -> B:
    """The body of a request, checked field by field; null is as if the field were not there."""
    if (problem := unusable(body)) is not None:
        raise BadInput(f"the request {problem}")
    return validate(kind, {key: given for key, given in body.items() if given is not None}, "request")


# --------------------------------------------------------------------------------------------------------------------- replies


def reply_message(reply: Reply, call_ids: Sequence[str]) -> dict[str, Any]:
    """What a model said, as OpenAI's API has it."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.content or (None if reply.calls else "")}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
            }
            for call, call_id in zip(reply.calls, call_ids, strict=True)
        ]
    return message


def finish_reason(completion: Completion, message: Mapping[str, Any] | None = None) -> str:
    """OpenAI's word for why a response ended."""
    if message is not None and message.get("tool_calls"):
        return "tool_calls"
    return "length" if completion.finish is FinishReason.LENGTH else "stop"


def envelope(kind: str, model: str, choices: list[dict[str, Any]], num_fed: int, num_sampled: int) -> dict[str, Any]:
    """What every reply has around its choices."""
    return {
        "id": f"{kind}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": {"prompt_tokens": num_fed, "completion_tokens": num_sampled, "total_tokens": num_fed + num_sampled},
    }


def chat_response(body: Mapping[str, Any], fields: ChatFields) -> "Response":
    """A reply as the client wants it."""
    from starlette.responses import StreamingResponse

    if not fields.stream:
        return json_response(body)
    return StreamingResponse(reply_events(body, with_usage=fields.stream_options.include_usage), media_type="text/event-stream")


def json_response(content: Mapping[str, Any], status: int = 200) -> "Response":
    from fastapi import Response

    return Response(json.dumps(content), status, media_type="application/json")


def reply_events(body: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """The same reply as the events of a stream: the whole of it is there before the first is sent."""
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": f"{body['object']}.chunk"}
    for choice in body["choices"]:
        index, message = choice["index"], choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        deltas += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(message.get("tool_calls", []))]
        for delta in deltas:
            yield _event({**head, "choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": None}]})
        last = {key: value for key, value in choice.items() if key != "message"}
        yield _event({**head, "choices": [{**last, "delta": {}}]})
    if with_usage:
        yield _event({**head, "choices": [], "usage": body["usage"]})
    yield "data: [DONE]\n\n"


def _event(chunk: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(chunk)}\n\n"
