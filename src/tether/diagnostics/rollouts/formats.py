"""The formats of rollout files: which fields of a framework's record are prompt, response, step, group, reward and success.

A framework is a section of frameworks.toml, so a new one is a new section. Records that hold token ids or a graph of messages have a reader of
their own (`traces`). The generic format is for everybody else: one JSON object a line with prompt | messages, response | reasoning, and what else
is known:

    {"step": 3, "group": "p1", "prompt": "2+2?", "response": "<think>easy</think>4", "reward": 1.0}

A field map gives the names where a file has others: {"prompt": "input", "response": "choices.0.message.content"}. The path is a key as it
stands, or a dotted walk through objects and lists. A field that is not mapped is looked up under its own name. Token ids, where given, count
more than text. `messages` without a response is a whole conversation, and every assistant message of it a turn.

A file's format is found from its first records: the first record that any format recognises decides.
"""

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.diagnostics.rollouts import traces, values
from tether.diagnostics.rollouts.logs import logged_call
from tether.diagnostics.rollouts.record import BadRecord, ErroredEpisode, OtherRecord, Rollout, prompt_group
from tether.diagnostics.rollouts.values import MISSING, Record, conversation_turns, lookup, split_conversation

NUM_TRIED = 8
"""Records of a file that are tried."""
PROMPTS = ("prompt", "messages", "prompt_ids")
ANSWERS = ("response", "reasoning", "response_ids", "reasoning_ids")
FIELDS = (*PROMPTS, *ANSWERS, "group", "reward", "success", "step", "trajectory", "turn")

_UID = re.compile(r"(.+)_(\d+)_(\d+)", re.DOTALL)
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
_OTHER_RECORDS = (
    ({"token_ids", "loss_mask", "trainer_logprobs"}, "prime-rl's token export: no text, no rewards; its rollouts/ folder has both"),
    ({"step", "time"}, "metrics"),
    ({"task_key", "reason"}, "verifiers' validation of a taskset"),
    ({"prompt", "chosen", "rejected"}, "pairs of preferences"),
)
"""Fields of records that frameworks write beside their rollouts, and what those are."""


