"""What an answer pays: all for the target, a little for a legal expression that misses it, nothing for anything else."""

from collections.abc import Callable
from dataclasses import dataclass

from tether.envs.countdown.verdict import Verdict

Reward = Callable[[Verdict], float]
"""From the verdict on the answer that ends the episode to what is paid."""


@dataclass(frozen=True, slots=True)
class TargetReward:
    """The paper's three amounts, unless told otherwise."""

    solved: float = 1.0
    missed: float = 0.1
    """A well-formed expression over the allowed numbers with another value, or none (it divides by zero)."""
    refused: float = 0.0
    """Not an expression, or not over the allowed numbers."""

    def __call__(self, verdict: Verdict) -> float:
        if verdict.solved:
            return self.solved
        return self.missed if verdict.legal else self.refused
