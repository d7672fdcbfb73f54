"""Means over few seeds with their intervals, contrasts of arms, and rank correlations over runs.

Seeds are the unit: a run's validation success already contains the binomial noise of its prompts, so the spread between seeds does too.
Intervals are 95%, from Student's t with as many degrees of freedom as the few seeds leave; rank correlations have a percentile bootstrap
over runs. Everything is deterministic: the draws of the bootstrap have a fixed seed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.seeding import generator
from tether.diagnostics.intervals import student_t

Floats = npt.NDArray[np.float64]

RESAMPLES = 1000
ROUNDING = 1e-9
"""Degrees of freedom that are a whole number on paper may fall just below it."""
LEAST_RUNS = 4
"""A rank correlation of fewer points has no interval worth the name."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number with its 95% interval. Example: Estimate(0.112, 0.031, 0.193, 3, "paired")."""

    value: float
    low: float
    high: float
    num: int
    """Seeds, pairs of seeds, or runs; of an unpaired contrast the smallest number of seeds of an arm."""
    how: str
    """"seeds", "paired" (by seed), "unpaired" (Welch) or "bootstrap"."""
    error: float = math.nan
    """Standard error, where the interval is Student's."""
    degrees: int = 0
    """Its degrees of freedom."""

    @property
    def has_interval(self) -> bool:
        return math.isfinite(self.low)


def level(values: Sequence[float], how: str = "seeds") -> Estimate:
    """The mean with its t interval; unbounded for one value."""
    num = len(values)
    mean = math.fsum(values) / num
    if num < 2:
        return Estimate(mean, -math.inf, math.inf, num, how)
    return _student(mean, _variance(values) / num, num - 1, num, how)


def contrast(arms: Sequence[tuple[float, Mapping[int, float]]]) -> Estimate:
    """The weighted sum of the arms' means; each arm is its weight and its values by seed, at least one.

    Where all arms share two seeds or more, the sum is taken within each shared seed and its t interval over these seeds (paired). Else the
    arms' variances are added, and the degrees of freedom are Welch's, rounded down.
    """
    shared = sorted(set.intersection(*(set(values) for _, values in arms)))
    if len(shared) >= 2 or len(arms) == 1:
        sums = [math.fsum(weight * values[seed] for weight, values in arms) for seed in shared]
        return level(sums, "paired" if len(arms) > 1 else "seeds")
    total = math.fsum(weight * math.fsum(values.values()) / len(values) for weight, values in arms)
    fewest = min(len(values) for _, values in arms)
    if fewest < 2:
        return Estimate(total, -math.inf, math.inf, fewest, "unpaired")
    parts = [(weight**2 * _variance(list(values.values())) / len(values), len(values) - 1) for weight, values in arms]
    return _summed(total, parts, fewest, "unpaired")


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates (one per environment), its error from theirs, with Welch's degrees of freedom, rounded down."""
    num = len(estimates)
    mean = math.fsum(estimate.value for estimate in estimates) / num
    fewest, how = min(estimate.num for estimate in estimates), estimates[0].how
    if not all(estimate.has_interval for estimate in estimates):
        return Estimate(mean, -math.inf, math.inf, fewest, how)
    return _summed(mean, [(estimate.error**2 / num**2, estimate.degrees) for estimate in estimates], fewest, how)


def _summed(value: float, parts: Sequence[tuple[float, int]], num: int, how: str) -> Estimate:
    """A sum of independent parts, each given by its variance and degrees of freedom (Welch and Satterthwaite)."""
    variance = math.fsum(part for part, _ in parts)
    spread = math.fsum(part**2 / degrees for part, degrees in parts)
    degrees = max(1, math.floor(variance**2 / spread + ROUNDING)) if spread > 0 else sum(degrees for _, degrees in parts)
    return _student(value, variance, degrees, num, how)


def _student(value: float, variance: float, degrees: int, num: int, how: str) -> Estimate:
    error = math.sqrt(variance)
    half = student_t(degrees) * error
    return Estimate(value, value - half, value + half, num, how, error, degrees)


def _variance(values: Sequence[float]) -> float:
    """With ddof 1."""
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


# -------------------------------------------------------------------------------------------------------- rank correlation


def ranks(values: Sequence[float] | Floats) -> Floats:
    """Ranks from 1; equal values share the mean of theirs.

    >>> ranks([3.0, 1.0, 3.0]).tolist()
    [2.5, 1.0, 2.5]
    """
    array = np.asarray(values, dtype=np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    found: Floats = (ends - (counts - 1) / 2)[inverse]
    return found


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation; 0 where one side is constant."""
    return stratified_spearman(x, y, [0] * len(x))


def stratified_spearman(x: Sequence[float], y: Sequence[float], strata: Sequence[object]) -> float:
    """Spearman's correlation within strata (environments), pooled: ranks are taken and centred within each stratum.

    Levels differ between environments for reasons that say nothing about a run, so ranks across environments would mostly compare
    environments. A stratum's ranks are divided by their number, so that strata count by their number of runs.
    """
    dx, dy = (_centred_ranks(values, strata) for values in (x, y))
    norm = math.sqrt(float(dx @ dx) * float(dy @ dy))
    return float(dx @ dy) / norm if norm > 0 else 0.0


def _centred_ranks(values: Sequence[float], strata: Sequence[object]) -> Floats:
    array = np.asarray(values, dtype=np.float64)
    centred = np.zeros(len(array))
    for rows in _members(strata):
        own = ranks(array[rows])
        centred[rows] = (own - own.mean()) / len(rows)
    return centred


def _members(strata: Sequence[object]) -> list[npt.NDArray[np.intp]]:
    """The rows of each stratum, in the order in which strata first appear."""
    rows: dict[object, list[int]] = {}
    for row, name in enumerate(strata):
        rows.setdefault(name, []).append(row)
    return [np.array(own) for own in rows.values()]


def bootstrapped(statistic: Callable[[Sequence[int]], float], strata: Sequence[object]) -> Estimate:
    """A statistic of runs (given by their rows) with its percentile interval; runs are drawn with replacement within their stratum."""
    num = len(strata)
    everyone = list(range(num))
    value = statistic(everyone)
    if num < LEAST_RUNS:
        return Estimate(value, -math.inf, math.inf, num, "bootstrap")
    rng = generator("experiments", "bootstrap")
    members = _members(strata)
    drawn = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([own[rng.integers(0, len(own), len(own))] for own in members])
        drawn.append(statistic(rows.tolist()))
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(value, float(low), float(high), num, "bootstrap")
