"""What a group is worth to the update: one number per group, computed from its trajectories, for all groups at once.

The default is the paper's reward variance, RV(x) = 1/(G-1) sum_g (R_g - mean)^2 (section 3.3). The others are ablations or
guards: outcome_variance looks at success only, so shaping and format noise cannot fake signal. Scores are float64.

A score of the user's own is a function from one group to a number, named as "module:function" or offered by an installed distribution through
the entry point group `tether.filter_scores`.
"""

import inspect
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.importing import import_object, in_one_line, is_import_path

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

# ------------------------------------------------------------------------------------------------------- scores of the user's own

ENTRY_POINTS = "tether.filter_scores"
"""The entry point group in which a distribution offers scores: name = "package.module:function"."""


@dataclass(frozen=True, slots=True)
class GroupValues:
    """One group, as a score of the user's own gets it: one value per trajectory; None where a column was not given."""

    rewards: Floats
    successes: Floats | None
    entropies: Floats | None
    """Mean negative log-prob of the sampled tokens."""
    lengths: Floats | None
    """Sampled tokens."""


OwnScore = Callable[[GroupValues], float]


def score_names() -> list[str]:
    """The names of the scores: built in, then of installed distributions."""
    return [*SCORES, *(name for name in sorted(_offers(tuple(sys.path))) if name not in SCORES)]


def check_score(name: str) -> str:
    """The name of a score, if it may be one; nothing is imported for that."""
    if name not in score_names() and not is_import_path(name):
        raise UnknownName(f"unknown score '{name}': {did_you_mean(name, [*score_names(), 'module:function'])}")
    return name


@lru_cache(maxsize=32)
def find_score(name: str) -> Callable[[GroupedColumns], Floats]:
    """The score of a name, for all groups at once."""
    check_score(name)
    if name in SCORES:
        return SCORES[name]
    own: Any = import_object(name, "score", inspect.isfunction) if is_import_path(name) else _load(_offers(tuple(sys.path))[name])
    if not callable(own):
        raise BadInput(f"score '{name}' is a {type(own).__name__}; name a function: def score(group)")
    try:
        inspect.signature(own).bind(None)
    except TypeError as error:
        raise BadInput(f"score '{name}' cannot be called with a group ({error}); write def score(group)") from error
    return lambda columns: np.array([_called(name, own, group) for group in _each(columns)], dtype=np.float64)


def _each(columns: GroupedColumns) -> Iterable[GroupValues]:
    every = (columns.rewards, columns.successes, columns.entropies, columns.lengths)
    for start, size in zip(columns.starts, columns.sizes, strict=True):
        yield GroupValues(*(None if values is None else values[start : start + size].copy() for values in every))  # type: ignore[arg-type]


def _called(name: str, own: OwnScore, group: GroupValues) -> float:
    try:
        value: Any = own(group)
    except Exception as error:
        raise BadInput(f"score '{name}' raised {in_one_line(error)} on a group of {group.rewards.size} trajectories; fix it") from error
    if not isinstance(value, int | float | np.floating | np.integer) or not math.isfinite(value):
        raise BadInput(f"score '{name}' returned {value!r:.80}; return a finite number")
    return float(value)


@lru_cache(maxsize=4)
def _offers(search_path: tuple[str, ...]) -> dict[str, EntryPoint]:
    """Entry points by name, read once per search path: reading walks through every installed distribution."""
    return {offer.name: offer for offer in entry_points(group=ENTRY_POINTS)}


def _load(offer: EntryPoint) -> Any:
    try:
        return offer.load()
    except Exception as error:
        raise BadInput(f"score '{offer.name}' cannot be loaded from '{offer.value}': {in_one_line(error)}; fix or uninstall it") from error
