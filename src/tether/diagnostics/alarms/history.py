"""The history that the alarm rules read, and the test that decides whether a noisy series has really moved.

`History` has one series per metric, up to and including a step, and grows by one step at a time. `until` gives the history as it was at an
earlier step; it shares the series with the whole.

A recent window is compared with an earlier window of the same run, by size and by rank. Two conditions must both hold. The ratio of the
medians says that the change matters; a single outlier cannot move a median. The exact one-sided rank-sum test (Wilcoxon, Mann and Whitney) says that the change is not noise: it gives the share of shuffles that would separate
the windows as well. It assumes nothing about the distribution (reward variance is heavy-tailed, shares pile up at 0 and 1) and is exact for
windows of four. Windows were preferred to a trend test over all steps (Mann-Kendall): that test asks whether there is a trend, which
learning itself produces, is slow to see a sudden change late in a long run, and gives no two numbers to show.

The earlier window is the run's start, or its best stretch for metrics that rise before they fall: information often doubles while a task
is learned, and is lost from there.
"""

import bisect
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tether.core.errors import UnknownName, did_you_mean
from tether.core.metrics import CATALOGUE, is_catalogued

INFORMATION = "information/mi_seq / log(prompts)"
"""MI-Seq-Est as a share of its ceiling, so that measurements on different numbers of prompts compare. Computed, not logged."""


@dataclass(frozen=True, slots=True)
class MetricSeries:
    """Consecutive measurements of one metric."""

    steps: tuple[int, ...]
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def span(self) -> tuple[int, int]:
        return self.steps[0], self.steps[-1]

    def first(self, count: int) -> "MetricSeries":
        return self._part(0, count)

    def last(self, count: int) -> "MetricSeries":
        return self._part(max(0, len(self.steps) - count), len(self.steps))

    def early(self, steps: int, fewest: int) -> "MetricSeries":
        """The measurements of the first so many steps; at least `fewest` of them, however rare they are."""
        inside = bisect.bisect_left(self.steps, self.steps[0] + steps) if self.steps else 0
        return self.first(max(fewest, inside))

    def recent(self, steps: int, fewest: int) -> "MetricSeries":
        """The measurements of the last so many steps; at least `fewest` of them."""
        inside = len(self.steps) - bisect.bisect_right(self.steps, self.steps[-1] - steps) if self.steps else 0
        return self.last(max(fewest, inside))

    def without_last(self, count: int) -> "MetricSeries":
        return self._part(0, max(0, len(self.steps) - count))

    def best(self, count: int) -> "MetricSeries":
        """The `count` neighbours with the highest median, the earliest of equals; all of it where it is shorter."""
        if len(self.values) <= count:
            return self
        medians = np.median(np.lib.stride_tricks.sliding_window_view(np.array(self.values), count), axis=1)
        begin = int(np.argmax(medians))
        return self._part(begin, begin + count)

    def at(self, steps: Iterable[int]) -> "MetricSeries":
        """The measurements made at these steps."""
        wanted = set(steps)
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if step in wanted]
        return MetricSeries(tuple(step for step, _ in kept), tuple(value for _, value in kept))

    def _part(self, begin: int, end: int) -> "MetricSeries":
        return MetricSeries(self.steps[begin:end], self.values[begin:end])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Shift:
    """A change that passed both conditions."""

    before: MetricSeries
    after: MetricSeries
    p_value: float


def fall(before: MetricSeries, after: MetricSeries, share: float, p_value: float) -> Shift | None:
    """`after` is at most `share` of `before`, and below it beyond chance."""
    if not before.values or not after.values or before.median <= 0 or after.median > share * before.median:
        return None
    found = rank_sum_p(after.values, before.values)
    return Shift(before, after, found) if found <= p_value else None


def rise(before: MetricSeries, after: MetricSeries, times: float, p_value: float) -> Shift | None:
    """`after` is at least `times` `before`, and above it beyond chance."""
    if not before.values or not after.values or before.median <= 0 or after.median < times * before.median:
        return None
    found = rank_sum_p(before.values, after.values)
    return Shift(before, after, found) if found <= p_value else None


def rank_sum_p(low: Sequence[float], high: Sequence[float]) -> float:
    """Chance that a random split ranks the first window as low as this, ties shared; exact, by counting the splits.

    >>> rank_sum_p([1, 2], [3, 4, 5])  # one of the ten ways to choose two of five
    0.1
    """
    pooled = np.array([*low, *high], dtype=np.float64)
    # Twice the mid-rank is a whole number, ties or not: below + below-or-equal + 1.
    ranks = [int((pooled < value).sum() + (pooled <= value).sum() + 1) for value in pooled]
    observed, chosen = sum(ranks[: len(low)]), len(low)
    splits = np.zeros((chosen + 1, sum(ranks) + 1))
    splits[0, 0] = 1
    for rank in ranks:
        splits[1:, rank:] += splits[:-1, : splits.shape[1] - rank].copy()
    return float(splits[chosen, : observed + 1].sum() / math.comb(len(pooled), chosen))


class History:
    """All metrics of a run's steps, in order. Every logged metric is kept, so a rule can read any of them without a list of those it reads."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._series: dict[str, tuple[list[int], list[float]]] = {}
        self._end = math.inf

    @property
    def steps(self) -> Sequence[int]:
        """The steps on record."""
        return self._steps[: bisect.bisect_right(self._steps, self._end)]

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step after all others."""
        assert not self._steps or step > self._steps[-1], "steps are added in order"
        self._steps.append(step)
        values = dict(metrics)
        if "information/mi_seq" in values and values.get("information/num_prompts", 0) >= 2:
            values[INFORMATION] = values["information/mi_seq"] / math.log(values["information/num_prompts"])
        for name, value in values.items():
            steps, series = self._series.setdefault(name, ([], []))
            steps.append(step)
            series.append(value)

    def pop_from(self, step: int) -> dict[int, dict[str, float]]:
        """Remove this step and all later ones; returns their metrics."""
        keep = bisect.bisect_left(self._steps, step)
        removed: dict[int, dict[str, float]] = {later: {} for later in self._steps[keep:]}
        del self._steps[keep:]
        for name, (steps, values) in self._series.items():
            keep = bisect.bisect_left(steps, step)
            for later, value in zip(steps[keep:], values[keep:], strict=True):
                removed[later][name] = value
            del steps[keep:], values[keep:]
        return removed

    def until(self, step: int) -> "History":
        """The history as it was at an earlier step."""
        earlier = History()
        earlier._steps, earlier._series, earlier._end = self._steps, self._series, step
        return earlier

    def __getitem__(self, metric: str) -> MetricSeries:
        """The measurements of one metric; empty where it was never measured. A name that no step can log is refused."""
        if metric not in self._series and metric != INFORMATION and not is_catalogued(metric):
            raise UnknownName(f"metric '{metric}' is not in core/metrics.toml: {did_you_mean(metric, CATALOGUE)}")
        steps, values = self._series.get(metric, ([], []))
        count = bisect.bisect_right(steps, self._end)
        return MetricSeries(tuple(steps[:count]), tuple(values[:count]))
