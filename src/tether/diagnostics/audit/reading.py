"""The two readings of the files, both in bounded memory: what every step holds and which steps are measured, then a seeded sample of them.

**First reading.** Everything that can be counted without keeping text is counted over all rollouts: episodes, rewards, success, empty
reasoning. Of the groups of a step only those with the smallest seeded hashes are remembered, for the reward variance within a prompt: a uniform
sample that does not depend on the order of the file and stays within its size, however many groups there are. A measurement compares prompts with
each other, so it needs several: where steps hold too few (a batch of one prompt is common), neighbouring steps are pooled into one window until
there are enough. Where there are more steps than are worth the cost, some are left out evenly; the first and the last are always measured.

**Second reading.** Groups are taken by the smallest hash, and of each group the episodes with the smallest hashes. The size of a sample is set by
what it costs to score: N reasonings under each of P prompts. `prompts` groups of `samples` reasonings are the measure of it; where groups hold
fewer reasonings, more groups are taken at the same cost, because then only more prompts can tell chance from dependence. A group is removed when
the sample exceeds its cost, the largest hash first, and never returns. The groups that remain are the longest run of groups in the order of
their hashes that fits, because each removal was forced by a subset of the final groups.
"""

import dataclasses
import heapq
import math
from array import array
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tether.algorithms.filters.scores import ZERO
from tether.core.errors import BadInput
from tether.core.evidence import FEWEST_PROMPTS
from tether.core.seeding import derive_seed
from tether.diagnostics.rollouts import Rollout

MAX_GROUPS = 1000
"""Groups of a step whose reward variance is tracked; with more groups, these are a sample."""
MAX_STEPS = 20_000
"""A file with more is read by a field that is no training step."""

StepNumber = int | None
"""None where the file does not say."""

ENOUGH_GROUPS = 8
"""Steps that typically hold fewer prompts than a verdict needs are pooled until there are about so many."""
MAX_WINDOWS = 20


