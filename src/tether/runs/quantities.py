"""Numbers of a run that tables over seeds and claims speak about: a window over the curve of a metric, such as "last information/mi_seq".

A curve maps steps to values. The windows:

    start    the first measurement
    peak     the largest value, that of step 0 included
    lowest   the smallest value
    mean     the area under the curve over the planned steps, by trapezoids, divided by the steps; the last value counts to the planned end
    last     the mean over the measurements in the last third of the planned steps; of a run that stopped before it, the last measurement
    change   last - start
    trend    Spearman's correlation of the values with the steps
    at_peak  the measurement nearest to the step at which validation success peaks; the earlier one where two are equally near
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tether.core.errors import BadInput, did_you_mean
from tether.core.intervals import Estimate, Interval, level, spearman
from tether.core.metrics import CATALOGUE, is_catalogued

Curve = Mapping[int, float]
Curves = Mapping[str, Curve]

SUCCESS = "validation/success"

DERIVED: dict[str, str] = {}
"""Further metrics that quantities may name, with what they are: whoever computes curves beside those that a run logs adds them."""

_SHARES = (
    "success", "format_valid", "retrieval_acc", "recall_", "kept_ratio", "trained_share", "all_fail", "mixed", "all_succeed", "solved_"
)  # fmt: skip
_NOT_NEGATIVE = re.compile(
    r"\w*(tokens|seconds)\w*|turns|rv_(mean|std|ratio)(_\d+)?|(\w+_)?norm(_\d+)?|zero_variance|h_(conditional|marginal)(_seq)?|entropy"
    r"|quantile_\d+|states(_trained)?|answers"
)


@dataclass(frozen=True, slots=True)
class Quantity:
    """A window over a metric's curve. Example: Quantity("peak", "validation/success")."""

    window: str
    metric: str

    @classmethod
    def parse(cls, text: str) -> "Quantity":
        """From its words, such as "peak validation/success"."""
        window, _, metric = text.partition(" ")
        if window not in WINDOWS:
            raise BadInput(f"quantity '{text}' has no window '{window}': {did_you_mean(window, WINDOWS)}")
        if not is_measured(metric):
            raise BadInput(f"quantity '{text}' names no metric '{metric}': {did_you_mean(metric, [*CATALOGUE, *DERIVED])}")
        return cls(window, metric)

    def of(self, curves: Curves, planned: int) -> float | None:
        """Its value in a run that was planned for so many steps; None where the metric was not measured."""
        curve = curves.get(self.metric)
        return WINDOWS[self.window](curve, curves, planned) if curve else None

    @property
    def is_share(self) -> bool:
        """Whether it is shown in percent: a share, or a difference of shares."""
        return self.window != "trend" and any(part in self.metric.rpartition("/")[2] for part in _SHARES)

    @property
    def bounds(self) -> Interval | None:
        """The range of its values; None where it has no end on either side."""
        name = self.metric.rpartition("/")[2]
        if self.window == "trend" or name.startswith("with_"):
            return (-1.0, 1.0)
        if self.is_share:
            return (-1.0, 1.0) if self.window == "change" or "_change" in name else (0.0, 1.0)
        return (0.0, math.inf) if self.window != "change" and _NOT_NEGATIVE.fullmatch(name) else None

    def level(self, values: Sequence[float]) -> Estimate:
        """The mean over seeds with its interval, which stays in the range of the quantity."""
        return level(values, bounds=self.bounds)

    def __str__(self) -> str:
        return f"{self.window} {self.metric}"


def is_measured(metric: str) -> bool:
    """Whether a run logs this metric, or somebody computes it beside."""
    return is_catalogued(metric) or metric in DERIVED


def shown(quantity: Quantity, value: float, *, signed: bool = False) -> str:
    """A value of the quantity for a table: shares in percent with one decimal, others to three digits.

    >>> shown(Quantity("peak", "validation/success"), 0.2617), shown(Quantity("last", "information/mi_seq"), 1.2345, signed=True)
    ('26.2', '+1.23')
    """
    sign = "+" if signed else ""
    number = 100 * value if quantity.is_share else value
    text = f"{number:{sign}.1f}" if quantity.is_share else f"{number:{sign}.3g}"
    return "0.0" if text in ("-0.0", "+0.0") and quantity.is_share else text


def estimate_words(estimate: Estimate, quantity: Quantity | None, *, signed: bool = False) -> str:
    """Such as "+9.6 [+3.1, +16.1], n = 3 paired". Seeds that all agree have no interval: they share their prompts' noise."""

    def one(value: float) -> str:
        return shown(quantity, value, signed=signed) if quantity else f"{value:{'+' if signed else ''}.2f}"

    agree = estimate.has_interval and estimate.error == 0
    interval = f" [{one(estimate.low)}, {one(estimate.high)}]" if estimate.has_interval and not agree else ""
    how = "" if estimate.how in ("seeds", "bootstrap") else f" {estimate.how}"
    return f"{one(estimate.value)}{interval}, n = {estimate.num}{how}{', all equal' * agree}"


def _mean(curve: Curve, _: Curves, planned: int) -> float:
    steps = sorted(curve)
    area = math.fsum((after - before) * (curve[before] + curve[after]) / 2 for before, after in pairwise(steps))
    end = max(planned, steps[-1])
    area += (end - steps[-1]) * curve[steps[-1]]
    return area / (end - steps[0]) if end > steps[0] else curve[steps[0]]


def _last(curve: Curve, _: Curves, planned: int) -> float:
    late = [value for step, value in curve.items() if 3 * step >= 2 * planned]
    return math.fsum(late) / len(late) if late else curve[max(curve)]


def _trend(curve: Curve, _: Curves, __: int) -> float | None:
    return spearman(list(curve), list(curve.values())) if len(curve) > 1 else None


def _at_peak(curve: Curve, curves: Curves, _: int) -> float | None:
    success = curves.get(SUCCESS)
    if not success:
        return None
    peak = max(success, key=lambda step: (success[step], -step))
    return curve[min(curve, key=lambda step: (abs(step - peak), step))]


WINDOWS: dict[str, Callable[[Curve, Curves, int], float | None]] = {
    "start": lambda curve, _, __: curve[min(curve)],
    "peak": lambda curve, _, __: max(curve.values()),
    "lowest": lambda curve, _, __: min(curve.values()),
    "mean": _mean,
    "last": _last,
    "change": lambda curve, curves, planned: _last(curve, curves, planned) - curve[min(curve)],
    "trend": _trend,
    "at_peak": _at_peak,
}
