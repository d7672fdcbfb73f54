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

INFORMATION = "information/mi_seq / log(prompts)"
"""MI-Seq-Est as a share of its ceiling, so that measurements on different numbers of prompts compare."""
LONGEST_RESPONSE = "rollout/response_tokens_max"
MISMATCH, STALENESS = "rollout/mismatch_before", "rollout/staleness"
REASONINGS, REPEATED = "rollout/reasonings", "rollout/repeated_text"

METRICS = frozenset(
    {
        "groups/rv_mean",
        "information/chance",
        "information/h_conditional",
        "information/mi_seq",
        "information/num_prompts",
        "information/retrieval_acc",
        "rollout/format_valid",
        "rollout/reasoning_tokens",
        "rollout/response_tokens",
        "rollout/success",
        INFORMATION,
        LONGEST_RESPONSE,
        MISMATCH,
        STALENESS,
        REASONINGS,
        REPEATED,
    }
)
"""What the rules read. Other metrics are not kept."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive measurements of one number."""

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

    def until(self, step: int) -> "Stretch":
        """The measurements up to a step, its own included."""
        return self._part(0, bisect.bisect_right(self.steps, step))

    def first(self, count: int) -> "Stretch":
        return self._part(0, count)

    def last(self, count: int) -> "Stretch":
        return self._part(max(0, len(self.steps) - count), len(self.steps))

    def early(self, steps: int, fewest: int) -> "Stretch":
        """The measurements of the first so many steps; at least `fewest` of them, however rare they are."""
        inside = bisect.bisect_left(self.steps, self.steps[0] + steps) if self.steps else 0
        return self.first(max(fewest, inside))

    def recent(self, steps: int, fewest: int) -> "Stretch":
        """The measurements of the last so many steps; at least `fewest` of them."""
        inside = len(self.steps) - bisect.bisect_right(self.steps, self.steps[-1] - steps) if self.steps else 0
        return self.last(max(fewest, inside))

    def without_last(self, count: int) -> "Stretch":
        return self._part(0, max(0, len(self.steps) - count))

    def best(self, count: int) -> "Stretch":
        """The `count` neighbours with the highest median, the earliest of equals; all of it where it is shorter."""
        if len(self.values) <= count:
            return self
        medians = np.median(np.lib.stride_tricks.sliding_window_view(np.array(self.values), count), axis=1)
        begin = int(np.argmax(medians))
        return self._part(begin, begin + count)

    def at(self, steps: Iterable[int]) -> "Stretch":
        """The measurements made at these steps."""
        wanted = set(steps)
        kept = [(step, value) for step, value in zip(self.steps, self.values, strict=True) if step in wanted]
        return Stretch(tuple(step for step, _ in kept), tuple(value for _, value in kept))

    def _part(self, begin: int, end: int) -> "Stretch":
        return Stretch(self.steps[begin:end], self.values[begin:end])

    def __len__(self) -> int:
        return len(self.steps)


@dataclass(frozen=True, slots=True)
class Shift:
    """A change that passed both conditions."""

    before: Stretch
    after: Stretch
    p_value: float


def fall(before: Stretch, after: Stretch, share: float, p_value: float) -> Shift | None:
    """`after` is at most `share` of `before`, and below it beyond chance."""
    if not before.values or not after.values or before.median <= 0 or after.median > share * before.median:
        return None
    found = rank_sum_p(after.values, before.values)
    return Shift(before, after, found) if found <= p_value else None


def rise(before: Stretch, after: Stretch, times: float, p_value: float) -> Shift | None:
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


@dataclass(frozen=True, slots=True)
class TextCount:
    """The number of reasonings of one step, and of the degenerate ones among them."""

    step: int
    total: int
    degenerate: int


class History:
    """The metrics of a run's steps, in order."""

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._series: dict[str, tuple[list[int], list[float]]] = {name: ([], []) for name in METRICS}
        self._end = math.inf

    @property
    def steps(self) -> Sequence[int]:
        """The steps on record."""
        return self._steps[: bisect.bisect_right(self._steps, self._end)]

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step after all others."""
        assert not self._steps or step > self._steps[-1], "steps are added in order"
        self._steps.append(step)
        for name, value in (dict(metrics) | _derived(metrics)).items():
            if name in METRICS:
                steps, values = self._series[name]
                steps.append(step)
                values.append(value)

    def drop_from(self, step: int) -> None:
        """Remove this step and all later ones."""
        for steps, values in ((self._steps, None), *self._series.values()):
            keep = bisect.bisect_left(steps, step)
            del steps[keep:]
            if values is not None:
                del values[keep:]

    def until(self, step: int) -> "History":
        """The history as it was at an earlier step."""
        earlier = History()
        earlier._steps, earlier._series, earlier._end = self._steps, self._series, step
        return earlier

    def __getitem__(self, metric: str) -> Stretch:
        """The measurements of one metric; empty where it was never measured."""
        steps, values = self._series[metric]
        count = bisect.bisect_right(steps, self._end)
        return Stretch(tuple(steps[:count]), tuple(values[:count]))

    def texts(self, count: int) -> list[TextCount]:
        """The last `count` steps with reasonings; fewer where fewer are on record."""
        steps, shares = self._series[REPEATED]
        counted: list[TextCount] = []
        totals = dict(zip(*self._series[REASONINGS], strict=True)) if steps else {}
        for place in reversed(range(bisect.bisect_right(steps, self._end))):
            if len(counted) == count:
                break
            if total := totals.get(steps[place]):
                counted.append(TextCount(steps[place], round(total), round(shares[place] * total)))
        return counted[::-1]


def _derived(metrics: Mapping[str, float]) -> dict[str, float]:
    if "information/mi_seq" not in metrics or metrics.get("information/num_prompts", 0) < 2:
        return {}
    return {INFORMATION: metrics["information/mi_seq"] / math.log(metrics["information/num_prompts"])}
