"""Trajectories to (x, z) pairs: what the model saw, and what it thought.

x is everything the model saw up to and including the opening think tag; z is the reasoning, tags excluded; both are the token ids carried
by the trajectory, in every context mode. Three scopes:

- first turn: one pair per trajectory; all members of a group share x, so P prompts are P columns
- trajectory: a trajectory is drawn uniformly, then one of its turns; long episodes count no more than short ones
- turn: a turn is drawn uniformly from all turns of all trajectories

In the last two every context that was drawn is a column. Equal contexts (two groups that drew the same puzzle) are always one column.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tether.core.types import Group, Trajectory


@dataclass(slots=True)
class Pairs:
    """N reasonings and the P distinct prompts they came from."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    reasonings: list[tuple[int, ...]] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    """Column of each reasoning's own prompt."""
    num_empty: int = 0
    """Responses without reasoning (empty, or the think tag never closed); counted, not scored."""

    dropped: int = 0
    """Reasonings left out by `only`."""

    @property
    def lengths(self) -> list[int]:
        return [len(reasoning) for reasoning in self.reasonings]

    @property
    def population(self) -> int:
        """How many reasonings there were before any was left out."""
        return len(self.reasonings) + self.dropped

    @property
    def cost(self) -> int:
        """Tokens that cross-scoring computes: every prompt once, every reasoning under every prompt."""
        return sum(map(len, self.prompts)) + len(self.prompts) * sum(self.lengths)

    def only(self, rows: Iterable[int]) -> "Pairs":
        """These reasonings, against all prompts: means over reasonings keep their expectation."""
        kept = [int(row) for row in rows]
        reasonings, source = [self.reasonings[row] for row in kept], [self.source[row] for row in kept]
        return Pairs(self.prompts, reasonings, source, self.num_empty, self.population - len(kept))


def first_turn_pairs(groups: Sequence[Group]) -> Pairs:
    """The first turn of every trajectory."""
    return _pairs((trajectory, 0) for trajectory in _trajectories(groups) if trajectory.turns)


def trajectory_pairs(groups: Sequence[Group], count: int, rng: np.random.Generator) -> Pairs:
    """At most `count` trajectories, drawn without repetition, with one turn each."""
    speaking = [trajectory for trajectory in _trajectories(groups) if trajectory.turns]
    chosen = rng.permutation(len(speaking))[:count]
    return _pairs((speaking[index], int(rng.integers(len(speaking[index].turns)))) for index in sorted(chosen))


def turn_pairs(groups: Sequence[Group], count: int, rng: np.random.Generator) -> Pairs:
    """At most `count` turns of all trajectories, drawn without repetition."""
    turns = [(trajectory, turn) for trajectory in _trajectories(groups) for turn in range(len(trajectory.turns))]
    return _pairs(turns[index] for index in sorted(rng.permutation(len(turns))[:count]))


def context_of(trajectory: Trajectory, turn: int) -> tuple[int, ...]:
    """Every token the model saw before it answered in this turn."""
    start = max(index for index in range(turn + 1) if index == 0 or trajectory.turns[index].new_context)
    seen = [token for earlier in trajectory.turns[start:turn] for token in (*earlier.context_ids, *earlier.response_ids)]
    return (*seen, *trajectory.turns[turn].context_ids)


def _trajectories(groups: Sequence[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def _pairs(chosen: Iterable[tuple[Trajectory, int]]) -> Pairs:
    pairs = Pairs()
    columns: dict[tuple[int, ...], int] = {}
    for trajectory, turn in chosen:
        reasoning = trajectory.turns[turn].reasoning_ids
        if not reasoning:
            pairs.num_empty += 1
            continue
        column = columns.setdefault(context_of(trajectory, turn), len(columns))
        pairs.reasonings.append(reasoning)
        pairs.source.append(column)
    pairs.prompts = list(columns)
    return pairs
