"""The episodes of verifiers and prime-rl: results.jsonl of verifiers' evaluations, and the traces of verifiers v1, which prime-rl writes as well."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, Rollout, prompt_group
from tether.diagnostics.rollouts.values import conversation_turns, split_conversation


def is_verifiers(record: values.Record) -> bool:
    return {"example_id", "prompt", "completion"} <= record.keys()


def verifiers_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one line of verifiers' results.jsonl (verifiers 0.3.0, a60a606, verifiers/legacy/utils/save_utils.py, `state_to_output` and
    `save_outputs`); prime-rl before verifiers v1 wrote the same records.

    A line has example_id, prompt, completion (messages or text), reward, error, metrics (also spread over the line), timing, is_completed and
    more. The group is example_id, with the task where there are several. Tool calls are JSON strings within the messages and are parsed. An episode
    with an error is left out. There is no step, unless a folder's name says it; and no success: the metrics have names of their own.
    """
    if record.get("error"):
        raise ErroredEpisode
    prompt, completion = _with_tool_calls(record["prompt"]), _with_tool_calls(record["completion"])
    if isinstance(completion, list) and not any(isinstance(part, Mapping) and part.get("role") == "assistant" for part in completion):
        return iter(())
    task = record.get("task")
    return conversation_turns(
        prompt,
        completion,
        where,
        names=("prompt", "completion"),
        group=f"{task}/{record['example_id']}" if isinstance(task, str) else str(record["example_id"]),
        reward=values.number(record.get("reward"), "reward"),
    )


def _with_tool_calls(conversation: Any) -> Any:
    """Messages whose tool calls are objects again, as chat templates expect them."""
    if not isinstance(conversation, list):
        return conversation
    return [
        {**message, "tool_calls": [_tool_call(call) for call in message["tool_calls"]]}
        if isinstance(message, Mapping) and isinstance(message.get("tool_calls"), list)
        else message
        for message in conversation
    ]


def _tool_call(call: Any) -> Any:
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except ValueError as error:
            raise BadRecord(f"a tool call is {values.shown(call)}; expected JSON") from error
    if isinstance(call, Mapping) and "function" not in call and "name" in call:
        return {"type": "function", "id": call.get("id"), "function": {"name": call["name"], "arguments": call.get("arguments", "")}}
    return call


def is_prime_rl(record: values.Record) -> bool:
    return _is_episode(record) or _is_upload(record)


def _is_episode(record: values.Record) -> bool:
    return {"id", "env", "task", "traces"} <= record.keys() and isinstance(record["traces"], list)


def _is_upload(record: values.Record) -> bool:
    return {"step", "problem_id", "sample_id", "trajectory", "env_name", "info"} <= record.keys()