@dataclass(slots=True)
class Running:
    """Count, mean and variance of a stream (Welford)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        before = value - self.mean
        self.mean += before / self.count
        self.squares += before * (value - self.mean)

    @property
    def variance(self) -> float:
        """With ddof 1; zero of a single value."""
        return self.squares / (self.count - 1) if self.count > 1 else 0.0


@dataclass(frozen=True, slots=True)
class RewardStatistics:
    """Reward variance within prompts, over the prompts that have two rewards or more."""

    num_groups: int
    rv_mean: float
    rv_std: float
    rv_ratio: float | None
    """Std / Mean over prompts; None where no prompt varies."""
    zero_share: float
    """Share of the prompts whose rewards are all equal."""


@dataclass(slots=True)
class StepCounts:
    """What one step holds. `scope_rollouts` are those the audit may draw from: first turns, or all turns."""

    step: StepNumber
    num_rollouts: int = 0
    num_episodes: int = 0
    num_scope: int = 0
    num_empty: int = 0
    """Rollouts in scope without reasoning."""
    missing: Counter[str] = field(default_factory=Counter)
    """The same by cause, a key of record.MISSING."""
    reasoning_chars: Running = field(default_factory=Running)
    reward: Running = field(default_factory=Running)
    num_judged: int = 0
    """Episodes that say whether they succeeded."""
    num_success: int = 0
    rewards_of: dict[int, Running] = field(default_factory=dict)
    """By the hash of the group; Running.count is 0 for a group without rewards."""
    _order: list[int] = field(default_factory=list)
    is_sample: bool = False
    """More groups were met than are followed."""

    @property
    def num_groups(self) -> int:
        """Groups that were followed: all of them, unless `is_sample`."""
        return len(self.rewards_of)

    @property
    def success(self) -> float | None:
        return self.num_success / self.num_judged if self.num_judged else None

    def add(self, rollout: Rollout, group: int, in_scope: bool) -> None:
        self.num_rollouts += 1
        if in_scope:
            self.num_scope += 1
            if not rollout.has_reasoning:
                self.num_empty += 1
                self.missing[rollout.missing or "blank"] += 1
            if rollout.has_reasoning and rollout.reasoning is not None:
                self.reasoning_chars.add(len(rollout.reasoning))
        if rollout.turn:  # the reward is that of the episode: counted once
            return
        self.num_episodes += 1
        if rollout.success is not None:
            self.num_judged += 1
            self.num_success += rollout.success
        followed = self._followed(group)
        if rollout.reward is not None:
            self.reward.add(rollout.reward)
            if followed is not None:
                followed.add(rollout.reward)

    def _followed(self, group: int) -> Running | None:
        """The rewards of a group, or None for one that the bounded sample leaves out."""
        found = self.rewards_of.get(group)
        if found is not None:
            return found
        if len(self._order) >= MAX_GROUPS:
            self.is_sample = True
            if group > -self._order[0]:
                return None
            del self.rewards_of[-heapq.heapreplace(self._order, -group)]
        else:
            heapq.heappush(self._order, -group)
        self.rewards_of[group] = Running()
        return self.rewards_of[group]


def scan(rollouts: Iterable[Rollout], *, all_turns: bool, seed: int) -> dict[StepNumber, StepCounts]:
    """Counts by step, in the order of the steps.

    Args:
        all_turns: the audit's scope: every turn, or first turns only.
    """
    found: dict[StepNumber, StepCounts] = {}
    for rollout in rollouts:
        counts = found.get(rollout.step)
        if counts is None:
            if len(found) >= MAX_STEPS:
                raise BadInput(
                    f"the rollouts have more than {MAX_STEPS} different steps (the last: {rollout.step}); a step holds many rollouts: "
                    "map another field, or none"
                )
            counts = found[rollout.step] = StepCounts(rollout.step)
        counts.add(rollout, group_hash(seed, rollout.step, rollout.group), all_turns or rollout.turn == 0)
    if not all_turns and not any(counts.num_scope for counts in found.values()):
        raise BadInput("no rollout is a first turn: turns count from 0 and none has that number; take all turns with --scope trajectory")
    return dict(sorted(found.items(), key=lambda item: (item[0] is not None, item[0] or 0)))


def group_hash(seed: int, step: StepNumber, group: Hashable) -> int:
    """The place of a group in the seeded order that decides what is sampled."""
    return derive_seed("audit group", seed, str(step), repr(group))


def reward_statistics(counts: Iterable[StepCounts]) -> RewardStatistics | None:
    """Over the groups of one step or several; None where no group has two rewards."""
    variances = [rewards.variance for step in counts for rewards in step.rewards_of.values() if rewards.count > 1]
    if not variances:
        return None
    spread = Running()
    for variance in variances:
        spread.add(variance)
    deviation = math.sqrt(spread.squares / spread.count)
    ratio = deviation / spread.mean if spread.mean > ZERO else None
    return RewardStatistics(len(variances), spread.mean, deviation, ratio, sum(v <= ZERO for v in variances) / len(variances))


@dataclass(frozen=True, slots=True)
class Window:
    """One step, or a few neighbouring ones that are measured together. Example: Window((5, 6, 7, 8)) is named "5-8"."""

    steps: tuple[StepNumber, ...]

    @property
    def name(self) -> str:
        if self.steps == (None,):
            return "all"
        first, last = self.steps[0], self.steps[-1]
        return str(last) if first == last else f"{first}-{last}"

    @property
    def last(self) -> int:
        """Its place on the axis of a curve."""
        return self.steps[-1] or 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The windows in order, and in words what was decided."""

    windows: tuple[Window, ...]
    notes: tuple[str, ...]


