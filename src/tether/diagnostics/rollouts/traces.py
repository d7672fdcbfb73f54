"""Records that a field map cannot describe: Tether's own episodes, slime's samples with their token ids, and the traces of verifiers v1 and prime-rl."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tether.core.errors import BadInput
from tether.core.grammar import parse_response
from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, Rollout, prompt_group
from tether.diagnostics.rollouts.values import Record, conversation_turns, split_conversation, with_tool_calls
from tether.runs.schema import recorded_context

_LINE_HEAD = re.compile(rb'\s*\{"step": (\d+), "split": "([^"\\]*)", "attempt": (\d+), ')
"""How the run store begins a line: enough to place it without parsing its token ids."""
_TAGS = ReasoningRule()


class Attempts:
    """Which lines of Tether's trajectories.jsonl a resumed run has written again: only the last attempt of each step and split counts."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._last: dict[tuple[bytes, bytes], int] = {}
        for line in lines:
            if (head := _LINE_HEAD.match(line)) is not None:
                self._last[head[1], head[2]] = max(int(head[3]), self._last.get((head[1], head[2]), 0))

    def supersede(self, line: bytes) -> bool:
        """Whether a later attempt stands in the file; a line without an attempt stays."""
        head = _LINE_HEAD.match(line)
        return head is not None and int(head[3]) < self._last.get((head[1], head[2]), 0)  # a running run may have added steps since


