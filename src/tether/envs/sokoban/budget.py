"""How many actions an episode needs for levels from a file: an estimate from the pushes that they take at the least.

Shortest solutions of Boxoban take seconds each to find, so they are not looked for. What is quick is a lower bound: the pushes that bring each
box to its nearest target, with no other box around. Walking and detours make the rest. Measured on the 67 of 98 Boxoban levels (unfiltered and
medium) that the solver finishes within 6,000 positions: the shortest solution has 16 to 73 actions, 4 to 5 for each push of the bound in the
middle and 10 at the most; all are within 5 times the largest bound of their file, 130 and 135 actions.
"""

import logging
import statistics
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tether.envs.sokoban.levels import Level, bits, load_levels
from tether.envs.sokoban.solver import push_distances

SAMPLE = 200
"""Levels of a file that are looked at, evenly spaced: a hundredth of a second."""
ACTIONS_PER_PUSH = 5
USUAL_ACTIONS_PER_PUSH = 4

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActionBudget:
    """Actions for the levels of a file."""

    usual: int
    """For about half of the levels."""
    enough: int
    """For almost all of them."""


def fewest_pushes(level: Level) -> int | None:
    """A lower bound on the pushes of a solution; None if there is none."""
    distances = push_distances(level)
    pushes = [distances.get(box) for box in bits(level.boxes)]
    return None if None in pushes else sum(push for push in pushes if push is not None)


@lru_cache(maxsize=8)
def action_budget(path: Path) -> ActionBudget:
    """The actions that the levels of a file or folder need."""
    levels = load_levels(path)
    sample = [levels[place * len(levels) // SAMPLE] for place in range(SAMPLE)] if len(levels) > SAMPLE else levels
    pushes = [bound for level in sample if (bound := fewest_pushes(level)) is not None] or [0]
    return ActionBudget(round(USUAL_ACTIONS_PER_PUSH * statistics.median(pushes)), ACTIONS_PER_PUSH * max(pushes))


@lru_cache(maxsize=64)  # said once, not for each of a trainer's environments
def warn_if_short(path: Path, max_turns: int, actions_per_turn: int) -> None:
    """Say so if about half of the levels, or more, cannot be solved in an episode."""
    budget, actions = action_budget(path), max_turns * actions_per_turn
    if actions < budget.usual:
        turns = -(-budget.enough // actions_per_turn)
        _LOG.warning(
            "sokoban: an episode has %d actions (max_turns=%d, actions_per_turn=%d), but the levels of %s take about %d, and up to %d; "
            "leave max_turns out for %d turns, or raise actions_per_turn",
            actions,
            max_turns,
            actions_per_turn,
            path,
            budget.usual,
            budget.enough,
            turns,
        )
