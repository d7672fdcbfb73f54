"""Tether's own trajectories.jsonl (runs/schema.py): one episode a line, every turn with the sampled token ids.

Nothing is tokenised again: x is the ids of everything the turn saw (since its last new context), z the recorded span. A run that was resumed
wrote some steps twice; only the last attempt of each step and split counts, as for every reader of a run folder.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from tether.core.grammar import parse_response
from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.diagnostics.rollouts.record import BadRecord, Rollout

_HEAD = re.compile(rb'\s*\{"step": (\d+), "split": "([^"\\]*)", "attempt": (\d+), ')
"""How the run store begins a line: enough to place it without parsing its token ids."""

Block = tuple[int, bytes]
TAGS = ReasoningRule()


def recognises(record: values.Record) -> bool:
    return {"step", "split", "group", "member", "turns"} <= record.keys()


class Attempts:
    """Which lines a resumed run has written again."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._last: dict[Block, int] = {}
        for line in lines:
            if (placed := _placed(line)) is not None:
                block, attempt = placed
                self._last[block] = max(attempt, self._last.get(block, 0))

    def supersede(self, line: bytes) -> bool:
        """Whether a later attempt stands in the file; a line without an attempt stays."""
        placed = _placed(line)
        return placed is not None and placed[1] < self._last.get(placed[0], 0)  # a running run may have added blocks since


def rollouts(record: values.Record, where: str) -> Iterator[Rollout]:
    """The turns of one episode."""
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
        if not isinstance(turn, dict):
            raise BadRecord(f"turns[{index}] is {values.shown(turn)}; expected an object")
        named = f"turns[{index}]"
        context = values.token_ids(turn.get("context_ids"), f"{named}.context_ids")
        sampled = values.token_ids(turn.get("response_ids"), f"{named}.response_ids")
        if context is None or sampled is None:
            raise BadRecord(f"{named} has no token ids; expected context_ids and response_ids")
        seen = context if turn.get("fresh") else seen + context
        start, thoughts = _thoughts(turn, sampled, named)
        yield Rollout(
            **shared,
            turn=index,
            prompt=values.text(turn.get("observation"), f"{named}.observation"),
            prompt_ids=seen + sampled[:start],  # what stands before the reasoning belongs to x: the tag, where the model opens it
            response_ids=sampled,
            **thoughts,
        )
        seen += sampled


def _thoughts(turn: values.Record, sampled: tuple[int, ...], named: str) -> tuple[int, dict[str, Any]]:
    """Where the reasoning starts in the sampled ids, and the reasoning."""
    response = values.text(turn.get("response"), f"{named}.response") or ""
    span = values.token_ids(turn.get("reasoning_span"), f"{named}.reasoning_span")
    if span is None:
        return 0, {"response": response, "missing": "unclosed"}
    if len(span) != 2 or not span[0] <= span[1] <= len(sampled):
        raise BadRecord(f"{named}.reasoning_span is {list(span)}; expected start and end within {len(sampled)} response ids")
    ids = sampled[slice(*span)]
    end = parse_response(response).reasoning_end
    start = TAGS.cut(response).start if span[0] else 0
    return span[0], {
        "response": response,
        "reasoning": response[start:end] if ids and end is not None else None,
        "reasoning_ids": ids,
        "missing": None if ids else "blank",
    }


def _placed(line: bytes) -> tuple[Block, int] | None:
    head = _HEAD.match(line)
    return None if head is None else ((int(head[1]), head[2]), int(head[3]))