def tether_rollouts(record: Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode. Nothing is tokenised again: x is the ids of everything the turn saw since its last new context, z the recorded span."""
    turns = record["turns"]
    if not isinstance(turns, list):
        raise BadRecord(f"turns is {values.shown(turns)}; expected a list")
    shared: dict[str, Any] = {
        "step": values.step(record["step"]),
        "group": f"{record['split']}/{record['group']}",
        "trajectory": where,
        "where": where,
        "reward": values.number(record.get("reward"), "reward"),
        "success": values.flag(record.get("success"), "success"),
    }
    seen: tuple[int, ...] = ()
    for index, turn in enumerate(turns):
        named = f"turns[{index}]"
        turn = values.mapping(turn, named)
        context = values.token_ids(turn.get("context_ids"), f"{named}.context_ids")
        sampled = values.token_ids(turn.get("response_ids"), f"{named}.response_ids")
        if context is None or sampled is None:
            raise BadRecord(f"{named} has no token ids; expected context_ids and response_ids")
        try:
            context = recorded_context(turn)
        except BadInput as error:
            raise BadRecord(f"{named}: {error}") from error
        seen = context if turn.get("fresh") else seen + context
        response = values.text(turn.get("response"), f"{named}.response") or ""
        start, found = 0, dict[str, Any](missing="unclosed")
        if (span := values.token_ids(turn.get("reasoning_span"), f"{named}.reasoning_span")) is not None:
            if len(span) != 2 or not span[0] <= span[1] <= len(sampled):
                raise BadRecord(f"{named}.reasoning_span is {list(span)}; expected start and end within {len(sampled)} response ids")
            ids, end = sampled[slice(*span)], parse_response(response).reasoning_end
            text = response[_TAGS.cut(response).start if span[0] else 0 : end] if ids and end is not None else None
            start, found = span[0], {"reasoning": text, "reasoning_ids": ids, "missing": None if ids else "blank"}
        yield Rollout(
            **shared,
            turn=index,
            prompt=values.text(turn.get("observation"), f"{named}.observation"),
            prompt_ids=seen + sampled[:start],  # what stands before the reasoning belongs to x: the tag, where the model opens it
            response=response,
            response_ids=sampled,
            **found,
        )
        seen += sampled


def slime_rollouts(record: Record, where: str) -> Iterator[Rollout]:
    """The response of one sample of slime's debug rollout data; or of one item of its rollout buffer
    (slime_plugins/rollout_buffer/generator/base_generator.py, `worker_process`), saved as JSON Lines, which has no token ids.

    A sample has the tokens of prompt and response in one list, of which the last response_length are the response. The step is the rollout_id of
    the archive, not the field of the same name. A reward may be an object; its `score`, or its only number, counts. Samples with status aborted or
    failed are left out.
    """
    if "round_number" in record:
        prompt, answers = split_conversation(values.messages(record["messages"], "messages"), "messages")
        reward = values.number(record.get("raw_reward", record["reward"]), "reward")
        names = ("messages", "messages after the prompt")
        yield from conversation_turns(prompt, answers, where, names=names, group=str(record["instance_id"]), reward=reward)
        return
    if record.get("status") in ("aborted", "failed"):
        raise ErroredEpisode
    tokens = values.token_ids(record["tokens"], "tokens") or ()
    length = values.step(record["response_length"], "response_length") or 0
    if not 0 <= length <= len(tokens):
        raise BadRecord(f"response_length is {length}; expected at most the {len(tokens)} tokens")
    before, after = tokens[: len(tokens) - length], tokens[len(tokens) - length :]
    reward, prompt, group = record.get("reward"), record["prompt"], record["group_index"]
    if isinstance(reward, dict):
        numbers = [value for value in reward.values() if isinstance(value, int | float) and math.isfinite(value)]
        reward = reward.get("score", numbers[0] if len(numbers) == 1 else None)
    is_chat = isinstance(prompt, list)
    yield Rollout(
        step=values.step(record.get("step")),
        group=prompt_group(prompt or before) if group is None else group,
        trajectory=where,
        turn=0,
        where=where,
        messages=values.messages(prompt, "prompt") if is_chat else None,
        prompt=None if is_chat else values.text(prompt, "prompt") or None,
        prompt_ids=before or None,
        response=values.text(record["response"], "response") or "",
        response_ids=after or None,
        reward=values.number(reward, "reward"),
    )


def prime_rl_rollouts(record: Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode of verifiers v1 or prime-rl; or of a row of the table that prime-rl uploads, which holds the same episode in
    info.native_wrapper.

    An episode has id, env, task, group, run, ok, errors, traces. Every trace of a trainable agent is a trajectory of its own, and every message
    of its graph that a model call produced is a turn; it saw the messages on the path from the root. Where the nodes carry token ids (training),
    prompt and response are those ids. The reward is the weighted sum of the trace's rewards. Groups are group.id, else the task's key; the step is
    run.work.step, else the folder's. Episodes and traces that ended in an error are left out.
    """
    if "traces" not in record:
        yield from _uploaded(record, where)
        return
    if record.get("errors") and not record.get("ok"):
        raise ErroredEpisode
    work = (record.get("run") or {}).get("work") or {}
    shared: dict[str, Any] = {"where": where, "step": values.step(work.get("step"), "run.work.step"), "group": _episode_group(record)}
    if not isinstance(record["traces"], list):
        raise BadRecord(f"traces is {values.shown(record['traces'])}; expected a list")
    traces = [trace for trace in record["traces"] if values.mapping(trace, "traces[]").get("agent", {}).get("trainable", True)]
    failed = [trace for trace in traces if trace.get("errors") and not trace.get("ok")]
    if traces and len(failed) == len(traces):
        raise ErroredEpisode
    for index, trace in enumerate(traces):
        if trace not in failed:
            episode = {"trajectory": f"{where} trace {index}", "reward": _weighted_reward(trace.get("rewards") or {})}
            yield from _trace_turns(trace, f"traces[{index}]", {**shared, **episode})


def _episode_group(record: Record) -> str | None:
    named = (record.get("group") or {}).get("id")
    if named is not None:
        return str(named)
    task = values.mapping(record["task"], "task")
    key = task.get("key") or task.get("hash") or (task.get("data") or {}).get("idx")
    return None if key is None else f"{(record.get('env') or {}).get('id', '')}/{key}"


def _weighted_reward(rewards: Record) -> float | None:
    """The sum of score times weight, as `Trace.reward`; None where nothing was scored."""
    found = [
        (values.number(reward.get("score"), f"rewards.{name}.score"), values.number(reward.get("weight", 1.0), f"rewards.{name}.weight"))
        for name, reward in rewards.items()
        if isinstance(reward, Mapping)
    ]
    parts = [score * weight for score, weight in found if score is not None and weight is not None]
    return math.fsum(parts) if parts else None


def _trace_turns(trace: Record, named: str, shared: dict[str, Any]) -> Iterator[Rollout]:
    nodes = [values.mapping(node, f"{named}.nodes[{index}]") for index, node in enumerate(trace.get("nodes") or [])]
    sampled = [index for index, node in enumerate(nodes) if node.get("sampled")]
    for turn, index in enumerate(sampled):
        node, place = nodes[index], f"{named}.nodes[{index}]"
        before = _path(nodes, index, place)
        if not before:
            raise BadRecord(f"{place} is a model's message without a message before it; expected a prompt")
        messages = values.messages(with_tool_calls([parent["message"] for parent in before]), f"{place} path")
        prompt_ids, response_ids = _node_ids(before, node, place)
        yield Rollout(
            **{**shared, "group": prompt_group(messages) if shared["group"] is None else shared["group"]},
            turn=turn,
            messages=messages,
            prompt_ids=prompt_ids,
            response_ids=response_ids,
            **values.answer_fields(values.mapping(node["message"], f"{place}.message"), f"{place}.message"),
        )


def _path(nodes: Sequence[Record], index: int, place: str) -> list[Record]:
    """The nodes before this one, from the root."""
    path: list[Record] = []
    parent = nodes[index].get("parent")
    while parent is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or len(path) > len(nodes):
            raise BadRecord(f"{place} has the parent {values.shown(parent)}; expected the number of an earlier node")
        path.append(nodes[parent])
        parent = nodes[parent].get("parent")
    return path[::-1]


def _node_ids(before: Sequence[Record], node: Record, place: str) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
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


def _uploaded(record: Record, where: str) -> Iterator[Rollout]:
    step = values.step(record["step"])
    info = values.parsed(record["info"], "info") or {}
    episode = info.get("native_wrapper")
    if isinstance(episode, Mapping) and {"id", "env", "task", "traces"} <= episode.keys():
        for rollout in prime_rl_rollouts(episode, where):
            yield replace(rollout, step=step) if rollout.step is None else rollout
        return
    branches = values.parsed(record["trajectory"], "trajectory")
    field = "trajectory[-1].messages"
    prompt, answers = split_conversation(values.messages(branches[-1].get("messages") if branches else None, field), field)
    yield from conversation_turns(
        with_tool_calls(prompt),
        with_tool_calls(answers),
        where,
        names=(field, f"{field} after the prompt"),
        step=step,
        group=f"{record['env_name']}/{record['problem_id']}",
        reward=values.number(record.get("reward"), "reward"),
    )
