"""Trajectories to (x, z) pairs: what the model saw, and what it thought.

x is everything up to and including the opening think tag; z is the reasoning, tags excluded; both are the token ids carried by the
trajectory. The first-turn scope takes one pair per trajectory; all members of a group share x, so P prompts are P columns. Equal
prompts (two groups that drew the same puzzle) are one column. The first prompt is whole in every context mode.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tether.core.types import Group


@dataclass(slots=True)
class Pairs:
    """N reasonings and the P distinct prompts they came from."""

    prompts: list[tuple[int, ...]] = field(default_factory=list)
    reasonings: list[tuple[int, ...]] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    """Column of each reasoning's own prompt."""
    num_empty: int = 0
    """Responses without reasoning (empty, or the think tag never closed); counted, not scored."""

    @property
    def lengths(self) -> list[int]:
        return [len(reasoning) for reasoning in self.reasonings]


def first_turn_pairs(groups: Sequence[Group]) -> Pairs:
    """The first turn of every trajectory."""
    pairs = Pairs()
    columns: dict[tuple[int, ...], int] = {}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        if not trajectory.turns:
            continue
        turn = trajectory.turns[0]
        if not turn.reasoning_ids:
            pairs.num_empty += 1
            continue
        column = columns.setdefault(turn.context_ids, len(columns))
        pairs.reasonings.append(turn.reasoning_ids)
        pairs.source.append(column)
    pairs.prompts = list(columns)
    return pairs
