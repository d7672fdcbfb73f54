"""Generations of any trainer as Tether's groups: rows of prompts and responses in, `Group` records out.

A row is one turn. Token ids are used as they are; a text is encoded with the tokenizer, its parts (before the reasoning, the reasoning, the rest)
apart from each other, so that the borders lie where the text has them. The reasoning of a response is what stands between its think tags, or
what a pattern of the caller matches. A trainer that knows the reasonings may give them alone; the responses are then the reasonings.

Everything downstream (metrics, pairs, the run folder) reads these groups as it reads those of Tether's own sampler, which is why its numbers
are the same.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.grammar import THINK_CLOSE
from tether.core.seeding import derive_seed
from tether.core.types import Group, Trajectory, Turn
from tether.diagnostics.pairs import Ids, TokensOrText, encoded
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.models.chat import tokens_before

THINK_TAGS = ReasoningRule()


@dataclass(frozen=True, slots=True)
class Generations:
    """The generations of one step as groups, and which of their fields the trainer gave."""

    groups: list[Group]
    names: list[Hashable]
    """The caller's id of each group."""
    has_rewards: bool
    has_successes: bool
    has_responses: bool
    """Whole responses, not reasonings alone."""


def read_generations(
    *,
    prompts: Sequence[TokensOrText],
    groups: Sequence[Hashable],
    responses: Sequence[TokensOrText] | None = None,
    reasonings: Sequence[TokensOrText | None] | None = None,
    rewards: Sequence[float] | None = None,
    successes: Sequence[bool] | None = None,
    trajectories: Sequence[Hashable] | None = None,
    logprobs: Sequence[Sequence[float] | None] | None = None,
    tokenizer: Any = None,
    rule: ReasoningRule = THINK_TAGS,
) -> Generations:
    """Rows as groups.

    Args:
        prompts: everything the model saw before each response, as token ids or text.
        groups: the id of each row's group: rows with the same first prompt, in any order.
        responses: what the model wrote, as token ids or text; or None, with `reasonings`.
        reasonings: the reasoning alone, where the caller has cut it out; empty or None where there is none.
        rewards, successes: of each row's trajectory.
        trajectories: which rows are turns of one episode, in order; by default every row is an episode of its own.
        logprobs: of the sampled tokens of each row, for responses that are token ids.
        tokenizer: needed for texts, and to find the reasoning in token ids.
        rule: where the reasoning is in a response.
    """
    if (responses is None) == (reasonings is None):
        got = "neither" if responses is None else "both"
        raise BadInput(f"give responses or reasonings, got {got}; responses are cut at their think tags")
    columns = {"groups": groups, "responses": responses, "reasonings": reasonings, "rewards": rewards, "successes": successes}
    for name, values in {**columns, "trajectories": trajectories, "logprobs": logprobs}.items():
        if values is not None and len(values) != len(prompts):
            raise BadInput(f"one row per turn: got {len(prompts)} prompts and {len(values)} {name}; give equally many")
    if not len(prompts):
        raise BadInput("the batch is empty; give at least one row")
    reader = _Reader(tokenizer, rule)
    members: dict[Hashable, dict[Hashable, list[int]]] = {}
    for row, group in enumerate(groups):
        members.setdefault(group, {}).setdefault(row if trajectories is None else trajectories[row], []).append(row)
    found = []
    for index, episodes in enumerate(members.values()):
        seed = derive_seed("prompt", *reader.prompt(prompts[next(iter(episodes.values()))[0]], "prompts"))
        group_record = Group(index, seed, [])
        for member, rows in enumerate(episodes.values()):
            turns: list[Turn] = []
            for row in rows:
                written = (responses if responses is not None else reasonings)[row]  # type: ignore[index]
                turns.append(
                    reader.turn(turns, prompts[row], written, responses is not None, row, None if logprobs is None else logprobs[row])
                )
            if rewards is not None:
                turns[-1].reward = _agreed(rewards, rows, "rewards")
            success = successes is not None and bool(_agreed(successes, rows, "successes"))
            stop = StopReason.UNKNOWN if successes is None else StopReason.SUCCESS if success else StopReason.FAILURE
            group_record.trajectories.append(Trajectory(index, member, seed, turns, stop, success))
        found.append(group_record)
    return Generations(found, list(members), rewards is not None, successes is not None, responses is not None)


