"""Intervals over instances and over seeds: of a rate, of a mean, and of differences.

Instances are independent draws; samples (episodes) of one instance are not. So the instance is the unit of an evaluation's intervals, and the
seed is the unit of a sweep's: a run's validation success already contains the binomial noise of its prompts, so the spread between seeds does
too. Each has a known-answer test, and benchmarks/evaluation_coverage.py measures how often the intervals hold the true value.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean

import numpy as np

from tether.core.metrics import wilson_interval

Interval = tuple[float, float]

_ROUNDING = 1e-9
"""Degrees of freedom that are a whole number on paper may fall just below it."""


def student_t(degrees: int, level: float = 0.95) -> float:
    """The two-sided quantile of Student's t (97.5% for a level of 95%): exact for 1 and 2 degrees of freedom, else by its expansion about the
    normal (0.2% at 3)."""
    upper = (1 + level) / 2
    if degrees == 1:
        return math.tan(math.pi * (upper - 0.5))
    if degrees == 2:
        return (2 * upper - 1) / math.sqrt(2 * upper * (1 - upper))
    z = NormalDist().inv_cdf(upper)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return math.fsum(term / degrees**power for power, term in enumerate(terms))


def clustered_interval(outcomes: Sequence[Sequence[float]]) -> Interval:
    """The 95% interval of a success rate from the episodes of independent instances; an outcome is true, false or a share.

    With one episode of each this is Wilson's interval. Episodes of one instance are alike to some degree, which is measured: Wilson's interval
    is then taken for as many trials as would give the rate the variance that the instances show, with Student's quantile, as this variance
    was found from few. Where the instances show none (all solved, or none), each counts as one trial.
    """
    count, num_episodes = len(outcomes), sum(map(len, outcomes))
    rate = sum(map(sum, outcomes)) / max(1, num_episodes)
    if count < 2 or (num_episodes == count and all(value in (0, 1) for (value,) in outcomes)):
        return wilson_interval(rate * count, count)
    variance = count / (count - 1) * sum((sum(found) - len(found) * rate) ** 2 for found in outcomes) / num_episodes**2
    trials = rate * (1 - rate) / variance if variance > 0 else float(count)
    return wilson_interval(rate * trials, trials, student_t(count - 1))


def instance_values(outcomes: Sequence[Sequence[float]]) -> list[float]:
    """One value for each instance, whose mean is the mean m over all episodes: m + (s_i - n_i m) C / N, with n_i of the N episodes, and their sum
    s_i, on instance i of C. Where all instances have as many episodes, the value is the instance's own mean.

    >>> instance_values([[1.0, 0.0], [1.0, 1.0]]), instance_values([[1.0], [0.0, 0.0, 0.0]])
    ([0.5, 1.0], [0.625, -0.125])
    """
    count, num_episodes = len(outcomes), sum(map(len, outcomes))
    mean = math.fsum(math.fsum(found) for found in outcomes) / num_episodes
    return [mean + (math.fsum(found) - len(found) * mean) * count / num_episodes for found in outcomes]


def mean_interval(values: Sequence[float], bounds: Interval | None = None) -> Interval | None:
    """Student's 95% interval of a mean over instances; None where they show no spread, or there is only one: nothing can be said.

    `bounds` as in `level`.
    """
    found = level(values, bounds=bounds)
    return (found.low, found.high) if found.has_interval and found.error > 0 else None


def difference_interval(differences: Sequence[float], samples: int, *, level: float = 0.95) -> Interval:
    """The interval of a difference of success rates, from the differences on the C instances that both models played:

        mean d  +-  t(C - 1) sqrt(var(d) / C + 1 / (samples C)^2)

    The second term is the weight of one sample that turns out otherwise: models that agree everywhere have no variance, and yet nobody knows
    that they agree on the next instance. `samples`: of each instance, the fewer of the two models'. One instance tells nothing: (-1, 1).
    """
    count = len(differences)
    if count < 2:
        return -1.0, 1.0
    mean = fmean(differences)
    half = student_t(count - 1, level) * math.sqrt(_variance(differences) / count + 1 / (samples * count) ** 2)
    return max(-1.0, mean - half), min(1.0, mean + half)


# -------------------------------------------------------------------------------------------------------------- over seeds


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

    def within(self, bounds: Interval) -> "Estimate":
        """With its interval cut at the ends of a range; one without an interval stays so."""
        if not self.has_interval:
            return self
        return dataclasses.replace(self, low=max(self.low, bounds[0]), high=min(self.high, bounds[1]))


def level(values: Sequence[float], how: str = "seeds", bounds: Interval | None = None) -> Estimate:
    """The mean with its t interval; unbounded for one value.

    `bounds`: the range of the quantity, such as (0, 1) for a share or (0, inf) for a length. With two ends, the interval is Student's on the
    logit, where the error is error / slope at the mean (the delta method). So it stays within the range, and two seeds, whose quantile is 12.7,
    show how little they say: 0.712 +- 0.063 is [0.047, 0.992], not [-0.091, 1.514]. With one end, the interval is cut there.
    """
    num, mean = len(values), fmean(values)
    if num < 2:
        return Estimate(mean, -math.inf, math.inf, num, how)
    found = _student(mean, _variance(values) / num, num - 1, num, how)
    low, high = bounds or (mean, mean)
    if found.error == 0 or not low < mean < high:
        return found
    if math.isinf(high):
        return found.within((low, high))
    share = (mean - low) / (high - low)
    centre, reach = math.log(share / (1 - share)), student_t(num - 1) * found.error / (high - low) / (share * (1 - share))
    ends = [low + (high - low) * _logistic(logit) for logit in (centre - reach, centre + reach)]
    return dataclasses.replace(found, low=ends[0], high=ends[1])


def contrast(arms: Sequence[tuple[float, Mapping[int, float]]], bounds: Interval | None = None) -> Estimate:
    """The weighted sum of the arms' means; each arm is its weight and its values by seed, at least one.

    Where all arms share two seeds or more, the sum is taken within each shared seed and its t interval over these seeds (paired). Else the
    arms' variances are added, and the degrees of freedom are Welch's, rounded down. `bounds` is the range of the quantity itself: the interval
    is cut where a weighted sum of such values ends, which changes no decision on its sign.
    """
    if bounds is not None:
        return contrast(arms).within(sum_bounds([weight for weight, _ in arms], bounds))
    shared = sorted(set.intersection(*(set(values) for _, values in arms)))
    if len(shared) >= 2 or len(arms) == 1:
        sums = [math.fsum(weight * values[seed] for weight, values in arms) for seed in shared]
        return level(sums, "paired" if len(arms) > 1 else "seeds")
    total = math.fsum(weight * fmean(list(values.values())) for weight, values in arms)
    fewest = min(len(values) for _, values in arms)
    if fewest < 2:
        return Estimate(total, -math.inf, math.inf, fewest, "unpaired")
    parts = [(weight**2 * _variance(list(values.values())) / len(values), len(values) - 1) for weight, values in arms]
    return _summed(total, parts, fewest, "unpaired")


def sum_bounds(weights: Sequence[float], bounds: Interval) -> Interval:
    """The range of a weighted sum of values of a range.

    >>> sum_bounds([1, -1], (0, 1))
    (-1.0, 1.0)
    """
    ends = [sorted((weight * bounds[0], weight * bounds[1])) for weight in weights if weight]
    return math.fsum(low for low, _ in ends), math.fsum(high for _, high in ends)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates (one per environment), its error from theirs, with Welch's degrees of freedom, rounded down."""
    num = len(estimates)
    mean = fmean([estimate.value for estimate in estimates])
    fewest, how = min(estimate.num for estimate in estimates), estimates[0].how
    if not all(estimate.has_interval for estimate in estimates):
        return Estimate(mean, -math.inf, math.inf, fewest, how)
    return _summed(mean, [(estimate.error**2 / num**2, estimate.degrees) for estimate in estimates], fewest, how)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing the mean of their ranks; 0 where one side is constant."""
    centred = []
    for values in (x, y):
        _, group, counts = np.unique(np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[group]
        centred.append(ranks - ranks.mean())
    norm = math.sqrt(float((centred[0] ** 2).sum() * (centred[1] ** 2).sum()))
    return float((centred[0] * centred[1]).sum()) / norm if norm > 0 else 0.0


def _summed(value: float, parts: Sequence[tuple[float, int]], num: int, how: str) -> Estimate:
    """A sum of independent parts, each given by its variance and degrees of freedom (Welch and Satterthwaite)."""
    variance = math.fsum(part for part, _ in parts)
    spread = math.fsum(part**2 / degrees for part, degrees in parts)
    degrees = max(1, math.floor(variance**2 / spread + _ROUNDING)) if spread > 0 else sum(degrees for _, degrees in parts)
    return _student(value, variance, degrees, num, how)


def _student(value: float, variance: float, degrees: int, num: int, how: str) -> Estimate:
    error = math.sqrt(variance)
    half = student_t(degrees) * error
    return Estimate(value, value - half, value + half, num, how, error, degrees)


def _logistic(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value > -700 else 0.0


def _variance(values: Sequence[float]) -> float:
    """With ddof 1."""
    mean = fmean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
