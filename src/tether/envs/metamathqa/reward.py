"""What an attempt pays: all for a right first answer, half as much with every retry, nothing for a wrong one."""

from collections.abc import Callable
from dataclasses import dataclass

Reward = Callable[[bool, int], float]
"""From whether an attempt was right, and its number counted from 0, to what is paid."""


@dataclass(frozen=True, slots=True)
class HalvingReward:
    """1, 1/2, 1/4 and so on, unless told otherwise."""

    first: float = 1.0
    factor: float = 0.5

    def __call__(self, correct: bool, attempt: int) -> float:
        return self.first * self.factor**attempt if correct else 0.0