def _agreed(values: Sequence[float], rows: Sequence[int], name: str) -> float:
    """The one value of a trajectory; all of its rows must agree."""
    got = [math.nan if values[row] is None else float(values[row]) for row in rows]
    if not math.isfinite(got[0]) or any(value != got[0] for value in got):
        raise BadInput(f"{name} of the rows {list(rows)} are {got}; give every turn of a trajectory the same finite value")
    return got[0]


class _Reader:
    """Rows to turns, with one tokenizer and one rule."""

    def __init__(self, tokenizer: Any, rule: ReasoningRule) -> None:
        self._tokenizer, self._rule = tokenizer, rule

    def prompt(self, prompt: TokensOrText, where: str) -> Ids:
        ids = encoded(prompt, self._tokenizer, where, beginning=True)
        if not ids:
            raise BadInput(f"{where} is empty; give everything the model saw before the response")
        return ids

    def turn(
        self,
        earlier: Sequence[Turn],
        prompt: TokensOrText,
        written: TokensOrText | None,
        whole: bool,
        row: int,
        logprobs: Sequence[float] | None,
    ) -> Turn:
        context = self.prompt(prompt, f"prompts[{row}]")
        seen = _tokens_so_far(earlier)
        appended = bool(seen) and context[: len(seen)] == seen
        if whole:
            ids, text, span = self._response(written if written is not None else (), f"responses[{row}]")
        else:
            ids = encoded(written if written is not None else (), self._tokenizer, f"reasonings[{row}]")
            # The tag is not among the ids: only readers of the text need to see where the reasoning ends.
            text = f"{written if isinstance(written, str) else self._decode(ids)}{THINK_CLOSE}" if ids else ""
            span = (0, len(ids)) if ids else None
        if logprobs is not None and len(logprobs) != len(ids):
            raise BadInput(f"logprobs[{row}] has {len(logprobs)} values for {len(ids)} tokens; give one for each token of the response")
        return Turn(
            context_ids=context[len(seen) :] if appended else context,
            response_ids=ids,
            logprobs=tuple(float(value) for value in logprobs) if logprobs is not None else (),
            finish=FinishReason.END_OF_TURN,
            text=text,
            reasoning_span=span,
            valid=span is not None,
            observation=prompt if isinstance(prompt, str) else self._decode(context[len(seen) :] if appended else context),
            new_context=not appended,
        )

    def _response(self, written: TokensOrText, where: str) -> tuple[Ids, str, tuple[int, int] | None]:
        """Token ids, text, and the span of the reasoning in the ids."""
        if isinstance(written, str):
            cut = self._rule.cut(written)
            if cut.missing is not None:
                return encoded(written, self._tokenizer, where), written, None
            parts = [
                encoded(part, self._tokenizer, where) for part in (written[: cut.start], written[cut.start : cut.end], written[cut.end :])
            ]
            start = len(parts[0])
            return (*parts[0], *parts[1], *parts[2]), written, (start, start + len(parts[1]))
        ids = encoded(written, self._tokenizer, where)
        if self._tokenizer is None:
            raise BadInput(f"{where} is token ids; give the tokenizer, which finds the reasoning in them, or give reasonings")
        text = self._decode(ids)
        return ids, text, reasoning_span(self._decode, ids, text, self._rule)

    def _decode(self, ids: Ids) -> str:
        if self._tokenizer is None:
            return ""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def reasoning_span(decode: Any, ids: Ids, text: str, rule: ReasoningRule = THINK_TAGS) -> tuple[int, int] | None:
    """Start and end of the reasoning in sampled token ids; None where there is none.

    A token that straddles a border belongs to neither side of it: the one that ends the opening tag counts to x, the one that begins the
    closing tag is left out.
    """
    cut = rule.cut(text)
    if cut.missing is not None:
        return None
    start = tokens_before(decode, ids, cut.start)
    if len(decode(ids[:start])) < cut.start:
        start += 1
    end = tokens_before(decode, ids, cut.end)
    return (start, end) if start < end else None


def _tokens_so_far(turns: Sequence[Turn]) -> Ids:
    """Every token of the present context."""
    start = max((index for index, turn in enumerate(turns) if turn.new_context), default=0)
    return tuple(token for turn in turns[start:] for token in (*turn.context_ids, *turn.response_ids))
