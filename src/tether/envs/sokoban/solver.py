"""Shortest solutions by A* over pushes.

A node is (boxes, player after a push); its cost counts every move, walking included, so the answer is shortest in actions. Walks are
not searched move by move: one flood from the player, ring by ring, meets every cell from which a box can be pushed at its exact
distance. The estimate is the number of pushes each box needs to its nearest target with no other box around (never too high);
cells from which a box can reach no target at all cut the node off.

`action_budget` estimates how many actions an episode needs for the levels of a file. Shortest solutions of Boxoban take seconds each to find,
so they are not looked for. What is quick is a lower bound: the pushes that bring each box to its nearest target, with no other box around.
Walking and detours make the rest. Measured on the 67 of 98 Boxoban levels (unfiltered and medium) that the solver finishes within 6,000
positions: the shortest solution has 16 to 73 actions, 4 to 5 for each push of the bound in the middle and 10 at the most; all are within 5 times
the largest bound of their file, 130 and 135 actions.
"""

import heapq
import logging
import statistics
from collections import deque
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tether.core.errors import TetherError
from tether.envs.sokoban.levels import Level, bits, load_levels

ACTIONS = ("Up", "Down", "Left", "Right")

SearchNode = tuple[int, int]
"""Boxes (a set of cells) and the player's cell."""


class SearchLimit(TetherError):
    """The search was stopped before it could say whether there is a solution."""


def solve(level: Level, max_nodes: int = 200_000) -> list[str] | None:
    """The fewest actions that solve the level, [] if it is solved, None if it cannot be solved."""
    pushes = push_distances(level)
    start: SearchNode = (level.boxes, level.player)
    estimate = _estimate(level.boxes, pushes)
    if estimate is None:
        return None
    costs: dict[SearchNode, int] = {start: 0}
    origin: dict[SearchNode, tuple[SearchNode, int]] = {}
    waiting: list[tuple[int, int, SearchNode]] = [(estimate, 0, start)]
    while waiting:
        _, cost, node = heapq.heappop(waiting)
        if cost > costs[node]:
            continue  # reached more cheaply since
        if not level.targets & ~node[0]:
            return _retrace(level, node, origin)
        if len(costs) > max_nodes:
            raise SearchLimit(f"no solution among the first {max_nodes} positions; raise max_nodes or take a smaller level")
        for after, moves, direction in _pushes_from(level, node):
            total = cost + moves
            if total < costs.get(after, total + 1):
                rest = _estimate(after[0], pushes)
                if rest is not None:
                    costs[after] = total
                    origin[after] = (node, direction)
                    heapq.heappush(waiting, (total + rest, total, after))
    return None


def push_distances(level: Level) -> dict[int, int]:
    """Pushes that bring a lone box from a cell to the nearest target; cells without a way are missing."""
    distances = dict.fromkeys(bits(level.targets), 0)
    queue = deque(distances)
    while queue:
        cell = queue.popleft()
        for delta in level.deltas:  # a box pulled by delta needs the player's place beyond it
            before = cell + delta
            if before in distances or level.walls >> before & 1:
                continue
            if not level.walls >> before + delta & 1:
                distances[before] = distances[cell] + 1
                queue.append(before)
    return distances


def _estimate(boxes: int, pushes: dict[int, int]) -> int | None:
    """A lower bound on the moves left, or None if some box can never come home."""
    total = 0
    for box in bits(boxes):
        distance = pushes.get(box)
        if distance is None:
            return None
        total += distance
    return total


def _pushes_from(level: Level, node: SearchNode) -> list[tuple[SearchNode, int, int]]:
    """Every push possible: the node after it, the moves it takes (walk and push), its direction."""
    boxes, player = node
    width = level.width
    blocked = level.walls | boxes
    free = ((1 << level.height * width) - 1) & ~blocked
    # To push a box the player stands on one side of it and the other side is free. In the order Up, Down, Left, Right.
    stands = (
        (boxes & free << width) << width,
        (boxes & free >> width) >> width,
        (boxes & free << 1) << 1,
        (boxes & free >> 1) >> 1,
    )
    anywhere = stands[0] | stands[1] | stands[2] | stands[3]
    found: list[tuple[SearchNode, int, int]] = []
    ring = seen = 1 << player
    moves = 1
    while ring:
        if ring & anywhere:
            for direction, delta in enumerate(level.deltas):
                for cell in bits(ring & stands[direction]):
                    box = cell + delta
                    found.append(((boxes ^ (1 << box | 1 << box + delta), box), moves, direction))
        ring = (ring << 1 | ring >> 1 | ring << width | ring >> width) & free & ~seen
        seen |= ring
        moves += 1
    return found


def _retrace(level: Level, node: SearchNode, origin: dict[SearchNode, tuple[SearchNode, int]]) -> list[str]:
    """The actions that led to a node: for each push the walk to its place, then the push."""
    legs: list[list[int]] = []
    while node in origin:
        before, direction = origin[node]
        standing = node[1] - level.deltas[direction]
        legs.append([*_walk(level, before, standing), direction])
        node = before
    return [ACTIONS[direction] for leg in reversed(legs) for direction in leg]


def _walk(level: Level, node: SearchNode, goal: int) -> list[int]:
    """The directions of a shortest walk to a cell that the player can reach."""
    boxes, player = node
    blocked = level.walls | boxes
    came: dict[int, tuple[int, int]] = {player: (player, -1)}
    queue = deque([player])
    while goal not in came:
        cell = queue.popleft()
        for direction, delta in enumerate(level.deltas):
            beside = cell + delta
            if beside not in came and not blocked >> beside & 1:
                came[beside] = (cell, direction)
                queue.append(beside)
    path: list[int] = []
    while goal != player:
        goal, direction = came[goal]
        path.append(direction)
    return path[::-1]


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
