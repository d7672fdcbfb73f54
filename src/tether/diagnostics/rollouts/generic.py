"""The generic format, for everybody else: one JSON object a line with prompt | messages, response | reasoning, and what else is known.

    {"step": 3, "group": "p1", "prompt": "2+2?", "response": "<think>easy</think>4", "reward": 1.0}

A field map gives the names where a file has others: {"prompt": "input", "response": "choices.0.message.content"}. The path is a key as it
stands, or a dotted walk through objects and lists. What is not mapped is looked up under its own name. Token ids, where given, count more
than text. `messages` without a response is a whole conversation, and every assistant message of it a turn.
"""

import difflib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord, Rollout, prompt_group
from tether.diagnostics.rollouts.values import conversation_turns, split_conversation

PROMPTS = ("prompt", "messages", "prompt_ids")
ANSWERS = ("response", "reasoning", "response_ids", "reasoning_ids")
FIELDS = (*PROMPTS, *ANSWERS, "group", "reward", "success", "step", "trajectory", "turn")

_OTHER_NAMES = {
    "prompt": ("question", "query", "input", "instruction", "problem", "prompt_text", "observation", "task"),
    "messages": ("conversation", "conversations", "chat", "history", "dialog"),
    "response": ("completion", "output", "generation", "generated_text", "answer", "reply", "prediction", "text", "content"),
    "reasoning": ("thinking", "thought", "thoughts", "reasoning_content", "cot", "rationale", "chain_of_thought"),
    "reward": ("score", "return", "total_reward", "episode_reward", "rewards"),
    "group": ("group_id", "prompt_id", "problem_id", "question_id", "uid", "task_id"),
    "step": ("global_step", "iteration", "training_step", "global_steps"),
}
"""Names that other programs use, for suggestions only: what a field means is for the user to say."""

_DEPTH = 3


def recognises(record: values.Record) -> bool:
    if not any(record.get(name) is not None for name in PROMPTS):
        return False
    return any(name in record for name in ANSWERS) or _is_whole_conversation(record.get("messages"))


def parse_fields(items: Sequence[str]) -> dict[str, str]:
    """A field map from the command line.

    >>> parse_fields(["prompt=input,response=output", "reward=info.score"])
    {'prompt': 'input', 'response': 'output', 'reward': 'info.score'}
    """
    fields: dict[str, str] = {}
    for item in (part.strip() for text in items for part in text.split(",") if part.strip()):
        name, equals, path = (part.strip() for part in item.partition("="))
        if not (name and equals and path):
            raise BadInput(f"field map entry '{item}' is not NAME=FIELD; write for instance prompt=input,response=output")
        if name in fields:
            raise BadInput(f"the field map names {name} twice ('{fields[name]}' and '{path}'); leave one out")
        fields[name] = path
    return fields


