"""Who is looked at together: prompts in buckets by reward variance (Figure 3 of the paper), members of a prompt in independent halves.

Buckets hold equally many prompts, lowest variance first, so that what is measured in one can be compared with the next. Halves hold
equally many members of every prompt, so that both estimate the same thing; a member too many is left out of both.

Signal and noise of a mean gradient come from its halves. With independent halves g_1 and g_2 are independent estimates of the same mean g,
so E[g_1 . g_2] = |g|^2: the signal, free of the noise that the square of one estimate contains. It is unbiased, hence may come out negative;
only the ratio clips it at zero. The mean of a share w of the samples has variance v / w, v being that of all of them, so
E|g_1 - g_2|^2 = v (1/w_1 + 1/w_2) and |g_1 - g_2|^2 w_1 w_2 / (w_1 + w_2) is an unbiased estimate of v: the noise. With halves that are all
there is, the two add up to the square of the mean of both. SNR = sqrt(signal / noise) is that of theorem H.3.

Subtracting the mean reward of a whole group ties its halves together. For A = R - mean over G members and scores of mean zero this makes
E[g_1 . g_2] = |g|^2 ((G-1)^2 + 1) / G^2: still exactly 0 where there is no signal, and little less than |g|^2 elsewhere.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tether.core.errors import BadInput
from tether.core.seeding import generator

NUM_BUCKETS = 6

Vector = Sequence[Tensor]
"""A gradient, one tensor per parameter."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Prompts of similar reward variance, by the ids of their groups."""

    groups: tuple[int, ...]
    rv_low: float
    rv_high: float
    rv_mean: float


@dataclass(frozen=True, slots=True)
class Halves:
    """Trajectories by their numbers, ascending: as many of every group in `first` as in `second`."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    left_over: tuple[int, ...]
    """The odd members: one of every group of odd size."""


@dataclass(frozen=True, slots=True)
class SignalNoise:
    """What two halves say about a mean gradient."""

    signal: float
    """Estimate of |g|^2; unbiased, so it may be negative."""
    noise: float
    """Estimate of the mean square distance of the estimate from g."""

    @classmethod
    def from_halves(cls, first: Vector, second: Vector, share_first: float, share_second: float) -> "SignalNoise":
        """From the mean gradients of two disjoint shares of the samples; the module's docstring derives it."""
        distance = sum(float((one - other).square().sum(dtype=torch.float64)) for one, other in zip(first, second, strict=True))
        return cls(dot(first, second), distance * share_first * share_second / (share_first + share_second))

    @property
    def snr(self) -> float:
        """sqrt(signal / noise); 0 where no signal is seen."""
        if self.signal <= 0:
            return 0.0
        return math.sqrt(self.signal / self.noise) if self.noise > 0 else math.inf


@dataclass(frozen=True, slots=True)
class Agreement:
    """How a cheap measurement compares with the exact one over the buckets in which both have a value."""

    correlation: float | None
    """None with fewer than two buckets or values that do not vary."""
    ratio: float | None
    """Mean of cheap / exact where exact is not zero."""
    ratio_spread: float | None
    """Standard deviation of cheap / exact over its mean: 0 where the cheap one is the exact one but for a factor."""

    @classmethod
    def between(cls, exact: Sequence[float | None], cheap: Sequence[float | None]) -> "Agreement":
        """How two measurements of the same buckets agree; a bucket where one is undefined or infinite is left out."""
        pairs = [
            (one, other)
            for one, other in zip(exact, cheap, strict=True)
            if one is not None and other is not None and math.isfinite(one) and math.isfinite(other)
        ]
        varies = all(len(set(values)) > 1 for values in zip(*pairs, strict=True)) if pairs else False
        ratios = [other / one for one, other in pairs if one]
        ratio = statistics.fmean(ratios) if ratios else None
        return cls(
            correlation=statistics.correlation(*zip(*pairs, strict=True)) if varies else None,
            ratio=ratio,
            ratio_spread=statistics.pstdev(ratios) / ratio if ratio else None,
        )


def variance_buckets(variances: Mapping[int, float], count: int = NUM_BUCKETS) -> list[Bucket]:
    """Groups sorted by reward variance and cut into `count` buckets whose sizes differ by at most one, the larger ones first.

    Groups of equal variance keep the order of the mapping. With fewer groups than buckets every group is a bucket of its own.

    >>> [bucket.groups for bucket in variance_buckets({7: 0.5, 8: 0.0, 9: 0.25}, count=2)]
    [(8, 9), (7,)]
    """
    if count < 1:
        raise BadInput(f"the number of buckets must be at least 1, got {count}")
    if not variances:
        raise BadInput("there are no groups to put into buckets; give the reward variance of at least one")
    for group, variance in variances.items():
        if not math.isfinite(variance) or variance < 0:
            raise BadInput(f"the reward variance of group {group} is {variance}; give a finite number of at least 0")
    order = sorted(variances, key=lambda group: variances[group])  # sorted() is stable
    size, larger = divmod(len(order), count)
    buckets: list[Bucket] = []
    start = 0
    while start < len(order):
        stop = start + size + (len(buckets) < larger)
        values = [float(variances[group]) for group in order[start:stop]]
        buckets.append(Bucket(tuple(order[start:stop]), values[0], values[-1], math.fsum(values) / len(values)))
        start = stop
    return buckets


def split_halves(groups: Sequence[int], seed: int) -> Halves:
    """Two halves of every group by a seeded shuffle of its members; `groups[i]` is the group of trajectory i.

    The shuffle of a group depends on the seed, its id and its size alone, not on the other groups.
    """
    members: dict[int, list[int]] = {}
    for trajectory, group in enumerate(groups):
        members.setdefault(int(group), []).append(trajectory)
    first, second, left_over = [], [], []
    for group, own in members.items():
        shuffled = [own[place] for place in generator("gradient_halves", seed, group).permutation(len(own))]
        half = len(own) // 2
        first += shuffled[:half]
        second += shuffled[half : 2 * half]
        left_over += shuffled[2 * half :]
    return Halves(tuple(sorted(first)), tuple(sorted(second)), tuple(sorted(left_over)))


def dot(first: Vector, second: Vector) -> float:
    """The inner product, summed in float64."""
    return sum(float((one * other).sum(dtype=torch.float64)) for one, other in zip(first, second, strict=True))
