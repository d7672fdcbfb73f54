"""The trend over several windows: whether dependence on the prompt fell, at which change point, and whether success fell before or after.

The indicators of dependence are retrievals of the prompt: by the model (plain or adjusted), by neighbours, by prompt overlap. The trend follows
the indicator that stands clearest above chance anywhere in the run, as its excess over chance, so that windows with different numbers of
prompts compare. With fewer than four windows only the first and the last are compared.

Two rules find a change point, and the first that finds one counts:

- One window against another: the last lies below the best one before it, by at least three tenths and beyond both 95% intervals. The fall
  began with the first window of the final stretch whose intervals all lie below that of the best.
- All windows together, six or more: intervals of single windows are wide where a step holds few prompts, but twenty windows together carry
  more. Of all ways to take a stretch of windows and everything after it, the one with the clearest fall of the mean is taken. It counts if
  the mean has lost three tenths, and if windows in shuffled order show as clear a fall in at most one case of a hundred.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether.core.enums import Regime
from tether.core.evidence import Retrieval
from tether.core.metrics import wilson_interval
from tether.core.reasoning import Verdict
from tether.core.seeding import generator
from tether.core.shares import range_words
from tether.diagnostics.audit.measure import Measurement
from tether.diagnostics.audit.reading import Window

FEWEST_WINDOWS = 4

INDICATORS = {
    "retrieval": "the model's retrieval of the prompt",
    "adjusted_retrieval": "the model's adjusted retrieval of the prompt",
    "neighbours": "retrieval of the prompt by similarity to neighbours",
    "prompt_overlap": "retrieval of the prompt by shared words",
}

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
        return f"{self.value:.0%} ({range_words(self.low, self.high)}) at step {self.window.name}"


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """A fall that passed one of the rules."""

    best: Point
    last_good: Point
    """The last window whose interval overlaps the best one's."""
    began: Point
    end: Point


@dataclass(frozen=True, slots=True)
class MeasuredWindow:
    """One window with what was found in it; the counts are of all its rollouts, not of the sample."""

    window: Window
    measurement: Measurement
    verdict: Verdict
    num_success: int
    num_judged: int


@dataclass(frozen=True, slots=True)
class Trend:
    """The trend of a run, with `sentences` that describe it."""

    indicator: str
    points: tuple[Point, ...]
    """Excess over chance of that indicator."""
    regimes: tuple[Regime | None, ...]
    """None where a window's sample is too small, and wherever its verdict is not one of the four."""
    information: ChangePoint | None
    success: ChangePoint | None
    sentences: tuple[str, ...]


def measure_trend(windows: Sequence[MeasuredWindow]) -> Trend | None:
    """The trend over two windows or more; None for one."""
    if len(windows) < 2:
        return None
    indicator = clearest_indicator([window.measurement for window in windows])
    points = tuple(_point(window.window, indicators(window.measurement)[indicator], window.measurement.num_prompts) for window in windows)
    rates = [_rate(window) for window in windows if window.num_judged]
    fall = change_point(points)
    success = change_point(rates)
    regimes = tuple(window.verdict.regime for window in windows)
    return Trend(indicator, points, regimes, fall, success, tuple(_sentences(indicator, points, rates, fall, success)))


def indicators(found: Measurement) -> dict[str, Retrieval]:
    """The retrievals of one window by name; neighbours only where prompts have several reasonings."""
    named = {"retrieval": found.retrieval, "adjusted_retrieval": found.adjusted, "prompt_overlap": found.lexical.prompt_overlap}
    return named if found.lexical.neighbours is None else named | {"neighbours": found.lexical.neighbours}


def clearest_indicator(measurements: Sequence[Measurement]) -> str:
    """The indicator that stands highest above chance over some stretch of windows; one that all windows have. Among equals the model's own is taken."""
    windows = [indicators(found) for found in measurements]
    shared = [name for name in INDICATORS if all(name in window for window in windows)]

    def height(name: str) -> float:
        if len(windows) < STRETCH:  # too few to average: the lower end of a single window counts
            return max(window[name].excess_of(window[name].interval[0]) for window in windows)
        values = [window[name].excess for window in windows]
        return max(sum(values[start : start + STRETCH]) for start in range(len(values) - STRETCH + 1))

    return max(shared, key=lambda name: (height(name), -shared.index(name)))


def _point(window: Window, found: Retrieval, num_prompts: int) -> Point:
    low, high = found.interval
    if low == high:  # all right or all wrong: resampling has no spread, although more prompts might have differed
        low, high = wilson_interval(found.accuracy * num_prompts, num_prompts)
    return Point(window, found.excess, found.excess_of(low), found.excess_of(high))


def _rate(window: MeasuredWindow) -> Point:
    low, high = wilson_interval(window.num_success, window.num_judged)
    return Point(window.window, window.num_success / window.num_judged, low, high)


def _sentences(
    indicator: str, points: Sequence[Point], rates: Sequence[Point], fall: ChangePoint | None, success: ChangePoint | None
) -> list[str]:
    if len(points) < FEWEST_WINDOWS:
        words = [_first_to_last(f"Dependence on the prompt ({INDICATORS[indicator]}, share above chance)", points)]
        return words + ([_first_to_last("Success", rates)] if len(rates) > 1 else [])
    what = f"Dependence on the prompt ({INDICATORS[indicator]}, share above chance)"
    if fall is None:
        first, last = points[0], points[-1]
        words = [f"{what} shows no decline: {first}, {last}."]
    else:
        words = [
            f"{what} fell from {fall.best} to {fall.end}. The decline began at step {fall.began.window.name}; "
            f"step {fall.last_good.window.name} is the last before it."
        ]
    if rates:
        words.append(_success_words(rates, fall, success))
    return words


def _success_words(rates: Sequence[Point], fall: ChangePoint | None, success: ChangePoint | None) -> str:
    if success is None:
        after = " while dependence on the prompt was lost: read the reasoning, not only the reward" if fall else ""
        return f"Success shows no decline ({rates[0]}, {rates[-1]}){after}."
    words = f"Success fell from {success.best} to {success.end}, beginning at step {success.began.window.name}"
    if fall is None:
        return f"{words}; dependence on the prompt did not."
    if fall.began.window.last == success.began.window.last:
        return f"{words}, together with dependence on the prompt."
    return f"{words}: {'after' if fall.began.window.last < success.began.window.last else 'before'} dependence on the prompt did."


def _first_to_last(what: str, points: Sequence[Point]) -> str:
    first, last = points[0], points[-1]
    if last.high < first.low:
        return f"{what} fell: {first}, {last}."
    return f"{what} {'rose' if last.low > first.high else 'did not measurably change'}: {first}, {last}."


def change_point(points: Sequence[Point]) -> ChangePoint | None:
    """The fall of a series and where it began, or None."""
    return _by_intervals(points) or _together(points)


def _by_intervals(points: Sequence[Point]) -> ChangePoint | None:
    if len(points) < 2:
        return None
    best = max(range(len(points) - 1), key=lambda index: (points[index].value, -index))
    top, end = points[best], points[-1]
    if top.value <= 0 or end.value > FALLEN * top.value or end.high >= top.low:
        return None
    begin = len(points) - 1
    while points[begin - 1].high < top.low:  # ends at the best itself
        begin -= 1
    return ChangePoint(top, points[begin - 1], points[begin], end)


def _together(points: Sequence[Point]) -> ChangePoint | None:
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
    return ChangePoint(_pooled(points[first : last + 1]), points[last], points[last + 1], _pooled(points[last + 1 :]))


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
