"""Random lakes: every tile is ice with a given probability, start and goal are any two tiles, and the goal can be reached.

A lake is gymnasium's map (S start, F ice, H hole, G goal) as one string, so it can be written by hand, hashed, and handed to
gymnasium unchanged. A generator is any callable from seed and split to a lake.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isqrt

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.splits import draw

Generator = Callable[[int, Split], "Lake"]


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
        return Lake("".join(tiles)) if _reachable(tiles, self.size, start, goal) else None


def _reachable(tiles: Sequence[str], size: int, start: int, goal: int) -> bool:
    """Whether a walk that avoids holes leads from start to goal."""
    seen = {start}
    waiting = [start]
    while waiting:
        here = waiting.pop()
        row, column = divmod(here, size)
        if row > 0:
            _visit(here - size, tiles, seen, waiting)
        if row < size - 1:
            _visit(here + size, tiles, seen, waiting)
        if column > 0:
            _visit(here - 1, tiles, seen, waiting)
        if column < size - 1:
            _visit(here + 1, tiles, seen, waiting)
        if goal in seen:
            return True
    return False


def _visit(tile: int, tiles: Sequence[str], seen: set[int], waiting: list[int]) -> None:
    if tile not in seen and tiles[tile] != "H":
        seen.add(tile)
        waiting.append(tile)
