"""Where a step on the ice may lead, read from gymnasium's own transition table.

Building gymnasium's environment costs most of a millisecond for a 4x4 map, and where a slide goes depends on the size of the
board only (holes and goal merely end the episode). So the table is read once per size and slip, from a lake without holes.
"""

from functools import lru_cache
from itertools import accumulate

from tether.core.errors import MissingDependency

Outcomes = tuple[tuple[float, int], ...]
"""(cumulative probability, tile reached), in gymnasium's order: turned left of the action, as intended, turned right of it."""

INTENDED = 1
"""Place of the intended direction in Outcomes."""


@lru_cache(maxsize=64)
def transitions(size: int, slip: float) -> tuple[tuple[Outcomes, ...], ...]:
    """Outcomes by tile and action (Left, Down, Right, Up)."""
    try:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
    except ImportError as error:
        raise MissingDependency("frozen_lake needs gymnasium, which is not installed; run: pip install gymnasium") from error
    open_lake = ["S" + "F" * (size - 1)] + ["F" * size] * (size - 1)
    table = FrozenLakeEnv(desc=open_lake, is_slippery=True, success_rate=1.0 - slip).P
    return tuple(tuple(_cumulated(table[tile][action]) for action in range(4)) for tile in range(size**2))


def _cumulated(row: list[tuple[float, int, float, bool]]) -> Outcomes:
    return tuple(zip(accumulate(outcome[0] for outcome in row), (outcome[1] for outcome in row), strict=True))


def choose(outcomes: Outcomes, uniform: float) -> int:
    """The outcome a uniform draw picks, as gymnasium's categorical_sample does: the first whose cumulative probability exceeds it."""
    for place, (cumulative, _) in enumerate(outcomes):
        if cumulative > uniform:
            return place
    # Rounding can leave the sum a hair under 1; the last outcome that has any probability then takes the rest.
    return max(place for place in range(len(outcomes)) if place == 0 or outcomes[place][0] > outcomes[place - 1][0])
