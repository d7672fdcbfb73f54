"""Sokoban levels by playing backwards: start solved, pull the boxes away, and every level is solvable by construction.

A connected room is grown cell by cell; boxes stand on their targets; then the player, wherever it can walk to, pulls boxes one cell
at a time. The position kept is the one with the largest lower bound on the pushes it takes to solve it (the distances of the boxes
to their nearest targets), and the play stops once that reaches a number drawn for the level, so that easy and hard levels mix.
Last, the player is put on a random cell it can walk to. Every reverse move undoes a legal one, so the play read forwards is a
solution; its length, walks included, is kept within a limit.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from tether.core.enums import Split
from tether.envs.sokoban.levels import Level, bits, border, flood
from tether.envs.splits import draw

Generator = Callable[[int, Split], Level]

FLOOR_SHARE = (0.55, 0.95)
"""Part of the interior that becomes floor: less leaves corridors where nothing can be pulled, more leaves no walls to mind."""
PULLS_PER_PUSH = 3
"""Pulls tried for each push wanted: a random play also goes back and forth."""


@dataclass(frozen=True)
class ReversePlay:
    """Levels of a given size."""

    height: int = 6
    width: int = 6
    boxes: int = 1
    min_pushes: int = 1
    """Every level takes at least so many pushes."""
    max_pushes: int = 4
    """The play backwards stops at this distance (a sum over the boxes); a level may still take more."""
    max_moves: int = 10
    """Every level can be solved in at most so many actions."""
    _interior: tuple[int, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        cells = range(self.height * self.width)
        ring = border(self.height, self.width)
        object.__setattr__(self, "_interior", tuple(cell for cell in cells if not ring >> cell & 1))

    def __call__(self, seed: int, split: Split) -> Level:
        return draw("sokoban", seed, split, self._propose)

    def _propose(self, rng: random.Random) -> Level | None:
        cells = self._grow_room(rng)
        floor = sum(1 << cell for cell in cells)
        targets = 0
        for place in range(self.boxes):  # the head of a shuffle
            other = place + int(rng.random() * (len(cells) - place))
            cells[place], cells[other] = cells[other], cells[place]
            targets |= 1 << cells[place]
        player = cells[self.boxes + int(rng.random() * (len(cells) - self.boxes))]
        position = self._pull_apart(rng, floor, targets, player)
        if position is None:
            return None
        boxes, player, moves = position
        standing = list(bits(_near(player, self.max_moves - moves, floor & ~boxes, self.width)))
        walls = ((1 << self.height * self.width) - 1) & ~floor
        return Level(self.height, self.width, walls, targets, boxes, standing[int(rng.random() * len(standing))])

    def _grow_room(self, rng: random.Random) -> list[int]:
        """Random connected floor cells: always the next one is a random neighbour of what is there."""
        low, high = FLOOR_SHARE
        interior = self._interior
        wanted = max(self.boxes + 2, int(len(interior) * (low + (high - low) * rng.random())))
        width = self.width
        closed = border(self.height, width)  # the walls around, and cells that are floor or wait to become it
        first = interior[int(rng.random() * len(interior))]
        closed |= 1 << first
        waiting: list[int] = [first]
        cells: list[int] = []
        while waiting and len(cells) < wanted:
            place = int(rng.random() * len(waiting))
            cell, waiting[place] = waiting[place], waiting[-1]
            waiting.pop()
            cells.append(cell)
            for neighbour in (cell - width, cell + width, cell - 1, cell + 1):
                if not closed >> neighbour & 1:
                    closed |= 1 << neighbour
                    waiting.append(neighbour)
        return cells

    def _pull_apart(self, rng: random.Random, floor: int, targets: int, player: int) -> tuple[int, int, int] | None:
        """Boxes, player and the moves back to the solved level, in the best position of one random play; None if there is none."""
        wanted = self.min_pushes + int(rng.random() * (self.max_pushes - self.min_pushes + 1))
        boxes, reach, moves = targets, flood(1 << player, floor & ~targets, self.width), 0
        best, kept = self.min_pushes - 1, None
        for pulls in range(PULLS_PER_PUSH * wanted):
            pull = self._choose_pull(rng, boxes, targets, reach, floor & ~boxes)
            if pull is None:
                break
            box, delta = pull
            # Where the player stands before the first pull is where the solution ends: no walk to be counted.
            moves += 1 + (_steps(player, box + delta, floor & ~boxes, self.width) if pulls else 0)
            if moves > self.max_moves:
                break
            boxes ^= 1 << box | 1 << box + delta
            player = box + 2 * delta
            reach = flood(1 << player, floor & ~boxes, self.width)
            if boxes & targets:
                continue
            distance = push_distance(boxes, targets, self.width)
            if distance > best:
                best, kept = distance, (boxes, player, moves)
                if best >= wanted:
                    break
        return kept

    def _choose_pull(self, rng: random.Random, boxes: int, targets: int, reach: int, free: int) -> tuple[int, int] | None:
        """A random box that can be pulled and the way it goes; boxes still on a target come first."""
        width = self.width
        # A box is pulled by standing next to it and stepping away: both cells on that side must be free, the nearer one reachable.
        ways = (
            (-width, boxes & reach << width & free << 2 * width),
            (width, boxes & reach >> width & free >> 2 * width),
            (-1, boxes & reach << 1 & free << 2),
            (1, boxes & reach >> 1 & free >> 2),
        )
        choices = [(box, delta) for delta, movable in ways if movable & targets for box in bits(movable & targets)]
        if not choices:
            choices = [(box, delta) for delta, movable in ways if movable for box in bits(movable)]
        return choices[int(rng.random() * len(choices))] if choices else None


def _near(cell: int, most: int, free: int, width: int) -> int:
    """The cells that at most so many steps lead to."""
    reach = 1 << cell
    for _ in range(most):
        wider = (reach | reach << 1 | reach >> 1 | reach << width | reach >> width) & free
        if wider == reach:
            break
        reach = wider
    return reach


def _steps(start: int, goal: int, free: int, width: int) -> int:
    """The length of a shortest walk between two connected cells."""
    reach, steps = 1 << start, 0
    while not reach >> goal & 1:
        reach = (reach | reach << 1 | reach >> 1 | reach << width | reach >> width) & free
        steps += 1
    return steps


def push_distance(boxes: int, targets: int, width: int) -> int:
    """At least so many pushes are needed: each box must reach some target."""
    homes = [divmod(target, width) for target in bits(targets)]
    total = 0
    for box in bits(boxes):
        row, column = divmod(box, width)
        total += min(abs(row - home_row) + abs(column - home_column) for home_row, home_column in homes)
    return total
