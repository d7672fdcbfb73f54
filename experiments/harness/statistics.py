"""Rank correlations over runs, their percentile bootstrap, and how an estimate would look with more seeds. Everything is deterministic: the draws
have a fixed seed."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from tether.core.intervals import Estimate, student_t
from tether.core.seeding import generator

Floats = npt.NDArray[np.float64]

RESAMPLES = 2000
ROUNDING = 1e-9
LEAST_RUNS = 4
"""A rank correlation of fewer points has no interval worth the name."""


POWER = 0.8
"""How likely a plan's number of seeds is to tell an effect of the estimated size."""


def with_seeds(estimate: Estimate, seeds: int, now: int) -> Estimate:
    """The estimate that decides a rule with power 0.8 under so many seeds, if effect and spread stay as they are under `now` seeds:

        value  +-  (t(0.975; d) + t(0.8; d)) s / sqrt(seeds),    s = error sqrt(n), the spread of one seed

    An interval with t(0.975) alone excludes zero half of the time if its centre is that far away; the second term makes it 80%. The degrees of
    freedom d grow with the seeds. A bootstrap's interval shrinks with the square root of its runs, each end times 1 + 0.84 / 1.96.
    """
    if not estimate.has_interval:
        return estimate
    if math.isnan(estimate.error):
        shrunk = (1 + student_t(10**6, 2 * POWER - 1) / student_t(10**6)) * math.sqrt(now / seeds)
        ends = [estimate.value + shrunk * (end - estimate.value) for end in (estimate.low, estimate.high)]
    else:
        degrees = max(1, math.floor(estimate.degrees * (seeds - 1) / (estimate.num - 1)))
        half = (student_t(degrees) + student_t(degrees, 2 * POWER - 1)) * estimate.error * math.sqrt(estimate.num / seeds)
        ends = [estimate.value - half, estimate.value + half]
    return dataclasses.replace(estimate, low=ends[0], high=ends[1])


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
