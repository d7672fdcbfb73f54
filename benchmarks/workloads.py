"""What the speed benchmarks make a model do: conversations of fixed lengths, and the least that playing them costs.

A conversation is fed a prompt of random words, answers with so many tokens, is shown an observation of random words, answers again. Nothing
but the length ends a response: it names no closing tag, and the end of turn is an id that the model cannot draw (a shape, whose
vocabulary is larger than its tokenizer's, draws it once in a vocabulary's worth of tokens). Rates are of the tokens that were really sampled.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from shapes import Machine, ModelSize, seen_by

from tether.core.enums import FinishReason, StopReason
from tether.core.protocols import PromptTokens
from tether.core.seeding import generator
from tether.core.types import Completion, Group, Trajectory, Turn
from tether.models.policy import Policy
from tether.rollout.engines.native import NativeEngine
from tether.training.settings import RolloutSettings

NEVER = "<|never|>"


@dataclass(frozen=True)
class Conversations:
    """Groups of conversations that begin alike."""

    groups: int
    group_size: int
    prompt: int
    response: int
    turns: int = 1
    observed: int = 0

    @property
    def rows(self) -> int:
        return self.groups * self.group_size

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.prompt + self.turns * self.response + (self.turns - 1) * self.observed

    def __str__(self) -> str:
        rows = f"{self.rows}" if self.group_size == 1 else f"{self.groups} prompts x {self.group_size}"
        turns = "" if self.turns == 1 else f", {self.turns} turns, {self.observed} observed between"
        return f"{rows}, {self.prompt} in, {self.response} out{turns}"


class FixedConversation:
    """A conversation of fixed lengths; it keeps what was said, as an episode does."""

    closing_tags: tuple[str, ...] = ()

    def __init__(
        self, group: int, member: int, prompt: tuple[int, ...], observations: Sequence[tuple[int, ...]], uniforms: np.random.Generator
    ) -> None:
        self.prefix_key = group
        self.uniforms = uniforms
        self.trajectory = Trajectory(group, member, group, [], StopReason.TURN_LIMIT)
        self._feeds = [prompt, *observations]

    def begin(self) -> PromptTokens:
        return self._feeds[0]

    def receive(self, completion: Completion) -> PromptTokens:
        turns = self.trajectory.turns
        turns.append(_turn(self._feeds[len(turns)], completion.token_ids, completion.logprobs, completion.finish, new_context=not turns))
        return self._feeds[len(turns)] if len(turns) < len(self._feeds) else None


def make_conversations(work: Conversations, vocabulary: int, run: int = 0) -> list[FixedConversation]:
    """The conversations, not begun; the words depend on the run, the lengths do not."""
    made = []
    for group in range(work.groups):
        prompt = _words(vocabulary, work.prompt, "prompt", run, group)
        for member in range(work.group_size):
            shown = [_words(vocabulary, work.observed, "shown", run, group, member, turn) for turn in range(work.turns - 1)]
            made.append(FixedConversation(group, member, prompt, shown, generator("benchmark", "draws", run, group, member)))
    return made


def grouped(played: Sequence[FixedConversation]) -> list[Group]:
    """What was said, by prompt."""
    groups: dict[int, Group] = {}
    for conversation in played:
        index = conversation.prefix_key
        groups.setdefault(index, Group(index, index, [])).trajectories.append(conversation.trajectory)
    return list(groups.values())


def written_groups(work: Conversations, vocabulary: int, ragged: float = 0.0) -> list[Group]:
    """Groups as if they had been played, of random words, each word as likely as any other; responses are shorter by up to a share `ragged`."""
    played = make_conversations(work, vocabulary)
    for conversation in played:
        feed, rng = conversation.begin(), generator("benchmark", "written", conversation.prefix_key, conversation.trajectory.member)
        while feed is not None:
            size = work.response - int(rng.integers(0, int(ragged * work.response) + 1))
            ids = tuple(rng.integers(0, vocabulary, size).tolist())
            feed = conversation.receive(Completion(ids, (-float(np.log(vocabulary)),) * size, FinishReason.LENGTH))
    groups = grouped(played)
    pay(groups)
    return groups


def pay(groups: Sequence[Group]) -> None:
    """A random reward for the last turn of every trajectory, 0 or 1."""
    for group in groups:
        for trajectory in group.trajectories:
            trajectory.turns[-1].reward = float(generator("benchmark", "reward", group.index, trajectory.member).integers(0, 2))


def endless(tokenizer: Any) -> Any:
    """A copy of a tokenizer whose end of turn is a new word behind all others."""
    changed = copy.deepcopy(tokenizer)
    changed.add_special_tokens({"eos_token": NEVER})
    return changed


class EndlessPolicy(Policy):
    """A policy whose turns only the tokenizer's end of turn ends, whatever the model's generation config names."""

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        assert self.tokenizer is not None
        return (int(self.tokenizer.eos_token_id),)


def engine_for(
    model: Any, tokenizer: Any, work: Conversations, cache_gb: float | None = None, precision: Literal["fp8"] | None = None
) -> NativeEngine:
    """An engine as a run builds it, with a row for every conversation and a tokenizer that ends none."""
    limit = int(model.config.max_position_embeddings)
    if work.longest > limit:
        raise SystemExit(f"conversations of {work.longest} tokens ({work}) are longer than the model's {limit}; shorten them")
    longest = min(max(work.longest, RolloutSettings().max_context), limit)
    policy = EndlessPolicy(model, endless(tokenizer))
    return NativeEngine(policy, max_rows=work.rows, max_context=longest, cache_gb=cache_gb, precision=precision)


def num_sampled(groups: Sequence[Group]) -> int:
    return sum(trajectory.num_sampled for group in groups for trajectory in group.trajectories)


@dataclass(frozen=True)
class RolloutFloor:
    """Seconds that playing conversations takes at the machine's rates, all of them side by side."""

    prefill: float
    decode: float


