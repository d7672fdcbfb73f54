"""FrozenLake as a turn-based text task: gymnasium's dynamics, a map per seed, slips per member.

The seed fixes the map and `env_seed` the slips: members of a group play the same map with different slips. Falling into a hole ends the
episode with reward 0; reaching the goal pays 1.

The transition table is gymnasium's. Building gymnasium's environment costs most of a millisecond for a 4x4 map, and where a slide goes depends
on the size of the board only (holes and goal merely end the episode). So the table is read once per size and slip, from a lake without holes.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field

from tether.core.enums import Split
from tether.core.errors import MissingDependency
from tether.core.images import Pixels
from tether.envs.base import ActionEnv
from tether.envs.frozen_lake import prompt
from tether.envs.frozen_lake.generator import ACTIONS, Generator, Lake, RandomLake, shortest_walk
from tether.envs.grid_image import PictureOptions, Tiles
from tether.envs.wording import Example, draw_examples

Reward = Callable[[str], float]
"""From the letter of the tile reached (S, F, H or G) to its reward."""


@dataclass(frozen=True, slots=True)
class GoalReward:
    """1 at the goal and nothing else, by default."""

    goal: float = 1.0
    hole: float = 0.0
    ice: float = 0.0

    def __call__(self, tile: str) -> float:
        return self.goal if tile == "G" else self.hole if tile == "H" else self.ice


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

    def cumulated(row: list[tuple[float, int, float, bool]]) -> Outcomes:
        return tuple(zip(accumulate(outcome[0] for outcome in row), (outcome[1] for outcome in row), strict=True))

    return tuple(tuple(cumulated(table[tile][action]) for action in range(4)) for tile in range(size**2))


def choose(outcomes: Outcomes, uniform: float) -> int:
    """The outcome a uniform draw picks, as gymnasium's categorical_sample does: the first whose cumulative probability exceeds it."""
    for place, (cumulative, _) in enumerate(outcomes):
        if cumulative > uniform:
            return place
    # Rounding can leave the sum a hair under 1; the last outcome that has any probability then takes the rest.
    return max(place for place in range(len(outcomes)) if place == 0 or outcomes[place][0] > outcomes[place - 1][0])


class FrozenLakeOptions(PictureOptions):
    """Options of frozen_lake."""

    tiles: ClassVar[Tiles] = prompt.TILES

    size: int = Field(default=4, ge=2, le=12)
    """Rows and columns."""
    frozen: float = Field(default=0.9, ge=0, le=1)
    """Probability that a tile is ice rather than a hole."""
    slip: float = Field(default=0.02, ge=0, le=1)
    """Probability that a step goes to one of the two perpendicular directions instead, half each."""


class FrozenLake(ActionEnv[FrozenLakeOptions]):
    """Reach the goal over slippery ice."""

    name = "frozen_lake"
    actions = ACTIONS
    Options = FrozenLakeOptions
    default_few_shot = 3
    metrics = ("slips",)
    symbols = prompt.LEGEND

    def __init__(
        self, options: FrozenLakeOptions | None = None, *, generator: Generator | None = None, reward: Reward | None = None
    ) -> None:
        super().__init__(options or FrozenLakeOptions())
        self._make: Generator = generator or RandomLake(self.options.size, self.options.frozen)
        self._pay: Reward = reward or GoalReward()

    def generate(self, seed: int) -> None:
        self.lake: Lake = self._make(seed, self.options.split)
        self.player = self.lake.tiles.index("S")
        self._table = transitions(self.lake.size, self.options.slip)
        self._slips = 0

    def seed_randomness(self, env_seed: int) -> None:
        self._rng = random.Random(env_seed)

    def act(self, index: int) -> tuple[float, bool, bool]:
        outcomes = self._table[self.player][index]
        place = choose(outcomes, self._rng.random())
        self._slips += place != INTENDED
        self.player = outcomes[place][1]
        tile = self.lake.tiles[self.player]
        return self._pay(tile), tile in "GH", tile == "G"

    def turn_info(self) -> dict[str, Any]:
        return {"player": divmod(self.player, self.lake.size), "slips": self._slips}

    @property
    def reward_range(self) -> tuple[float, float]:
        if not isinstance(self._pay, GoalReward):
            return super().reward_range
        actions, tiles = self.options.actions_per_turn, (self._pay.goal, self._pay.hole, self._pay.ice)
        return actions * min(0.0, *tiles), actions * max(0.0, *tiles)

    @property
    def instance(self) -> str:
        return self.lake.fingerprint

    @property
    def parameters(self) -> Mapping[str, str]:
        tiles, size = self.lake.tiles, self.lake.size
        walk = shortest_walk(tiles, size, tiles.index("S"), tiles.index("G"))
        return {"size": str(size), "distance": str(len(walk))}

    def state_text(self) -> str:
        return prompt.state_text(self.lake, self.player, self.options.observation)

    def state_image(self) -> Pixels:
        return self.options.draw(prompt.grid_rows(self.lake, self.player))

    @property
    def task(self) -> str:
        return prompt.task(self.options.slip)

    @property
    def example(self) -> Example:
        return self.other_example([self._worked_game(lake)[0] for lake in prompt.EXAMPLE_LAKES])

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.slip, self.max_turns * self.options.actions_per_turn, self.options.observation)

    def worked_examples(self, count: int) -> list[Example]:
        return draw_examples(count, lambda seed: self._worked_game(self._make(seed, Split.TRAIN)))

    def _worked_game(self, lake: Lake) -> tuple[Example, ...]:
        return prompt.worked(lake, self.options.observation, self.options.actions_per_turn)