class GenericFormat:
    """Reads records by the generic names, or by a field map."""

    def __init__(self, fields: Mapping[str, str] | None = None) -> None:
        self._fields = dict(fields or {})
        for name in self._fields:
            if name not in FIELDS:
                raise UnknownName(f"the field map names '{name}', which is no field of a rollout; {did_you_mean(name, FIELDS)}")

    def rollouts(self, record: values.Record, where: str) -> Iterator[Rollout]:
        """The turns of one record."""
        found = {name: self._value(record, name) for name in FIELDS}
        shared: dict[str, Any] = {
            "step": values.step(found["step"]),
            "reward": values.number(found["reward"], self._named("reward")),
            "success": values.flag(found["success"], self._named("success")),
        }
        group = _hashable(found["group"])
        prompt = found["messages"] if found["prompt"] is None else found["prompt"]
        if prompt is None and found["prompt_ids"] is None:
            raise BadRecord(f"has no prompt: {_lacks(record, PROMPTS)}")
        names = (self._named("prompt"), self._named("response"))
        answer = found["response"]
        if not self._has_answer(record):
            if not _is_whole_conversation(prompt):
                raise BadRecord(f"has no response: {_lacks(record, ANSWERS)}")
            names = (self._named("messages"), f"{self._named('messages')} after the prompt")
            prompt, answer = split_conversation(values.messages(prompt, names[0]), names[0])
        turns = (
            conversation_turns(prompt, answer, where, names=names, group=group, **shared)
            if isinstance(answer, list | dict)
            else iter([self._single(found, prompt, group, where, shared)])
        )
        episode, turn = _hashable(found["trajectory"]), values.step(found["turn"], "turn")
        for rollout in turns:
            yield rollout.at(trajectory=where if episode is None else episode, turn=rollout.turn + (turn or 0))

    def _single(self, found: Mapping[str, Any], prompt: Any, group: Hashable, where: str, shared: dict[str, Any]) -> Rollout:
        """One response, with whatever of text and ids there is."""
        ids: dict[str, Any] = {
            name: values.token_ids(found[name], self._named(name)) for name in ("prompt_ids", "response_ids", "reasoning_ids")
        }
        response = values.text(found["response"], self._named("response"))
        reasoning = values.text(found["reasoning"], self._named("reasoning"))
        if any(given is not None and not given for given in (prompt, ids["prompt_ids"])):
            raise BadRecord("the prompt is empty; there is nothing the reasoning could depend on")
        seen: dict[str, Any] = {}
        if values.is_messages(prompt):
            seen["messages"] = _without_answer(values.messages(prompt, self._named("messages")), response)
        elif prompt is not None:
            seen["prompt"] = values.text(prompt, self._named("prompt"))
        if group is None:
            group = prompt_group(seen.get("prompt") or seen.get("messages") or ids["prompt_ids"] or ())
        missing = "blank" if ids["reasoning_ids"] == () else None
        return Rollout(
            **shared,
            **seen,
            **ids,
            group=group,
            trajectory=where,
            turn=0,
            where=where,
            response=response,
            reasoning=reasoning,
            missing=missing,
        )

    def _has_answer(self, record: values.Record) -> bool:
        return any(name in self._fields or name in record for name in ANSWERS)

    def _named(self, name: str) -> str:
        return self._fields.get(name, name)

    def _value(self, record: values.Record, name: str) -> Any:
        path = self._fields.get(name)
        if path is None:
            return record.get(name)
        if path in record:
            return record[path]
        value: Any = record
        for key in path.split("."):
            if isinstance(value, Mapping) and key in value:
                value = value[key]
            elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                value = value[int(key)]
            else:
                raise BadRecord(f"has no field '{path}' (mapped to {name}); {did_you_mean(path, field_paths(record))}")
        return value


def suggestions(record: values.Record) -> dict[str, str]:
    """A field map that would make sense of a record: generic name to the field that looks like it."""
    paths = field_paths(record)
    found: dict[str, str] = {}
    for name in ("prompt", "messages", "response", "reasoning", "reward", "group", "step"):
        known = {path.rpartition(".")[2].lower(): path for path in reversed(paths)}
        near = next((known[other] for other in (name, *_OTHER_NAMES[name]) if other in known), None)
        if near is None and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
            near = known[close[0]]
        if near is not None:
            found[name] = near
    return found


def field_paths(record: values.Record, depth: int = _DEPTH) -> list[str]:
    """The dotted paths of a record's fields, outer ones first."""
    paths = [str(name) for name in record]
    if depth > 1:
        for name, value in record.items():
            if isinstance(value, Mapping):
                paths += [f"{name}.{path}" for path in field_paths(value, depth - 1)]
    return paths


def _lacks(record: values.Record, names: Sequence[str]) -> str:
    """The end of a message about a field that is not there."""
    guess = {name: path for name, path in suggestions(record).items() if name in names and name != path}
    hint = "; is it " + " or ".join(f"'{path}'? (field map {name}={path})" for name, path in guess.items()) if guess else ""
    return f"expected one of {', '.join(names)}, got {', '.join(sorted(map(str, record))) or 'no fields'}{hint}"


def _is_whole_conversation(value: Any) -> bool:
    return isinstance(value, list) and any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in value)


def _without_answer(conversation: list[dict[str, Any]], response: str | None) -> list[dict[str, Any]]:
    """The prompt's messages, where a file repeats the response as the last of them."""
    last = conversation[-1]
    repeated = len(conversation) > 1 and last["role"] == "assistant" and last.get("content") == response
    return conversation[:-1] if repeated else conversation


def _hashable(value: Any) -> Hashable:
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value