def plan_windows(counts: Mapping[StepNumber, StepCounts], asked: Sequence[int] = ()) -> Plan:
    """The windows to measure.

    Args:
        counts: of every step that was found, in order.
        asked: steps the user named; each is then a window of its own.
    """
    known = [step for step in counts if step is not None]
    for step in asked:
        if step not in counts:
            there = "without numbers" if not known else f"from {known[0]} to {known[-1]}"
            raise BadInput(f"step {step} is not in the rollouts, whose steps are {there}; name one that is, or leave out --step")
    if asked:
        return Plan(tuple(Window((step,)) for step in sorted(set(asked))), ())
    steps = [step for step in counts if counts[step].num_scope > counts[step].num_empty] or list(counts)
    silent = len(counts) - len(steps)
    notes = [f"{silent} of {len(counts)} steps hold no reasoning and were not measured"] if silent else []
    if silent and list(counts)[-1] != steps[-1]:
        notes[0] += f", the last of all among them: the verdict is on step {steps[-1]}"
    typical = sorted(counts[step].num_groups for step in steps)[len(steps) // 2]
    if len(steps) > 1 and typical < FEWEST_PROMPTS:
        size = max(math.ceil(ENOUGH_GROUPS / max(1, typical)), math.ceil(len(steps) / MAX_WINDOWS))
        windows = _pooled(steps, size, math.ceil(FEWEST_PROMPTS / max(1, typical)))
        prompts = "1 prompt" if typical == 1 else f"{typical} prompts"
        notes.append(f"a step holds {prompts}, too few to compare: up to {size} neighbouring steps were taken together")
        return Plan(windows, tuple(notes))
    chosen = evenly(len(steps), MAX_WINDOWS)
    if len(chosen) < len(steps):
        notes.append(f"{len(chosen)} of {len(steps)} steps were measured, evenly spread; name others with --step")
    return Plan(tuple(Window((steps[index],)) for index in chosen), tuple(notes))


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, evenly spread, the first and the last among them.

    >>> evenly(9, 3)
    [0, 4, 8]
    """
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})


def _pooled(steps: Sequence[StepNumber], size: int, fewest: int) -> tuple[Window, ...]:
    """Windows of so many steps; a short rest, or one of fewer than `fewest` steps, joins the one before it."""
    starts = list(range(0, len(steps), size))
    if len(starts) > 1 and len(steps) - starts[-1] < max((size + 1) // 2, fewest):
        starts.pop()
    return tuple(Window(tuple(steps[start:stop])) for start, stop in zip(starts, [*starts[1:], len(steps)], strict=True))


CHARS_KEPT = 16_000
"""Of a reasoning; far more than the tokens that are scored."""
LARGEST_ID = 2**62


def compacted(rollout: Rollout) -> Rollout:
    """The part of a rollout that the sample keeps: token ids as compact arrays, no response beside its reasoning, not all of a long reasoning."""
    return dataclasses.replace(
        rollout,
        prompt_ids=_compact(rollout.prompt_ids),
        response=None,
        # Needed only where there are no ids of the reasoning alone: it is found within them.
        response_ids=_compact(rollout.response_ids) if rollout.reasoning_ids is None else None,
        reasoning=None if rollout.reasoning is None else rollout.reasoning[:CHARS_KEPT],
        reasoning_ids=_compact(rollout.reasoning_ids),
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

    def drawn(self) -> list[Rollout]:
        """By group, then by episode, each in the order of the hashes."""
        return [member for place in sorted(self._groups) for member in self._groups[place].in_order()]


class _Members:
    """The episodes of one group with the smallest hashes, with one turn each: the one with the smallest hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[int, tuple[int, Rollout]] = {}

    def add(self, rollout: Rollout, seed: int) -> int:
        """Take a rollout or leave it; returns by how many the members have grown."""
        episode = derive_seed("audit episode", seed, repr(rollout.trajectory))
        turn = derive_seed("audit turn", seed, repr(rollout.trajectory), rollout.turn)
        held = self._of.get(episode)
        if held is not None:
            if turn < held[0]:
                self._of[episode] = (turn, compacted(rollout))
            return 0
        if len(self._of) < self._most:
            self._of[episode] = (turn, compacted(rollout))
            return 1
        last = max(self._of)
        if episode < last:
            del self._of[last]
            self._of[episode] = (turn, compacted(rollout))
        return 0

    def in_order(self) -> list[Rollout]:
        return [self._of[episode][1] for episode in sorted(self._of)]

    def __len__(self) -> int:
        return len(self._of)


def draw(
    rollouts: Iterable[Rollout], windows: Sequence[Window], *, all_turns: bool, prompts: int, samples: int, seed: int
) -> list[list[Rollout]]:
    """The sample of every window."""
    drawn = [WindowSample(prompts, samples, seed) for _ in windows]
    window_of: Mapping[StepNumber, WindowSample] = {step: drawn[index] for index, window in enumerate(windows) for step in window.steps}
    for rollout in rollouts:
        sample = window_of.get(rollout.step)
        if sample is not None and rollout.has_reasoning and (all_turns or rollout.turn == 0):
            sample.add(rollout)
    return [sample.drawn() for sample in drawn]


def _compact(ids: Sequence[int] | None) -> "array[int] | None":
    if ids is None:
        return None
    try:
        return array("q", ids)
    except OverflowError:  # no tokenizer has such an id; the check of the vocabulary will say so
        return array("q", [min(token, LARGEST_ID) for token in ids])
