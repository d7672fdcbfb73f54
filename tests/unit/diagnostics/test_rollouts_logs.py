"""Logs of model calls: OpenAI's requests and responses, and the exports of LiteLLM, Langfuse and W&B Weave, in the shapes that these document."""

import json
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.diagnostics.rollouts import Rollout, RolloutReader, open_rollouts

ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where is the box?"}]
CHAT = {
    "id": "c1",
    "object": "chat.completion",
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Left."}}],
}


def chat(**message: Any) -> dict[str, Any]:
    return {**CHAT, "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Left.", **message}}]}


def call(request: Any = None, response: Any = None, **fields: Any) -> dict[str, Any]:
    return {"request": {"model": "m", "messages": ASKED} if request is None else request, "response": response, "latency": 0.8, **fields}


def read(tmp_path: Path, *records: dict[str, Any], **options: Any) -> tuple[RolloutReader, list[Rollout]]:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    reader = open_rollouts(path, **options)
    return reader, list(reader)


@pytest.mark.parametrize(
    "response",
    [
        chat(reasoning_content="It is left."),  # vLLM, DeepSeek, SGLang
        chat(reasoning="It is left."),  # OpenRouter, vLLM from 0.11
        chat(content="<think>It is left.</think>Left."),
        chat(content=[{"type": "thinking", "thinking": "It is left."}, {"type": "text", "text": "Left."}]),
        chat(thinking_blocks=[{"type": "thinking", "thinking": "It is left.", "signature": "s"}]),  # LiteLLM
        chat(reasoning_details=[{"type": "reasoning.text", "text": "It is left."}]),  # OpenRouter
        {"role": "assistant", "type": "message", "content": [{"type": "thinking", "thinking": "It is left."}, {"type": "text", "text": "Left."}]},
        {
            "object": "response",
            "status": "completed",
            "error": None,
            "output": [
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "It is left."}]},
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Left."}]},
            ],
        },
        [
            {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"role": "assistant", "reasoning_content": "It is "}}]},
            {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"reasoning_content": "left.", "content": "Left."}}]},
            {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
            {"object": "chat.completion.chunk", "choices": [], "usage": {"total_tokens": 9}},
        ],
        'data: {"choices": [{"index": 0, "delta": {"content": "<think>It is left.</think>Left."}}]}\n\n'
        'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n',
        [{"type": "response.created"}, {"type": "response.completed", "response": {"output": [{"type": "reasoning", "summary": [{"text": "It is left."}]}]}}],
        {"status_code": 200, "headers": {}, "body": chat(reasoning_content="It is left.")},
        json.dumps(chat(reasoning_content="It is left.")),
    ],
)  # fmt: skip
def test_reasoning_is_read_from_every_shape_of_a_response(tmp_path: Path, response: Any) -> None:
    reader, [rollout] = read(tmp_path, call(response=response))
    assert (reader.format.name, rollout.reasoning, rollout.turn, rollout.missing) == ("openai", "It is left.", 0, None)
    assert rollout.messages == ASKED


def test_requests_of_every_shape_are_chat_messages(tmp_path: Path) -> None:
    arguments = '{"x": 1}'
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Go."}]},
        {"type": "reasoning", "summary": []},
        {"type": "function_call", "call_id": "f1", "name": "look", "arguments": arguments},
        {"type": "function_call_output", "call_id": "f1", "output": "a wall"},
    ]
    tool = {"id": "f1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    chat_turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Go."}, {"type": "input_audio", "input_audio": {"data": ""}}]},
        {"role": "assistant", "content": None, "tool_calls": [tool]},
        {"role": "tool", "content": "a wall", "tool_call_id": "f1"},
    ]
    _, found = read(
        tmp_path,
        call({"model": "m", "instructions": "Be brief.", "input": items}, CHAT),
        call({"model": "m", "messages": chat_turns}, CHAT),
        call({"model": "m", "input": "Go."}, CHAT),
        call({"model": "m", "prompt": "Go."}, {"choices": [{"text": "<think>a</think>b"}]}),
        call({"url": "http://x", "headers": {}, "body": json.dumps({"messages": ASKED})}, CHAT),
    )
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "id": "f1", "function": {"name": "look", "arguments": {"x": 1}}}],
    }
    answered = {"role": "tool", "content": "a wall", "tool_call_id": "f1"}
    assert found[0].messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Go."}, called, answered]
    assert (
        found[1].messages is not None and found[1].messages[1]["content"] == "Go.[input_audio]" and found[1].messages[0]["role"] == "system"
    )
    assert found[1].messages[2]["tool_calls"] == called["tool_calls"]
    assert [rollout.turn for rollout in found] == [1, 1, 0, 0, 0]
    assert found[3].reasoning == "a" and found[4].messages == ASKED


