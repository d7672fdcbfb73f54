"""Shortest solutions by A* over pushes.

A node is (boxes, player after a push); its cost counts every move, walking included, so the answer is shortest in actions. Walks are
not searched move by move: one flood from the player, ring by ring, meets every cell from which a box can be pushed at its exact
distance. The estimate is the number of pushes each box needs to its nearest target with no other box around (never too high);
cells from which a box can reach no target at all cut the node off.
"""

import heapq
from collections import deque

from tether.core.errors import TetherError
from tether.envs.sokoban.levels import Level, bits

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
