"""Completions of another trainer as Tether's groups, and Tether's episodes as completions: one sequence of tokens with a mask.

A row is a prompt and everything that followed it. The mask tells tokens that the model wrote from those of tools and environments; each
stretch of written tokens is a turn. `flatten` is the way back: an episode with its full history as one row.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput
from tether.core.protocols import Sampling, few_shot_of
from tether.core.seeding import derive_seed
from tether.core.types import Completion, Group, Trajectory, Turn
from tether.diagnostics.logger import Generations, reasoning_span
from tether.diagnostics.rollouts.reasoning import ReasoningRule
from tether.envs.registry import make_env
from tether.rollout.engines.stop_rule import StopRule

Ids = tuple[int, ...]

TRIES = 20
"""Instances looked at for each prompt of a data set, before the environment counts as too small."""


@dataclass(frozen=True, slots=True)
class Row:
    """One completion."""

    key: str
    """Equal for rows of the same data row."""
    prompt_ids: Ids
    completion_ids: Ids
    sampled: tuple[bool, ...]
    """Which tokens of the completion the model wrote; the others are answers of tools and environments."""
    success: bool | None
    spans: tuple[tuple[int, int] | None, ...] | None
    """The reasoning of each response, where the rollout knows it."""


def rows_as_generations(
    rows: Sequence[Row],
    groups: Sequence[Hashable],
    rewards: Sequence[float],
    successes: Sequence[bool] | None,
    decode: Callable[[Ids], str],
    rule: ReasoningRule,
) -> Generations:
    """The rows as groups. A row without a reward (NaN) is no evidence: it stands in `errored`, as an environment error does."""
    found: dict[Hashable, Group] = {}
    for number, (row, name) in enumerate(zip(rows, groups, strict=True)):
        group = found.setdefault(name, Group(len(found), derive_seed("prompt", *row.prompt_ids), []))
        member = len(group.trajectories) + len(group.errored)
        turns, reward = _turns(row, decode, rule), rewards[number]
        if reward != reward or not turns:
            error = "no reward function scored this completion" if reward != reward else "the completion is empty or masked as truncated"
            group.errored.append(Trajectory(group.index, member, group.seed, turns, StopReason.ENV_ERROR, error=error))
            continue
        turns[-1].reward = reward
        success = successes is not None and bool(successes[number])
        stop = StopReason.UNKNOWN if successes is None else StopReason.SUCCESS if success else StopReason.FAILURE
        group.trajectories.append(Trajectory(group.index, member, group.seed, turns, stop, success))
    return Generations(list(found.values()), list(found), True, successes is not None, True)


def _turns(row: Row, decode: Callable[[Ids], str], rule: ReasoningRule) -> list[Turn]:
    """One turn for each stretch of sampled tokens, with what was fed before it."""
    turns: list[Turn] = []
    context, start = row.prompt_ids, 0
    while start < len(row.completion_ids):
        end = start
        while end < len(row.completion_ids) and row.sampled[end] == row.sampled[start]:
            end += 1
        ids = row.completion_ids[start:end]
        if not row.sampled[start]:
            context = (*context, *ids)
        else:
            text = decode(ids)
            carried = row.spans if rule.pattern is None else None  # a pattern of the caller looks elsewhere than the think tags
            span = carried[len(turns)] if carried is not None and len(turns) < len(carried) else reasoning_span(decode, ids, text, rule)
            turns.append(
                Turn(
                    context_ids=context,
                    response_ids=ids,
                    logprobs=(),
                    finish=FinishReason.END_OF_TURN,
                    text=text,
                    reasoning_span=span,
                    valid=span is not None,
                    observation=decode(context),
                    new_context=not turns,
                )
            )
            context = ()
        start = end
    return turns


class Flat(NamedTuple):
    """An episode as one row."""

    prompt_ids: list[int]
    completion_ids: list[int]
    mask: list[int]
    """1 where a token was sampled."""
    logprobs: list[float]
    """0 where a token was not sampled, or where the engine gives none."""


def flatten(trajectory: Trajectory) -> Flat:
    """The first prompt, everything after it, and which of that was sampled; the context must be the full history."""
    flat = Flat(list(trajectory.turns[0].context_ids) if trajectory.turns else [], [], [], [])
    for number, turn in enumerate(trajectory.turns):
        fed = turn.context_ids if number else ()
        flat.completion_ids.extend((*fed, *turn.response_ids))
        flat.mask.extend([0] * len(fed) + [1] * len(turn.response_ids))
        flat.logprobs.extend((*[0.0] * len(fed), *(turn.logprobs or [0.0] * len(turn.response_ids))))
    return flat


def cut_response(
    stop: StopRule, ids: Sequence[int], logprobs: Sequence[float] | None, sampling: Sampling, closing_tags: tuple[str, ...]
) -> Completion:
    """What another engine wrote, up to the token that ends a response by Tether's rule."""
    end, finish = stop.first_end([int(token) for token in ids], 0, sampling, closing_tags)
    known = tuple(float(value) for value in logprobs[:end]) if logprobs is not None else ()
    return Completion(tuple(int(token) for token in ids[:end]), known, finish or FinishReason.LENGTH)


def distinct_instances(
    name: str, options: Mapping[str, Any], num_prompts: int, seed_of: Callable[[int], int]
) -> dict[tuple[str, ...], int]:
    """The texts of each instance's first prompt (instructions, examples that are shown as turns, first observation) to its seed."""
    env = make_env(name, **options)
    found: dict[tuple[str, ...], int] = {}
    for number in range(TRIES * num_prompts):
        seed = seed_of(number)
        observation = env.reset(seed).text
        examples = [text for exchange in few_shot_of(env) for text in exchange]
        found.setdefault((str(env.instructions), *examples, observation), seed)
        if len(found) == num_prompts:
            return found
    raise BadInput(
        f"environment '{name}' has only {len(found)} different first observations among {TRIES * num_prompts} instances; "
        f"give num_prompts={len(found)} or less, or options with more variety"
    )


def opening_roles(count: int) -> list[str]:
    """Who speaks the messages of a first prompt of so many texts."""
    return ["system", *["user", "assistant"] * ((count - 2) // 2), "user"]


def opening_messages(texts: Sequence[str]) -> list[dict[str, str]]:
    """A first prompt as chat messages."""
    return [{"role": role, "content": text} for role, text in zip(opening_roles(len(texts)), texts, strict=True)]
