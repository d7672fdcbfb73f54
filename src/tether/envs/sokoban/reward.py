"""What Sokoban pays for one action, with gym-sokoban's amounts, as an object that can be replaced."""

from collections.abc import Callable
from dataclasses import dataclass

Reward = Callable[[int, int, bool], float]
"""From the boxes on targets before and after the action, and whether the level is solved now, to what is paid."""


@dataclass(frozen=True, slots=True)
class PushReward:
    """A small cost per action, a unit for a box brought onto or off a target, a prize at the end.

    A level with one box that is solved in n actions, the box reaching the target once, pays 11 - 0.1 n in all.
    """

    step: float = -0.1
    box_on: float = 1.0
    box_off: float = -1.0
    solved: float = 10.0

    def __call__(self, before: int, after: int, solved: bool) -> float:
        change = self.box_on if after > before else self.box_off if after < before else 0.0
        return self.step + change + (self.solved if solved else 0.0)
