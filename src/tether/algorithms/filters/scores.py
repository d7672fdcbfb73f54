"""What a group is worth to the update: one number per group, computed from its trajectories.

The default is the paper's reward variance, RV(x) = 1/(G-1) sum_g (R_g - mean)^2 (section 3.3). The others are ablations or
guards: outcome_variance looks at success only, so shaping and format noise cannot fake signal. Scores are float64.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput

Floats = npt.NDArray[np.float64]

ZERO = 1e-12
"""A variance of at most this is zero: equal rewards summed in another order differ by rounding."""


@dataclass(frozen=True, slots=True)
class GroupColumns:
    """The columns of one group's trajectories; an optional column is None where the caller did not give it."""

    rewards: Floats
    successes: Floats | None = None
    entropies: Floats | None = None
    lengths: Floats | None = None


def sample_variance(values: Floats) -> float:
    """Variance with ddof 1; a group of one, or of equal values however large, has variance zero."""
    return float(np.var(values - values[0], ddof=1)) if values.size > 1 else 0.0


def _column(name: str, values: Floats | None) -> Floats:
    if values is None:
        raise BadInput(f"this score needs {name}, one per trajectory; pass {name}=... to select_groups")
    return values


SCORES: dict[str, Callable[[GroupColumns], float]] = {
    "reward_variance": lambda g: sample_variance(g.rewards),
    "reward_std": lambda g: float(np.sqrt(variance)) if (variance := sample_variance(g.rewards)) > ZERO else 0.0,
    "outcome_variance": lambda g: sample_variance(_column("successes", g.successes)),
    "reward_sum": lambda g: float(g.rewards.sum()),
    "entropy": lambda g: float(_column("entropies", g.entropies).mean()),
    "entropy_variance": lambda g: sample_variance(_column("entropies", g.entropies)),
    "length": lambda g: float(_column("lengths", g.lengths).mean()),
}

SPREAD_SCORES = frozenset({"reward_variance", "reward_std", "outcome_variance", "entropy_variance"})
"""Scores that are themselves a spread: include_zero=False also drops groups whose score is zero."""