def prime_rl_rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode: a line of traces.jsonl, which verifiers v1 writes for an evaluation (verifiers 0.3.0, a60a606,
    verifiers/v1/cli/output.py, `write_episode`; verifiers/v1/episode.py, `Episode.to_record`) and prime-rl for every step, in
    rollouts/step_N/{train,eval}/{all,effective}/traces.jsonl (prime-rl 0.8.0, 559b447, src/prime_rl/monitors/file.py); or a row of the table that
    prime-rl uploads (src/prime_rl/monitors/prime.py, `episodes_to_parquet_bytes`), which holds the same episode in info.native_wrapper.

    Episodes written by verifiers 0.4.0 are read as well. An episode has id, env, task, group, run, ok, errors, traces. Every trace of a trainable agent is a trajectory of its own, and every message
    of its graph that a model call produced is a turn; it saw the messages on the path from the root. Where the nodes carry token ids (training),
    prompt and response are those ids. The reward is the weighted sum of the trace's rewards. Groups are group.id, else the task's key; the step is
    run.work.step, else the folder's. Episodes and traces that ended in an error are left out.
    """
    if not _is_episode(record):
        yield from _uploaded(record, where)
        return
    if record.get("errors") and not record.get("ok"):
        raise ErroredEpisode
    shared: dict[str, Any] = {"where": where, "step": _step(record), "group": _group(record)}
    traces = [trace for trace in record["traces"] if _object(trace, "traces[]").get("agent", {}).get("trainable", True)]
    failed = [trace for trace in traces if trace.get("errors") and not trace.get("ok")]
    if traces and len(failed) == len(traces):
        raise ErroredEpisode
    for index, trace in enumerate(traces):
        if trace not in failed:
            episode = {"trajectory": f"{where} trace {index}", "reward": _reward(trace.get("rewards") or {})}
            yield from _trace_turns(trace, f"traces[{index}]", {**shared, **episode})


def _step(record: values.Record) -> int | None:
    work = (record.get("run") or {}).get("work") or {}
    return values.step(work.get("step"), "run.work.step")


def _group(record: values.Record) -> str | None:
    named = (record.get("group") or {}).get("id")
    if named is not None:
        return str(named)
    task = _object(record["task"], "task")
    key = task.get("key") or task.get("hash") or (task.get("data") or {}).get("idx")
    return None if key is None else f"{(record.get('env') or {}).get('id', '')}/{key}"


def _reward(rewards: values.Record) -> float | None:
    """The sum of score times weight, as `Trace.reward`; None where nothing was scored."""
    found = [
        (values.number(reward.get("score"), f"rewards.{name}.score"), values.number(reward.get("weight", 1.0), f"rewards.{name}.weight"))
        for name, reward in rewards.items()
        if isinstance(reward, Mapping)
    ]
    parts = [score * weight for score, weight in found if score is not None and weight is not None]
    return math.fsum(parts) if parts else None


def _trace_turns(trace: values.Record, named: str, shared: dict[str, Any]) -> Iterator[Rollout]:
    nodes = [_object(node, f"{named}.nodes[{index}]") for index, node in enumerate(trace.get("nodes") or [])]
    turn = 0
    for index, node in enumerate(nodes):
        if not node.get("sampled"):
            continue
        place = f"{named}.nodes[{index}]"
        before = _path(nodes, index, place)
        if not before:
            raise BadRecord(f"{place} is a model's message without a message before it; expected a prompt")
        messages = values.messages(_with_tool_calls([parent["message"] for parent in before]), f"{place} path")
        message = _object(node["message"], f"{place}.message")
        found = next((message[name] for name in values.REASONING_FIELDS if message.get(name)), None)
        prompt_ids, response_ids = _node_ids(before, node, place)
        group = shared["group"]
        yield Rollout(
            **{**shared, "group": prompt_group(messages) if group is None else group},
            turn=turn,
            messages=messages,
            prompt_ids=prompt_ids,
            response=values.message_text(message, f"{place}.message"),
            response_ids=response_ids,
            reasoning=values.text(found, f"{place} reasoning"),
            think_implied=found is not None,
        )
        turn += 1


def _path(nodes: Sequence[values.Record], index: int, place: str) -> list[values.Record]:
    """The nodes before this one, from the root."""
    path: list[values.Record] = []
    parent = nodes[index].get("parent")
    while parent is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or len(path) > len(nodes):
            raise BadRecord(f"{place} has the parent {values.shown(parent)}; expected the number of an earlier node")
        path.append(nodes[parent])
        parent = nodes[parent].get("parent")
    return path[::-1]


def _node_ids(before: Sequence[values.Record], node: values.Record, place: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The ids of everything up to the response, and of the response; None where a node of the path carries none."""
    parts = [values.token_ids(part.get("token_ids"), f"{place} token_ids") for part in (*before, node)]
    mask = node.get("mask") or []
    own = parts[-1] or ()
    if not all(parts) or not any(mask):
        return None, None
    if len(mask) != len(own):
        raise BadRecord(f"{place} has {len(own)} token ids and a mask of {len(mask)}; expected as many")
    start = mask.index(True)
    return sum((part or () for part in parts[:-1]), ()) + own[:start], own[start:]


def _uploaded(record: values.Record, where: str) -> Iterator[Rollout]:
    step = values.step(record["step"])
    info = _parsed(record["info"], "info") or {}
    if isinstance(episode := info.get("native_wrapper"), Mapping) and _is_episode(episode):
        for rollout in prime_rl_rollouts(episode, where):
            yield rollout.in_step(step)
        return
    branches = _parsed(record["trajectory"], "trajectory")
    conversation = values.messages(branches[-1].get("messages") if branches else None, "trajectory[-1].messages")
    prompt, answers = split_conversation(conversation, "trajectory[-1].messages")
    yield from conversation_turns(
        _with_tool_calls(prompt),
        _with_tool_calls(answers),
        where,
        names=("trajectory[-1].messages", "trajectory[-1].messages after the prompt"),
        step=step,
        group=f"{record['env_name']}/{record['problem_id']}",
        reward=values.number(record.get("reward"), "reward"),
    )


def _parsed(value: Any, field: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRecord(f"{field} is {values.shown(value)}; expected JSON") from error


def _object(value: Any, field: str) -> values.Record:
    if not isinstance(value, Mapping):
        raise BadRecord(f"{field} is {values.shown(value)}; expected an object")
    return value
