"""Random lakes, and the shortest walk over one: every tile is ice with a given probability, and the goal can be reached.

A lake is gymnasium's map (S start, F ice, H hole, G goal) as one string, so it can be written by hand, hashed, and handed to
gymnasium unchanged. A generator is any callable from seed and split to a lake.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.splits import draw

Generator = Callable[[int, Split], "Lake"]
ACTIONS = ("Left", "Down", "Right", "Up")


@dataclass(frozen=True, slots=True)
class Lake:
    """A square map. Example: Lake("SFHG") is start, ice / hole, goal."""

    tiles: str
    """The letters row by row: one S, one G, any number of F and H."""
    size: int = field(init=False, repr=False, compare=False)
    """Rows and columns."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", isqrt(len(self.tiles)))
        square = self.size**2 == len(self.tiles)
        if not square or self.tiles.count("S") != 1 or self.tiles.count("G") != 1 or set(self.tiles) - set("SFHG"):
            raise BadInput(f"lake '{self.tiles}' is not a map; give a square of the letters S F H G with one S and one G")

    @classmethod
    def of(cls, rows: Sequence[str]) -> "Lake":
        """From gymnasium's form, a list of rows."""
        return cls("".join(rows))

    @property
    def rows(self) -> list[str]:
        return [self.tiles[at : at + self.size] for at in range(0, len(self.tiles), self.size)]

    @property
    def fingerprint(self) -> str:
        return self.tiles


@dataclass(frozen=True, slots=True)
class RandomLake:
    """Lakes with `frozen` of their tiles ice; start and goal count as ice."""

    size: int = 4
    frozen: float = 0.9

    def __call__(self, seed: int, split: Split) -> Lake:
        return draw("frozen_lake", seed, split, self._propose)

    def _propose(self, rng: random.Random) -> Lake | None:
        num_tiles = self.size**2
        tiles = ["F" if rng.random() < self.frozen else "H" for _ in range(num_tiles)]
        start = int(rng.random() * num_tiles)
        goal = int(rng.random() * (num_tiles - 1))
        goal += goal >= start
        tiles[start], tiles[goal] = "S", "G"
        seen, waiting = {start}, [start]  # a walk that avoids holes has to lead from start to goal
        while waiting and goal not in seen:
            for _, tile in steps(waiting.pop(), self.size):
                if tile not in seen and tiles[tile] != "H":
                    seen.add(tile)
                    waiting.append(tile)
        return Lake("".join(tiles)) if goal in seen else None


def shortest_walk(tiles: str, size: int, start: int, goal: int) -> list[str]:
    """The fewest steps from one tile to another around the holes, by breadth-first search; of several walks the first in the order of actions.

    >>> shortest_walk("SFHFFFFFG", 3, 0, 8)
    ['Down', 'Down', 'Right', 'Right']
    """
    walks: dict[int, list[str]] = {start: []}
    queue = deque([start])
    while queue and goal not in walks:
        tile = queue.popleft()
        for action, after in steps(tile, size):
            if after not in walks and tiles[after] != "H":
                walks[after] = [*walks[tile], action]
                queue.append(after)
    return walks[goal]


def steps(tile: int, size: int) -> list[tuple[str, int]]:
    """The steps that stay on the board, each with its tile, in the order of the actions."""
    row, column = divmod(tile, size)
    stays = (column > 0, row + 1 < size, column + 1 < size, row > 0)
    tiles = (tile - 1, tile + size, tile + 1, tile - size)
    return [(action, after) for action, inside, after in zip(ACTIONS, stays, tiles, strict=True) if inside]
