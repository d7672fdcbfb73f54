"""Numbers of a run that claims and tables speak about: a window over the curve of a metric, such as "last information/mi_seq".

A curve maps steps to values. The windows are defined here once; experiments/README.md explains them in the same words:

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from tether.core.errors import BadInput, did_you_mean
from tether.core.metrics import CATALOGUE, is_catalogued
from tether.experiments.statistics import spearman

Curve = Mapping[int, float]
Curves = Mapping[str, Curve]

SUCCESS = "validation/success"

DERIVED: dict[str, str] = {
    "exploration/states": "distinct observations in the episodes of a prompt, mean over prompts",
    "exploration/states_trained": "distinct observations in the episodes that were trained on, a step",
    "exploration/answers": "distinct first answers to a prompt, mean over prompts",
    "exploration/solved_prompts": "share of the training prompts that some episode solved",
    "exploration/solved_ever": "share of the validation prompts that were solved in any evaluation so far",
    "variance/quantile_{q}": "quantile q (in percent) of the reward variance over the training prompts",
    "variance/with_reward": "Spearman's correlation of a prompt's reward variance with its mean reward, over the training prompts",
    "variance/with_length": "the same with the mean length of its responses, in tokens",
    "variance/with_entropy": "the same with the mean surprisal (- log p) of its sampled tokens",
}
"""Metrics that harvest computes from a run's trajectories."""

VARIANCE_QUANTILES = (10, 25, 50, 75, 90)

_SHARES = ("success", "format_valid", "retrieval_acc", "recall_", "kept_ratio", "all_fail", "mixed", "all_succeed", "solved_")


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

    def __str__(self) -> str:
        return f"{self.window} {self.metric}"


def is_measured(metric: str) -> bool:
    """Whether a run logs this metric, or harvest computes it."""
    return is_catalogued(metric) or metric in DERIVED or metric in {f"variance/quantile_{q}" for q in VARIANCE_QUANTILES}


def shown(quantity: Quantity, value: float, *, signed: bool = False) -> str:
    """A value of the quantity for a table: shares in percent with one decimal, others to three digits.

    >>> shown(Quantity("peak", "validation/success"), 0.2617), shown(Quantity("last", "information/mi_seq"), 1.2345, signed=True)
    ('26.2', '+1.23')
    """
    sign = "+" if signed else ""
    number = 100 * value if quantity.is_share else value
    text = f"{number:{sign}.1f}" if quantity.is_share else f"{number:{sign}.3g}"
    return "0.0" if text in ("-0.0", "+0.0") and quantity.is_share else text


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
