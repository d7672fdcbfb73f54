"""The second reading: a seeded sample of each window, in bounded memory, the same whatever the order of the file.

Groups are taken by the smallest hash, and of each group the episodes with the smallest hashes. The size of a sample is set by what it
costs to score: N reasonings under each of P prompts. `prompts` groups of `samples` reasonings are the measure of it; where groups hold
fewer reasonings, more groups are taken at the same cost, because then only more prompts can tell chance from dependence.

A group is removed when the sample exceeds its cost, the largest hash first. A removed group never returns. The groups that remain are the
longest run of groups in the order of their hashes that fits, because each removal was forced by a subset of the final groups.
"""

import heapq
from array import array
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.seeding import derive_seed
from tether.diagnostics.audit.scan import StepNumber, Window, group_hash
from tether.diagnostics.rollouts import Rollout

CHARS_KEPT = 16_000
"""Of a reasoning; far more than the tokens that are scored."""
LARGEST_ID = 2**62


@dataclass(frozen=True, slots=True)
class SampledRollout:
    """The part of a rollout that the sample keeps; token ids as compact arrays."""

    step: StepNumber
    group: Hashable
    where: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    prompt_ids: "array[int] | None"
    reasoning: str | None
    reasoning_ids: "array[int] | None"
    response_ids: "array[int] | None"
    """Only where there are no ids of the reasoning alone: it is found within them."""
    lead: str
    think_implied: bool
    reward: float | None
    success: bool | None

    @classmethod
    def of(cls, rollout: Rollout) -> "SampledRollout":
        return cls(
            step=rollout.step,
            group=rollout.group,
            where=rollout.where,
            prompt=rollout.prompt,
            messages=rollout.messages,
            prompt_ids=_compact(rollout.prompt_ids),
            reasoning=None if rollout.reasoning is None else rollout.reasoning[:CHARS_KEPT],
            reasoning_ids=_compact(rollout.reasoning_ids),
            response_ids=_compact(rollout.response_ids) if rollout.reasoning_ids is None else None,
            lead=rollout.lead,
            think_implied=rollout.think_implied,
            reward=rollout.reward,
            success=rollout.success,
        )


class WindowSample:
    """The sample of one window; `add` every rollout of it that has reasoning, in any order."""

    def __init__(self, prompts: int, samples: int, seed: int) -> None:
        self._prompts = prompts
        self._samples = samples
        self._seed = seed
        self._cost = prompts * prompts * samples
        self._groups: dict[int, _Members] = {}
        self._largest: list[int] = []
        self._limit: int | None = None
        self._total = 0

    def add(self, rollout: Rollout) -> None:
        place = group_hash(self._seed, rollout.step, rollout.group)
        if self._limit is not None and place >= self._limit:
            return
        members = self._groups.get(place)
        if members is None:
            members = self._groups[place] = _Members(self._samples)
            heapq.heappush(self._largest, -place)
        self._total += members.add(rollout, self._seed)
        while len(self._groups) > self._prompts and len(self._groups) * self._total > self._cost:
            self._limit = -heapq.heappop(self._largest)
            self._total -= len(self._groups.pop(self._limit))

    def drawn(self) -> list[SampledRollout]:
        """By group, then by episode, each in the order of the hashes."""
        return [member for place in sorted(self._groups) for member in self._groups[place].in_order()]


class _Members:
    """The episodes of one group with the smallest hashes, with one turn each: the one with the smallest hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[int, tuple[int, SampledRollout]] = {}

    def add(self, rollout: Rollout, seed: int) -> int:
        """Take a rollout or leave it; returns by how many the members have grown."""
        episode = derive_seed("audit episode", seed, repr(rollout.trajectory))
        turn = derive_seed("audit turn", seed, repr(rollout.trajectory), rollout.turn)
        held = self._of.get(episode)
        if held is not None:
            if turn < held[0]:
                self._of[episode] = (turn, SampledRollout.of(rollout))
            return 0
        if len(self._of) < self._most:
            self._of[episode] = (turn, SampledRollout.of(rollout))
            return 1
        last = max(self._of)
        if episode < last:
            del self._of[last]
            self._of[episode] = (turn, SampledRollout.of(rollout))
        return 0

    def in_order(self) -> list[SampledRollout]:
        return [self._of[episode][1] for episode in sorted(self._of)]

    def __len__(self) -> int:
        return len(self._of)


def draw(
    rollouts: Iterable[Rollout], windows: Sequence[Window], *, all_turns: bool, prompts: int, samples: int, seed: int
) -> list[list[SampledRollout]]:
    """The sample of every window."""
    drawn = [WindowSample(prompts, samples, seed) for _ in windows]
    window_of: Mapping[StepNumber, WindowSample] = {step: drawn[index] for index, window in enumerate(windows) for step in window.steps}
    for rollout in rollouts:
        sample = window_of.get(rollout.step)
        if sample is not None and rollout.has_reasoning and (all_turns or rollout.turn == 0):
            sample.add(rollout)
    return [sample.drawn() for sample in drawn]


def _compact(ids: tuple[int, ...] | None) -> "array[int] | None":
    if ids is None:
        return None
    try:
        return array("q", ids)
    except OverflowError:  # no tokenizer has such an id; the check of the vocabulary will say so
        return array("q", [min(token, LARGEST_ID) for token in ids])
