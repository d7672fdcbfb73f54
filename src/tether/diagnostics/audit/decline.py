"""A decline in a series of windows, and when it began: two rules, of which the first that finds one counts.

- One window against another: the last lies below the best one before it, by at least three tenths and beyond both 95% intervals. It began
  with the first window of the stretch, up to the end, whose intervals all lie below that of the best.
- All windows together, six or more: intervals of single windows are wide where a step holds few prompts, but twenty of them know more. Of all
  ways to take a stretch of windows and everything after it, the one with the clearest fall of the mean is taken. It counts if the mean
  has lost three tenths, and if windows in shuffled order show as clear a fall in at most one case of a hundred.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.seeding import generator
from tether.diagnostics.audit.windows import Window

FALLEN = 0.7
"""A decline ends at no more than this share of the best value."""
STRETCH, REST = 3, 2
"""Windows before and after a change, at least."""
FEWEST_TOGETHER = 6
SHUFFLES = 999
SIGNIFICANT = 0.01

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Point:
    """One window on a curve: a value with its 95% interval."""

    window: Window
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.0%} ({self.low:.0%} to {self.high:.0%}) at step {self.window.name}"


@dataclass(frozen=True, slots=True)
class Decline:
    """A fall that passed the rule."""

    best: Point
    last_good: Point
    """The last window whose interval overlaps the best one's."""
    began: Point
    end: Point


def decline(points: Sequence[Point]) -> Decline | None:
    """The fall of a series, or None."""
    return _by_intervals(points) or _together(points)


def _by_intervals(points: Sequence[Point]) -> Decline | None:
    if len(points) < 2:
        return None
    best = max(range(len(points) - 1), key=lambda index: (points[index].value, -index))
    top, end = points[best], points[-1]
    if top.value <= 0 or end.value > FALLEN * top.value or end.high >= top.low:
        return None
    begin = len(points) - 1
    while points[begin - 1].high < top.low:  # ends at the best itself
        begin -= 1
    return Decline(top, points[begin - 1], points[begin], end)


def _together(points: Sequence[Point]) -> Decline | None:
    if len(points) < FEWEST_TOGETHER:
        return None
    values = np.array([point.value for point in points])
    observed = _clearest_fall(values)
    first, last = observed.first, observed.last
    before, after = values[first : last + 1].mean(), values[last + 1 :].mean()
    if before <= 0 or after > FALLEN * before:
        return None
    rng = generator("audit decline", len(values))
    hits = sum(_clearest_fall(rng.permutation(values)).size >= observed.size - 1e-12 for _ in range(SHUFFLES))
    if (1 + hits) / (1 + SHUFFLES) > SIGNIFICANT:
        return None
    return Decline(_pooled(points[first : last + 1]), points[last], points[last + 1], _pooled(points[last + 1 :]))


@dataclass(frozen=True, slots=True)
class _Fall:
    size: float
    """Difference of the means, weighed by how many windows stand on each side."""
    first: int
    last: int
    """The stretch before it."""


def _clearest_fall(values: Floats) -> _Fall:
    sums = np.concatenate([[0.0], np.cumsum(values)])
    best = _Fall(-math.inf, 0, STRETCH - 1)
    for last in range(STRETCH - 1, len(values) - REST):
        rest = len(values) - 1 - last
        starts = np.arange(last - STRETCH + 2)
        lengths = last + 1 - starts
        falls = (sums[last + 1] - sums[starts]) / lengths - (sums[-1] - sums[last + 1]) / rest
        sizes = falls * np.sqrt(lengths * rest / (lengths + rest))
        start = int(np.argmax(sizes))
        if sizes[start] > best.size:
            best = _Fall(float(sizes[start]), start, last)
    return best


def _pooled(points: Sequence[Point]) -> Point:
    """Several windows as one: their mean, with the error of a mean."""
    values = np.array([point.value for point in points])
    margin = 1.96 * float(values.std(ddof=1)) / math.sqrt(len(values))
    mean = float(values.mean())
    return Point(Window(tuple(step for point in points for step in point.window.steps)), mean, mean - margin, mean + margin)