def test_groups_are_the_first_message_of_the_user_or_a_field_that_the_user_names(tmp_path: Path) -> None:
    later = [*ASKED, {"role": "assistant", "content": "Left."}, {"role": "user", "content": "And now?"}]
    other = [{"role": "system", "content": "Today is Monday."}, ASKED[1]]
    records = [
        call({"messages": messages, "metadata": {"task": number % 2}}, chat(reasoning=f"r{number}"), reward=0.5)
        for number, messages in enumerate([ASKED, later, other, [{"role": "user", "content": "Else?"}]])
    ]
    reader, found = read(tmp_path, *records)
    groups = [rollout.group for rollout in found]
    assert groups[0] == groups[1] == groups[2] != groups[3]
    assert [rollout.turn for rollout in found] == [0, 1, 0, 0] and found[0].reward == 0.5
    assert "responses with the same first message of the user (--group names another field) are taken as one group" in " ".join(
        reader.notes()
    )
    reader, found = read(tmp_path, *records, group="request.metadata.task")
    assert [rollout.group for rollout in found] == [0, 1, 0, 1] and "no group id" not in " ".join(reader.notes())
    with pytest.raises(BadInput, match=r"line 1: has no field 'request.metadata.tusk' to group by; did you mean 'request.metadata.task'"):
        read(tmp_path, *records, group="request.metadata.tusk")


def test_choices_are_responses_of_their_own_and_what_failed_is_counted(tmp_path: Path) -> None:
    two = {"choices": [{"message": {"role": "assistant", "content": "a", "reasoning": text}} for text in ("one", "two")]}
    failed = [call(response={"error": {"message": "overloaded"}}), call(response=None), call(response={"status_code": 500, "body": "x"})]
    embedding = call({"model": "e", "input": ["a", "b"]}, {"object": "list", "data": []})
    reader, found = read(tmp_path, call(response=two), *failed, embedding, {**call(response=CHAT), "error": "timeout"})
    assert [rollout.reasoning for rollout in found] == ["one", "two"] and len({rollout.trajectory for rollout in found}) == 2
    assert (reader.tally.num_errored, reader.tally.num_others) == (4, 1)
    assert "1 of 6 records are no call of a model and were left out" in reader.notes()


@pytest.mark.parametrize(
    ("response", "cause"),
    [
        ([{"choices": [{"index": 0, "delta": {"content": "<think>It is"}}]}], "response is a stream that ends before its last chunk"),
        ({"id": "x", "usage": {}}, "response has the fields id, usage; expected choices, output, content or text"),
        (7, r"response is 7 \(int\); expected an object"),
    ],
)
def test_a_response_that_cannot_be_read_is_one_line(tmp_path: Path, response: Any, cause: str) -> None:
    with pytest.raises(BadInput, match=rf"log.jsonl line 2: {cause}"):
        read(tmp_path, call(response=CHAT), call(response=response))
    assert len(read(tmp_path, call(response=CHAT), call(response=response), bad_lines="skip")[1]) == 1


LITELLM = {
    "id": "chatcmpl-1", "trace_id": "t", "call_type": "acompletion", "stream": False, "status": "success", "startTime": 1.0, "endTime": 2.0,
    "model": "gpt", "metadata": {"user_api_key_hash": None}, "messages": ASKED, "response": chat(reasoning_content="It is left."),
    "error_str": None, "error_information": {"error_class": ""}, "model_parameters": {"temperature": 1}, "response_cost": 0.0,
}  # fmt: skip
LANGFUSE = {
    "id": "o1", "trace_id": "t", "type": "GENERATION", "start_time": "2024-05-29 13:46:19.963000", "level": "DEFAULT", "input": json.dumps(ASKED),
    "output": json.dumps({"role": "assistant", "content": "<think>It is left.</think>Left."}), "metadata": {},
}  # fmt: skip
FROM_TABLE = {
    "id": "o1", "traceId": "t", "type": "GENERATION", "startTime": "2024-05-29T13:46:19Z", "input": {"messages": ASKED}, "output": chat(reasoning="It is left."),
}  # fmt: skip
WEAVE = {
    "id": "w1", "project_id": "a/b", "op_name": "weave:///a/b/op/openai.chat.completions.create:v1", "trace_id": "t", "parent_id": None,
    "started_at": "2024-06-01T10:00:00Z", "attributes": {}, "inputs": {"model": "gpt", "messages": ASKED}, "exception": None,
    "output": chat(reasoning_content="It is left."), "summary": {"weave": {"latency_ms": 500}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "record", "other", "failed"),
    [
        ("litellm", LITELLM, {"call_type": "aembedding"}, {"error_str": "rate limit", "response": ""}),
        ("langfuse", LANGFUSE, {"type": "SPAN"}, {"level": "ERROR", "output": None}),
        ("langfuse", FROM_TABLE, {"type": "EVENT", "input": None}, {"output": None}),
        ("weave", WEAVE, {"inputs": {"self": "agent", "question": "q"}, "output": "a"}, {"exception": "ValueError", "output": None}),
    ],
)
def test_exports_are_recognised_by_the_fields_that_they_document(
    tmp_path: Path, name: str, record: dict[str, Any], other: dict[str, Any], failed: dict[str, Any]
) -> None:
    reader, [rollout] = read(tmp_path, record, {**record, **other}, {**record, **failed})
    assert reader.format.name == name
    assert (rollout.reasoning, rollout.messages, rollout.turn) == ("It is left.", ASKED, 0)
    assert (reader.tally.num_others, reader.tally.num_errored) == (1, 1)
    with pytest.raises(BadInput, match="holds no call of a model with messages, only other records of a log"):
        read(tmp_path, {**record, **other})