def rollout_floor(groups: Sequence[Group], size: ModelSize, machine: Machine) -> RolloutFloor:
    """Prompts of a group once, every other token once; each step reads the weights once and each token the cache before it.

    Decoding takes as long as its bytes or its products, whichever is longer; prefill is products alone.
    """
    fed, decoded, seen_fed, seen_decoded, steps = 0, 0, 0.0, 0.0, 0
    for group in groups:
        for number, trajectory in enumerate(group.trajectories):
            start = 0
            for turn in trajectory.turns:
                context, response = len(turn.context_ids), len(turn.response_ids)
                if number == 0 or start:
                    fed, seen_fed = fed + context, seen_fed + seen_by(start, context)
                seen_decoded += seen_by(start + context, response)
                start += context + response
            decoded, steps = decoded + trajectory.num_sampled, max(steps, trajectory.num_sampled)
    moved = steps * size.weight_bytes + seen_decoded * size.cache_bytes
    return RolloutFloor(
        prefill=size.forward_flops(fed, 0, seen_fed) / machine.flops,
        decode=max(moved / machine.bytes, size.forward_flops(decoded, decoded, seen_decoded) / machine.flops),
    )


def train_flops(groups: Sequence[Group], size: ModelSize, *, all_predicted: bool) -> float:
    """Forward and backward (three times forward): every token of every trajectory, the head for all tokens (6ND) or for sampled ones."""
    total = 0.0
    for group in groups:
        for trajectory in group.trajectories:
            length = sum(len(turn.context_ids) + len(turn.response_ids) for turn in trajectory.turns)
            total += size.forward_flops(length, length if all_predicted else trajectory.num_sampled, seen_by(0, length))
    return 3.0 * total


def _words(vocabulary: int, count: int, *path: int | str) -> tuple[int, ...]:
    return tuple(generator("benchmark", *path).integers(0, vocabulary, count).tolist())


def _turn(context: tuple[int, ...], ids: tuple[int, ...], logprobs: tuple[float, ...], finish: FinishReason, *, new_context: bool) -> Turn:
    return Turn(context, ids, logprobs, finish, text="", reasoning_span=None, new_context=new_context)
