"""What FrozenLake pays for the tile an action ends on: gymnasium's reward schedule as an object that can be replaced."""

from collections.abc import Callable
from dataclasses import dataclass

Reward = Callable[[str], float]
"""From the letter of the tile reached (S, F, H or G) to what is paid."""


@dataclass(frozen=True, slots=True)
class GoalReward:
    """1 at the goal and nothing else, unless told otherwise."""

    goal: float = 1.0
    hole: float = 0.0
    ice: float = 0.0

    def __call__(self, tile: str) -> float:
        return self.goal if tile == "G" else self.hole if tile == "H" else self.ice