@dataclass(frozen=True, slots=True)
class Format:
    """A file format of rollouts."""

    name: str
    title: str
    """For people."""
    expects: str
    """The fields by which it is recognised."""
    recognises: Callable[[Record], bool]
    rollouts: Callable[[Record, str], Iterator[Rollout]]
    """The turns of a record; the second argument is its place in the file."""
    is_log: bool = False
    """Of model calls: a group is the first message of the user."""
    prompt: str = "prompt"
    """The field of the prompt, where it is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A section of frameworks.toml, which says what each key means."""

    title: str
    expects: str
    has: list[list[str]]
    only: list[str] = dataclasses.field(default_factory=list)
    lacks: list[str] = dataclasses.field(default_factory=list)
    reader: str | None = None
    prompt: str = ""
    response: str = ""
    messages: str = ""
    step: str = ""
    group: str | list[str] = ""
    group_prompt: bool = False
    uid: str = ""
    reward: str = ""
    reward_as: str = "number"
    not_rewards: list[str] = dataclasses.field(default_factory=list)
    success: str | list[str] = ""
    error: str | list[str] = ""
    may_be_silent: bool = False
    tool_calls: bool = False
    request: str = ""
    reply: str = ""
    kind: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    empty: str = ""

    def recognises(self, record: Record) -> bool:
        """Whether a record is of this framework."""
        if any(name in record for name in self.lacks):
            return False
        is_only = bool(self.only) and record.keys() == set(self.only)
        return is_only or any(all(lookup(record, path) is not MISSING for path in paths) for paths in self.has)

    def rollouts(self, record: Record, where: str) -> Iterator[Rollout]:
        """The turns of one record."""
        errors = [lookup(record, path) for path in ([self.error] if isinstance(self.error, str) else self.error) if path]
        if any(error for error in errors if error is not MISSING):
            raise ErroredEpisode
        if self.request:
            if any(record.get(path) not in known for path, known in self.kind.items()):
                raise OtherRecord
            shared = {"reward": values.number(record.get("reward"), "reward"), "success": values.flag(record.get("success"), "success")}
            step = values.step(record.get("step"))
            yield from logged_call(record[self.request], record[self.reply], where, (self.request, self.reply), step=step, **shared)
            return
        names = (self.prompt, self.response) if not self.messages else (self.messages, f"{self.messages} after the prompt")
        if self.messages:
            prompt, answer = None, values.messages(found, self.messages) if (found := self._value(record, self.messages)) else []
        else:
            prompt, answer = record[self.prompt], record[self.response]
        if self.tool_calls:
            prompt, answer = values.with_tool_calls(prompt), values.with_tool_calls(answer)
        if self.may_be_silent and isinstance(answer, list) and not is_conversation(answer):
            return
        if self.messages:
            prompt, answer = split_conversation(answer, self.messages)
        if prompt == "" and self.empty:
            raise BadRecord(f"{self.prompt} is empty{self.empty}")
        uid = record.get(self.uid)
        place = _UID.fullmatch(uid) if isinstance(uid, str) else None
        turns = conversation_turns(
            prompt,
            answer,
            where,
            names=names,
            step=values.step(self._value(record, self.step), self.step),
            group=place[1] if place else uid if self.uid else self._group(record, prompt),
            reward=self._reward(record),
            success=values.outcome(self._value(record, self.success)),
        )
        for rollout in turns:
            yield dataclasses.replace(rollout, trajectory=f"{place[1]}_{place[2]}", turn=int(place[3])) if place else rollout

    def _value(self, record: Record, paths: str | list[str]) -> Any:
        """The value at the first of these paths that is there; else None, unless the framework always writes it."""
        for path in [paths] if isinstance(paths, str) else paths:
            if path and (value := lookup(record, path)) is not MISSING:
                return value
            if path in (self.only or self.has[0]):
                raise KeyError(path)
        return None

    def _group(self, record: Record, prompt: Any) -> Hashable:
        if isinstance(self.group, list):
            parts = [str(part) for path in self.group if isinstance(part := self._value(record, path), str | int | float)]
            return "/".join(parts) if parts else None
        group = hashable(self._value(record, self.group))
        return f"{group}/{prompt_group(prompt).partition(':')[2]}" if self.group_prompt and isinstance(prompt, str | list) else group

    def _reward(self, record: Record) -> float | None:
        if self.reward_as == "columns":
            floats = [value for name, value in record.items() if name not in self.not_rewards and isinstance(value, float)]
            rewards = [value for value in floats if math.isfinite(value)]
            return math.fsum(rewards) if rewards else None
        return (values.total if self.reward_as == "sum" else values.number)(self._value(record, self.reward), self.reward)


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

    @staticmethod
    def recognises(record: Record) -> bool:
        """Whether a record has a prompt and an answer under the generic names."""
        if not any(record.get(name) is not None for name in PROMPTS):
            return False
        return any(name in record for name in ANSWERS) or is_conversation(record.get("messages"))

    def rollouts(self, record: Record, where: str) -> Iterator[Rollout]:
        """The turns of one record."""
        found = {name: self._value(record, name) for name in FIELDS}
        shared: dict[str, Any] = {
            "step": values.step(found["step"]),
            "reward": values.number(found["reward"], self._named("reward")),
            "success": values.flag(found["success"], self._named("success")),
            "group": hashable(found["group"]),
        }
        prompt = found["messages"] if found["prompt"] is None else found["prompt"]
        if prompt is None and found["prompt_ids"] is None:
            raise BadRecord(f"has no prompt: {_lacks(record, PROMPTS)}")
        names = (self._named("prompt"), self._named("response"))
        answer = found["response"]
        if not any(name in self._fields or name in record for name in ANSWERS):
            if not is_conversation(prompt):
                raise BadRecord(f"has no response: {_lacks(record, ANSWERS)}")
            names = (self._named("messages"), f"{self._named('messages')} after the prompt")
            prompt, answer = split_conversation(values.messages(prompt, names[0]), names[0])
        turns = (
            conversation_turns(prompt, answer, where, names=names, **shared)
            if isinstance(answer, list | dict)
            else iter([self._single(found, prompt, where, shared)])
        )
        episode, turn = hashable(found["trajectory"]), values.step(found["turn"], "turn")
        for rollout in turns:
            yield dataclasses.replace(rollout, trajectory=where if episode is None else episode, turn=rollout.turn + (turn or 0))

    def _single(self, found: Mapping[str, Any], prompt: Any, where: str, shared: dict[str, Any]) -> Rollout:
        """One response, with whatever of text and ids there is."""
        ids: dict[str, Any] = {
            name: values.token_ids(found[name], self._named(name)) for name in ("prompt_ids", "response_ids", "reasoning_ids")
        }
        texts: dict[str, Any] = {name: values.text(found[name], self._named(name)) for name in ("response", "reasoning")}
        if any(given is not None and not given for given in (prompt, ids["prompt_ids"])):
            raise BadRecord("the prompt is empty; there is nothing the reasoning could depend on")
        seen: dict[str, Any] = {}
        if values.is_messages(prompt):
            messages = values.messages(prompt, self._named("messages"))
            last = messages[-1]
            if len(messages) > 1 and last["role"] == "assistant" and last.get("content") == texts["response"]:
                del messages[-1]  # the file repeats the response as the last message
            seen["messages"] = messages
        elif prompt is not None:
            seen["prompt"] = values.text(prompt, self._named("prompt"))
        if shared["group"] is None:
            shared["group"] = prompt_group(seen.get("prompt") or seen.get("messages") or ids["prompt_ids"] or ())
        missing = "blank" if ids["reasoning_ids"] == () else None
        return Rollout(**shared, **seen, **ids, **texts, trajectory=where, turn=0, where=where, missing=missing)

    def _named(self, name: str) -> str:
        return self._fields.get(name, name)

    def _value(self, record: Record, name: str) -> Any:
        path = self._fields.get(name)
        if path is None:
            return record.get(name)
        if (value := lookup(record, path)) is MISSING:
            raise BadRecord(f"has no field '{path}' (mapped to {name}); {did_you_mean(path, field_paths(record))}")
        return value


