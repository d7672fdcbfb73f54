"""What a group is worth to the update: one number per group, computed from its trajectories, for all groups at once.

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
class GroupedColumns:
    """The columns of all trajectories, sorted so that a group's stand together; an optional column is None where it was not given."""

    starts: npt.NDArray[np.intp]
    """The first row of each group."""
    sizes: npt.NDArray[np.intp]
    """Members of each group, at least one."""
    rewards: Floats
    successes: Floats | None = None
    entropies: Floats | None = None
    lengths: Floats | None = None

    def sums(self, values: Floats) -> Floats:
        """One sum per group."""
        return np.add.reduceat(values, self.starts)

    def means(self, values: Floats) -> Floats:
        """One mean per group."""
        return self.sums(values) / self.sizes

    def variances(self, values: Floats) -> Floats:
        """One variance per group, with ddof 1; a group of one, or of equal values however large, has variance zero."""
        offsets = values - np.repeat(values[self.starts], self.sizes)
        squares = (offsets - np.repeat(self.means(offsets), self.sizes)) ** 2
        return self.sums(squares) / np.maximum(self.sizes - 1, 1)


def sample_variance(values: Floats) -> float:
    """The variance of one group."""
    return float(GroupedColumns(np.array([0]), np.array([values.size]), values).variances(values)[0]) if values.size else 0.0


def _column(name: str, values: Floats | None) -> Floats:
    if values is None:
        raise BadInput(f"this score needs {name}, one per trajectory; pass {name}=... to select_groups")
    return values


def _deviations(columns: GroupedColumns) -> Floats:
    variances = columns.variances(columns.rewards)
    return np.where(variances > ZERO, np.sqrt(variances), 0.0)


SCORES: dict[str, Callable[[GroupedColumns], Floats]] = {
    "reward_variance": lambda c: c.variances(c.rewards),
    "reward_std": _deviations,
    "outcome_variance": lambda c: c.variances(_column("successes", c.successes)),
    "reward_sum": lambda c: c.sums(c.rewards),
    "entropy": lambda c: c.means(_column("entropies", c.entropies)),
    "entropy_variance": lambda c: c.variances(_column("entropies", c.entropies)),
    "length": lambda c: c.means(_column("lengths", c.lengths)),
}

SPREAD_SCORES = frozenset({"reward_variance", "reward_std", "outcome_variance", "entropy_variance"})
"""Scores that are themselves a spread: include_zero=False also drops groups whose score is zero."""
