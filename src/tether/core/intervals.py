"""Intervals over instances: of a rate, of a mean, and of the difference of two models on the same instances.

Instances are independent draws; samples (episodes) of one instance are not. So the instance is the unit of every interval here. Each has a
known-answer test, and benchmarks/evaluation_coverage.py measures how often the intervals hold the true value.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

from tether.core.metrics import wilson_interval

Interval = tuple[float, float]


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


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Student's 95% interval of a mean over instances; None where they show no spread, or there is only one: nothing can be said."""
    count = len(values)
    if count < 2:
        return None
    mean, error = _mean(values), math.sqrt(_variance(values) / count)
    half = student_t(count - 1) * error
    return (mean - half, mean + half) if half > 0 else None


def difference_interval(differences: Sequence[float], samples: int, *, level: float = 0.95) -> Interval:
    """The interval of a difference of success rates, from the differences on the C instances that both models played:

        mean d  +-  t(C - 1) sqrt(var(d) / C + 1 / (samples C)^2)

    The second term is the weight of one sample that turns out otherwise: models that agree everywhere have no variance, and yet nobody knows
    that they agree on the next instance. `samples`: of each instance, the fewer of the two models'. One instance tells nothing: (-1, 1).
    """
    count = len(differences)
    if count < 2:
        return -1.0, 1.0
    mean = _mean(differences)
    half = student_t(count - 1, level) * math.sqrt(_variance(differences) / count + 1 / (samples * count) ** 2)
    return max(-1.0, mean - half), min(1.0, mean + half)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    """With ddof 1."""
    mean = _mean(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
