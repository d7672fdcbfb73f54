"""What an attempt is worth: the fraction of tests it passed, as an object that can be replaced."""

from collections.abc import Callable
from dataclasses import dataclass

from tether.envs.deepcoder.judge import Verdict

Reward = Callable[[Verdict], float]
"""From the verdict on an attempt to what it is worth."""


@dataclass(frozen=True, slots=True)
class FractionPassed:
    """Passed tests over all tests."""

    def __call__(self, verdict: Verdict) -> float:
        return verdict.passed / verdict.total
