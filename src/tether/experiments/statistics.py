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

from tether.core.intervals import student_t
from tether.core.seeding import generator

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
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


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing the mean of their ranks; 0 where one side is constant."""
    return float(rank_correlations(x, y, [0] * len(x), np.ones((1, len(x))))[0])


def rank_correlations(x: Sequence[float], y: Sequence[float], strata: Sequence[object], counts_RN: Floats) -> Floats:
    """[R] Spearman's correlations within strata (environments), pooled, each of a sample that holds run n counts_RN[r, n] times.

    Levels differ between environments for reasons that say nothing about a run, so ranks across environments would mostly compare
    environments. Ranks are taken within a stratum, centred there, and divided by its number of runs, so that strata count by their runs.
    Working on counts gives all samples of a bootstrap in a few array operations.
    """
    products = np.zeros((3, len(counts_RN)))
    for rows in _members(strata):
        counts_RS = counts_RN[:, rows]
        dx, dy = (_centred_ranks(np.asarray(values, dtype=np.float64)[rows], counts_RS) for values in (x, y))
        products += [(counts_RS * left * right).sum(axis=1) for left, right in ((dx, dy), (dx, dx), (dy, dy))]
    norm = np.sqrt(products[1] * products[2])
    found: Floats = np.divide(products[0], norm, out=np.zeros_like(norm), where=norm > ROUNDING)
    return found


def _centred_ranks(values_S: Floats, counts_RS: Floats) -> Floats:
    """[R, S] ranks of the values of one stratum in samples that hold them so many times, less their mean, over the sample's size."""
    _, group_S = np.unique(values_S, return_inverse=True)
    weights_RG = np.stack([counts_RS[:, group_S == group].sum(axis=1) for group in range(group_S.max() + 1)], axis=1)
    before_RG = np.cumsum(weights_RG, axis=1) - weights_RG
    ranks_RG = before_RG + (weights_RG + 1) / 2  # ties share the mean of their ranks
    size = counts_RS.sum(axis=1, keepdims=True)
    centred: Floats = (ranks_RG[:, group_S] - (size + 1) / 2) / size
    return centred


def _members(strata: Sequence[object]) -> list[npt.NDArray[np.intp]]:
    """The rows of each stratum, in the order in which strata first appear."""
    rows: dict[object, list[int]] = {}
    for row, name in enumerate(strata):
        rows.setdefault(name, []).append(row)
    return [np.array(own) for own in rows.values()]


def bootstrapped(statistic: Callable[[Floats], Floats], strata: Sequence[object]) -> Estimate:
    """A statistic of runs with its percentile interval; runs are drawn with replacement within their stratum.

    `statistic` takes [R, N], how often each of R samples holds each of N runs, and returns R numbers.
    """
    num = len(strata)
    value = float(statistic(np.ones((1, num)))[0])
    if num < LEAST_RUNS:
        return Estimate(value, -math.inf, math.inf, num, "bootstrap")
    rng = generator("experiments", "bootstrap")
    counts_RN = np.zeros((RESAMPLES, num))
    for rows in _members(strata):
        counts_RN[:, rows] = rng.multinomial(len(rows), np.full(len(rows), 1 / len(rows)), size=RESAMPLES)
    low, high = np.quantile(statistic(counts_RN), (0.025, 0.975))
    return Estimate(value, float(low), float(high), num, "bootstrap")
