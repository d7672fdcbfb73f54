"""Logs of model calls: a request and its response, in the shapes of OpenAI's APIs, as rollouts.

A request is an object with `messages` (chat completions), with `input` and `instructions` (Responses) or with `prompt` (completions), or the messages
alone. A response is an object with `choices`, with `output` (Responses) or with `content` (Anthropic's messages), one message, messages, or text. A
stream counts where it is whole: the list of its chunks, or their text as the server sent it. Either may be JSON within a text, as exports write
it. The reasoning is what a field of the message says, its thinking blocks, or the text between think tags.

Each choice is a response of its own. Its turn is the number of answers before it in the request. The group is the first message of the user:
all calls of one task have it in common. frameworks.toml names the fields of each log.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, OtherRecord, Rollout, prompt_group

Message = dict[str, Any]

_FAILED = 400
"""From this HTTP status on, a response is an error."""
_WRAPPERS = ("body", "json")
"""Where a log keeps what was sent beside its headers."""


def logged_call(request: Any, reply: Any, where: str, names: tuple[str, str], **shared: Any) -> Iterator[Rollout]:
    """The responses of one call.

    Args:
        names: the fields of request and reply, for messages.
        shared: further fields of the rollouts; a `group` of None is the first message of the user.
    """
    prompt = values.messages(_request_messages(_unwrapped(request, names[0]), names[0]), names[0])
    answers = _answers(_unwrapped(reply, names[1]), names[1])
    if shared.get("group") is None:
        first = next((message for message in prompt if message["role"] == "user"), prompt[0])
        shared["group"] = prompt_group([first])
    turn = sum(message["role"] == "assistant" for message in prompt)
    for number, answer in enumerate(answers):
        found = values.answer_fields(values.mapping(answer, names[1]), names[1])
        trajectory = where if len(answers) == 1 else f"{where} choice {number}"
        yield Rollout(**{"step": None, **shared}, trajectory=trajectory, turn=turn, where=where, messages=prompt, **found)


def _unwrapped(value: Any, field: str) -> Any:
    """What was sent: out of JSON within a text, and out of an object that has the body beside headers and status."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            value = json.loads(value)
        except ValueError:
            return value  # a text that begins with a bracket
    if not isinstance(value, Mapping):
        return value
    status = value.get("status_code", value.get("status"))
    if value.get("error") or (isinstance(status, int) and status >= _FAILED):
        raise ErroredEpisode
    inner = next((value[name] for name in _WRAPPERS if value.get(name)), None)
    return value if inner is None or "messages" in value or "choices" in value else _unwrapped(inner, field)


def _request_messages(request: Any, field: str) -> list[Message]:
    if isinstance(request, str):
        return [{"role": "user", "content": request}]
    if isinstance(request, list):
        if all(isinstance(item, str | int) for item in request):
            raise OtherRecord  # several texts, as for embeddings
        return [message for item in request for message in _messages_of_item(item, field)]
    if not isinstance(request, Mapping):
        raise BadRecord(f"{field} is {values.shown(request)}; expected a request with messages, input or prompt")
    for name in ("messages", "input", "prompt"):
        if request.get(name):
            system = request.get("instructions") or request.get("system")
            before = [{"role": "system", "content": _plain(system)}] if system else []
            return before + _request_messages(request[name], f"{field}.{name}")
    raise OtherRecord


def _messages_of_item(item: Any, field: str) -> list[Message]:
    """The chat messages of one message, or of one item of the Responses API."""
    item = values.mapping(item, f"{field}[]")
    kind = item.get("type", "message")
    if kind == "function_call":
        return [{"role": "assistant", "content": "", "tool_calls": [_tool_call(item)]}]
    if kind == "function_call_output":
        return [{"role": "tool", "content": _plain(item.get("output")), "tool_call_id": item.get("call_id")}]
    if "role" not in item:
        return []  # a reasoning that the server took back, a call of a tool of its own
    message = {**item, "role": "system" if item["role"] == "developer" else item["role"]}
    if isinstance(item.get("content"), list):
        message["content"] = _plain(item["content"])
    if isinstance(item.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in item["tool_calls"]]
    return [message]


