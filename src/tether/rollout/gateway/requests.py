"""What agents send: a chat request of OpenAI's API, field by field, and the reply in the same form, whole or as events.

Frameworks send more than a policy in training can honour. Each field is taken, taken without effect (said once per run), or refused by name: how
tokens are drawn is the run's choice, or the log-probs would not be those of the policy.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tether.core.enums import FinishReason
from tether.core.errors import BadInput, did_you_mean
from tether.models.messages import Message, read_messages, read_tools
from tether.models.tool_formats import Tool
from tether.rollout.gateway.session import Call

TAKEN = ("model", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens", "stop", "stream", "stream_options", "n")
OVERRULED = ("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
"""Sampling is the run's: a note says so."""
IGNORED = (
    "user",
    "store",
    "metadata",
    "parallel_tool_calls",
    "service_tier",
    "reasoning_effort",
    "verbosity",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "chat_template_kwargs",
    "extra_headers",
)
"""Without meaning here."""
HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
    "modalities": (["text"],),
}
"""Fields that are taken at these values alone."""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request, read."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    max_tokens: int | None
    stops: tuple[str, ...]
    streams: bool
    wants_usage: bool
    overruled: tuple[str, ...]
    """Sampling fields that have no effect."""


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """A request's body; BadInput names the field that cannot be honoured."""
    given = {key: value for key, value in body.items() if value is not None}
    for key, value in given.items():
        if key in HARMLESS:
            if value not in HARMLESS[key]:
                allowed = " or ".join(json.dumps(each) for each in HARMLESS[key])
                raise BadInput(f"{key} is {json.dumps(value)[:80]}, which the gateway cannot honour; send {allowed}, or leave it out")
        elif key not in (*TAKEN, *OVERRULED, *IGNORED):
            raise BadInput(f"the gateway does not know the field '{key}': {did_you_mean(key, (*TAKEN, *OVERRULED, *IGNORED))}")
    budgets = [given[key] for key in ("max_tokens", "max_completion_tokens") if key in given]
    if any(not isinstance(budget, int) or isinstance(budget, bool) or budget < 1 for budget in budgets):
        raise BadInput(f"max_tokens is {budgets[0]!r:.40}; send a whole number above 0")
    stop = given.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise BadInput(f"stop is {stop!r:.40}; send a text or a list of texts")
    options = given.get("stream_options", {})
    tools = () if given.get("tool_choice") == "none" else read_tools(given.get("tools"))
    return ChatRequest(
        read_messages(given.get("messages")),
        tools,
        min(budgets, default=None),
        tuple(text for text in stops if text),
        given.get("stream") is True,
        isinstance(options, dict) and options.get("include_usage") is True,
        tuple(key for key in OVERRULED if key in given),
    )


# --------------------------------------------------------------------------------------------------------------------- replies


def reply_body(call: Call, identity: str, model: str, created: int) -> dict[str, Any]:
    """The reply to a call, as OpenAI's API has it."""
    assert call.reply is not None and call.message is not None and call.completion is not None
    message: dict[str, Any] = {"role": "assistant", "content": call.reply.content or (None if call.reply.calls else "")}
    if call.reply.reasoning is not None:
        message["reasoning_content"] = call.reply.reasoning
    if call.reply.calls:
        message["tool_calls"] = [
            {
                "id": call_id,
                "type": "function",
                "function": {"name": each.name, "arguments": json.dumps(each.arguments, ensure_ascii=False)},
            }
            for each, call_id in zip(call.reply.calls, call.message.call_ids, strict=True)
        ]
    choice = {"index": 0, "message": message, "finish_reason": _finish_reason(call), "logprobs": None}
    return {"id": identity, "object": "chat.completion", "created": created, "model": model, "choices": [choice], "usage": _usage(call)}


def _finish_reason(call: Call) -> str:
    assert call.completion is not None and call.reply is not None
    if call.reply.calls:
        return "tool_calls"
    return "length" if call.completion.finish is FinishReason.LENGTH else "stop"


def _usage(call: Call) -> dict[str, int]:
    assert call.completion is not None
    fed, sampled = len(call.prompt), len(call.completion.token_ids)
    return {"prompt_tokens": fed, "completion_tokens": sampled, "total_tokens": fed + sampled}


def reply_events(body: Mapping[str, Any], *, with_usage: bool) -> Iterator[str]:
    """The same reply as the events of a stream: the whole of it is there before the first is sent."""
    choice = body["choices"][0]
    message = choice["message"]
    head = {key: body[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    pieces += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
    pieces += [{"tool_calls": [{"index": number, **call}]} for number, call in enumerate(message.get("tool_calls", []))]
    finishes: list[str | None] = [*[None] * len(pieces), choice["finish_reason"]]
    for delta, finish in zip([*pieces, {}], finishes, strict=True):
        chunk: dict[str, Any] = {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}
        yield f"data: {json.dumps(chunk)}\n\n"
    if with_usage:
        yield f"data: {json.dumps({**head, 'choices': [], 'usage': body['usage']})}\n\n"
    yield "data: [DONE]\n\n"