def is_conversation(value: Any) -> bool:
    """Whether a value is messages with an answer among them."""
    return isinstance(value, list) and any(isinstance(message, Mapping) and message.get("role") == "assistant" for message in value)


def hashable(value: Any) -> Hashable:
    """A value as the id of a group or an episode."""
    return json.dumps(value, sort_keys=True) if isinstance(value, list | dict) else value


def _load() -> dict[str, Format]:
    text = files("tether.diagnostics.rollouts").joinpath("frameworks.toml").read_text(encoding="utf-8")
    formats = {}
    for name, section in tomllib.loads(text).items():
        framework = Framework(**section)
        rollouts = getattr(traces, framework.reader) if framework.reader else framework.rollouts
        formats[name] = Format(
            name, framework.title, framework.expects, framework.recognises, rollouts, bool(framework.request), framework.prompt or "prompt"
        )
    expects = "prompt or messages, response or reasoning"
    formats["generic"] = Format("generic", "generic records", expects, GenericFormat.recognises, GenericFormat().rollouts)
    return formats


FORMATS = _load()


def named_format(name: str | None, fields: Mapping[str, str] | None) -> Format | None:
    """The format the user asked for; None leaves it to detection. A field map means generic records."""
    if name is not None and name not in FORMATS:
        raise UnknownName(f"rollout format '{name}' is not known; {did_you_mean(name, FORMATS)}")
    if not fields:
        return FORMATS[name] if name is not None else None
    if name not in (None, "generic"):
        raise BadInput(f"a field map is for generic records, but format '{name}' was asked for; leave one of them out")
    return dataclasses.replace(FORMATS["generic"], rollouts=GenericFormat(fields).rollouts, prompt=fields.get("prompt", "prompt"))


def recognised(records: Sequence[Record]) -> Format | None:
    """The format of a file's first records, if they are rollouts."""
    return next((candidate for record in records for candidate in FORMATS.values() if candidate.recognises(record)), None)


def what_else(records: Sequence[Record]) -> str:
    """What records are that no format recognises."""
    fields = records[0].keys()
    if fields and all(isinstance(value, int | float) or value is None for value in records[0].values()):
        return "metrics"
    known = next((words for names, words in _OTHER_RECORDS if names <= fields), None)
    return known or f"no rollouts: fields {', '.join(sorted(map(str, fields))[:4])}"


def detect(records: Sequence[Record], where: str) -> Format:
    """The format of a file's first records; `where` is the place of the first, for the message when no format recognises any."""
    if (found := recognised(records)) is not None:
        return found
    known = "; ".join(f"{candidate.title} ({candidate.expects})" for candidate in FORMATS.values())
    guess = {name: path for name, path in suggestions(records[0]).items() if name != path}
    remedy = f"try the field map {','.join(f'{name}={path}' for name, path in guess.items())}" if guess else "give a field map"
    got = ", ".join(sorted(map(str, records[0]))) or "none"
    raise BadInput(f"{where} is no rollout of a known format: its fields are {got}; known: {known}; {remedy}")


def suggestions(record: Record) -> dict[str, str]:
    """A field map that would make sense of a record: generic name to the field that looks like it."""
    paths = field_paths(record)
    found: dict[str, str] = {}
    for name, others in _OTHER_NAMES.items():
        known = {path.rpartition(".")[2].lower(): path for path in reversed(paths)}
        near = next((known[other] for other in (name, *others) if other in known), None)
        if near is None and (close := difflib.get_close_matches(name, known, n=1, cutoff=0.75)):
            near = known[close[0]]
        if near is not None:
            found[name] = near
    return found


def field_paths(record: Record, depth: int = 3) -> list[str]:
    """The dotted paths of a record's fields, outer ones first."""
    paths = [str(name) for name in record]
    if depth > 1:
        for name, value in record.items():
            if isinstance(value, Mapping):
                paths += [f"{name}.{path}" for path in field_paths(value, depth - 1)]
    return paths


def _lacks(record: Record, names: Sequence[str]) -> str:
    """The end of a message about a field that is not there."""
    guess = {name: path for name, path in suggestions(record).items() if name in names and name != path}
    hint = "; is it " + " or ".join(f"'{path}'? (field map {name}={path})" for name, path in guess.items()) if guess else ""
    return f"expected one of {', '.join(names)}, got {', '.join(sorted(map(str, record))) or 'no fields'}{hint}"