def _tool_call(call: Any) -> Any:
    """A call with its arguments as an object, as chat templates expect them."""
    if not isinstance(call, Mapping):
        return call
    function = call.get("function", call)
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments)
    except ValueError:
        return call  # the model wrote no JSON, and the template shows what it wrote
    return {
        "type": "function",
        "id": call.get("call_id", call.get("id")),
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _plain(content: Any) -> str:
    """Content as text: its text blocks, and the kind of every other one."""
    if isinstance(content, str) or content is None:
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    return "".join(
        str(block.get("text") or "") if "text" in block else f"[{block.get('type', 'unknown')}]"
        for block in content
        if isinstance(block, Mapping) and block.get("type") not in ("thinking", "redacted_thinking")
    )


def _answers(reply: Any, field: str) -> list[Any]:
    """The messages of a response, one for each choice."""
    if not reply:
        raise ErroredEpisode
    if isinstance(reply, str):
        if not reply.lstrip().startswith("data:"):
            return [{"role": "assistant", "content": reply}]
        lines = (line.removeprefix("data:").strip() for line in reply.splitlines() if line.startswith("data:"))
        reply = [values.parsed(line, field) for line in lines if line != "[DONE]"]
    if isinstance(reply, list):
        if any(isinstance(part, Mapping) and ("choices" in part or str(part.get("type")).startswith("response.")) for part in reply):
            return _streamed(reply, field)
        if values.is_messages(reply):
            return [message for message in reply if message["role"] == "assistant"][-1:] or [reply[-1]]
        return [_of_items(reply)]
    reply = values.mapping(reply, field)
    if isinstance(reply.get("choices"), list):
        choices = [values.mapping(choice, f"{field}.choices[]") for choice in reply["choices"]]
        return [choice.get("message") or {"role": "assistant", "content": choice.get("text")} for choice in choices]
    if isinstance(reply.get("output"), list):
        return [_of_items(reply["output"])]
    if "content" in reply or "tool_calls" in reply:
        return [reply]
    if "data" in reply or "results" in reply:
        raise OtherRecord  # embeddings, a list of models, moderation
    raise BadRecord(f"{field} has the fields {', '.join(sorted(map(str, reply)))[:80]}; expected choices, output, content or text")


def _of_items(items: list[Any]) -> Message:
    """The items of a response of the Responses API as one message."""
    found: dict[str, list[str]] = {"reasoning": [], "message": []}
    for item in items:
        if isinstance(item, Mapping) and item.get("type") in found:
            blocks = item.get("content") or item.get("summary") or []
            found[item["type"]].append(_plain(blocks))
    return {"role": "assistant", "content": "".join(found["message"]), "reasoning": "\n".join(found["reasoning"]) or None}


def _streamed(chunks: list[Any], field: str) -> list[Any]:
    """The messages of a stream; one that never finished is refused, because its reasoning may be cut."""
    parts = [values.mapping(chunk, f"{field}[]") for chunk in chunks]
    whole = next((part["response"] for part in parts if part.get("type") == "response.completed"), None)
    if whole is not None:
        return _answers(whole, field)
    joined: dict[int, dict[str, str]] = {}
    finished = set()
    for choice in (choice for part in parts for choice in part.get("choices") or []):
        index = choice.get("index", 0)
        message = joined.setdefault(index, {"role": "assistant", "content": ""})
        delta = choice.get("delta") or {"content": choice.get("text")}
        for name in ("content", *values.REASONING_FIELDS):
            if isinstance(delta.get(name), str):
                message[name] = message.get(name, "") + delta[name]
        if choice.get("finish_reason"):
            finished.add(index)
    if not joined or finished != joined.keys():
        raise BadRecord(f"{field} is a stream that ends before its last chunk; expected all chunks, up to the one with finish_reason")
    return list(joined.values())
