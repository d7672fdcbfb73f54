"""The gradients of a run taken apart by reward variance: the paper's figure 3, from the records of a run.

Prompts are sorted by the variance of their rewards into buckets, 1 the lowest. Task and regulariser gradients are drawn on one logarithmic
axis, because they may lie orders of magnitude apart; what is zero (the task gradient where all rewards are equal), or so small that it is
rounding, stands on a floor labelled 0. The first and the last decomposition share their axes, so that they compare.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tether.core.config import merge
from tether.runs.figures import MUTED, Chart, dress, mixed, pushed_apart
from tether.runs.panels import BLUE, ORANGE, WORDS
from tether.runs.schema import StepRecord

_METRIC = re.compile(r"gradients/(?P<name>[a-z_]+)_(?P<bucket>\d+)")
BROKEN = "gradients/bound_broken"
DOMINATED = 0.5
"""Above this share the regularisers are the larger part of a bucket's gradient."""
SMALLEST = 1e-6
"""Norms below this part of the largest one are drawn as zero: a KL gradient at the reference itself is nothing but rounding."""
_NORMS = (("task_norm", "task", BLUE), ("regulariser_norm", "regularisers", ORANGE))


@dataclass(frozen=True, slots=True)
class BucketRow:
    """One bucket of prompts; a value that could not be measured is not among them."""

    number: int
    values: dict[str, float]
    """Metric without section and bucket to value, such as {"task_norm": 0.08}."""


@dataclass(frozen=True, slots=True)
class Decomposition:
    """The gradients of one step, by bucket, lowest reward variance first."""

    step: int
    buckets: tuple[BucketRow, ...]
    bound_broken: int | None
    """Buckets in which the Cauchy-Schwarz bound does not hold; None where it was not checked."""


def decompositions(records: Sequence[StepRecord]) -> list[Decomposition]:
    """Every decomposition on record, in order of the steps."""
    found = []
    for record in records:
        values: dict[int, dict[str, float]] = {}
        for metric, value in record.metrics.items():
            if parts := _METRIC.fullmatch(metric):
                values.setdefault(int(parts["bucket"]), {})[parts["name"]] = value
        if values:
            broken = record.metrics.get(BROKEN)
            buckets = tuple(BucketRow(number, values[number]) for number in sorted(values))
            found.append(Decomposition(record.step, buckets, None if broken is None else round(broken)))
    return found


_SHARES: dict[str, list[str]] = WORDS["gradients"]["shares"]
"""The charts of one number by bucket: metric to title and how to read it."""
GRADIENTS = ("norms_first", "norms_last", *_SHARES)
"""The names of the charts."""
COLUMNS: dict[str, str] = WORDS["gradients"]["columns"]
"""Of the table: metric to title."""


def gradient_chart(name: str, found: Sequence[Decomposition], first: int | None = None, last: int | None = None, run: str = "") -> Chart:
    """One chart of the gradients by reward variance, at two steps that share their axes: the first and the last by default."""
    needs = "Not recorded: the gradients by reward variance. Set diagnosis.gradients.every to decompose them."
    if not found:
        return Chart(name, "", "", None, needs)
    by_step = {each.step: each for each in found}
    start = by_step.get(first, found[0]) if first is not None else found[0]
    end = by_step.get(last, found[-1]) if last is not None else found[-1]
    compared = [start] if start.step == end.step else [start, end]
    key = f"gradients-{name}-{run}"
    if name.startswith("norms"):
        shown = compared[0] if name == "norms_first" else compared[-1]
        return Chart(key, f"Gradient norms at step {shown.step}", WORDS["gradients"]["norms"], norm_figure(shown, compared))
    title, reading = _SHARES[name]
    return Chart(key, title, reading, share_figure(name, compared, percent=name == "dominance"), f"Not recorded: gradients/{name}_1, ...")


def norm_figure(shown: Decomposition, beside: Sequence[Decomposition]) -> go.Figure:
    """Gradient norms by bucket. `beside` are the decompositions it shares its axis with, itself included."""
    norms = [bucket.values[name] for each in beside for bucket in each.buckets for name, *_ in _NORMS if name in bucket.values]
    smallest = SMALLEST * max(norms, default=0.0)
    drawn = [norm for norm in norms if norm > smallest] or [1.0]
    decades = range(math.floor(math.log10(min(drawn))), math.ceil(math.log10(max(drawn))) + 1)
    floor = decades[0] - 1
    bottom, top = floor - 0.2, decades[-1] + 0.2
    figure = go.Figure()
    ends: list[tuple[float, str, str]] = []
    for name, label, colour in _NORMS:
        held = [bucket for bucket in shown.buckets if name in bucket.values]
        if not held:
            continue
        values = [bucket.values[name] for bucket in held]
        heights = [value if value > smallest else 10.0**floor for value in values]
        figure.add_trace(
            go.Scatter(
                x=[f"{bucket.number}<br>{_plain(bucket.values.get('rv_mean'))}" for bucket in held], y=heights, customdata=values, mode="lines+markers", name=label,
                line={"color": colour, "width": 2.2},
                marker={"size": 8, "color": colour, "symbol": ["circle" if value > smallest else "circle-open" for value in values]},
                hovertemplate=f"{label} %{{customdata:.3~g}}<extra></extra>",
            )
        )  # fmt: skip
        ends.append(((math.log10(heights[-1]) - bottom) / (top - bottom), label, colour))
    ticks = {
        "tickvals": [10.0**floor, *(10.0**decade for decade in decades)],
        "ticktext": ["0", *(f"{10.0**decade:g}" for decade in decades)],
    }
    _dress_buckets(figure, "bucket, reward variance", yaxis={"type": "log", "range": [bottom, top], **ticks})
    ends.sort()
    for height, (_, label, colour) in zip(pushed_apart([end[0] for end in ends]), ends, strict=True):
        figure.add_annotation(
            x=1.012, xref="paper", y=height, yref="paper", text=label, showarrow=False, xanchor="left", yanchor="middle",
            font={"color": colour, "size": 12},
        )  # fmt: skip
    return figure


def share_figure(metric: str, compared: Sequence[Decomposition], percent: bool) -> go.Figure | None:
    """One number by bucket, pale for the first decomposition and full for the last; None where no bucket holds it."""
    if not any(metric in bucket.values for each in compared for bucket in each.buckets):
        return None
    figure = go.Figure()
    for place, each in enumerate(compared):
        held = [bucket for bucket in each.buckets if metric in bucket.values]
        colour = BLUE if place == len(compared) - 1 else mixed(BLUE, "#ffffff", 0.6)
        value = "%{y:.1%}" if percent else "%{y:.3~g}"
        figure.add_trace(
            go.Bar(
                x=[str(bucket.number) for bucket in held],  # the buckets of another step have other reward variances
                y=[bucket.values[metric] for bucket in held],
                name=f"step {each.step}",
                marker={"color": colour},
                hovertemplate=f"step {each.step}: {value}<extra></extra>",
            )
        )
    ticks = {"range": [0, 1.04], "tickformat": ".0%", "dtick": 0.25} if percent else {"tickformat": "~g"}
    _dress_buckets(
        figure,
        "bucket",
        barmode="group",
        bargap=0.35,
        showlegend=len(compared) > 1,
        margin={"r": 20},
        legend={"orientation": "h", "y": 1.12, "x": 0, "font": {"size": 12, "color": MUTED}},
        yaxis={"rangemode": "tozero", "nticks": 5, **ticks},
    )
    return figure


def reading(found: Decomposition) -> str:
    """What a decomposition says, in numbers: the two gradients from the lowest to the highest variance, who dominates, and the bound."""
    lowest, highest = found.buckets[0], found.buckets[-1]
    words = [f"From the prompts of least reward variance to those of most ({_both('rv_mean', lowest, highest)}),"]
    words.append(f"the norm of the task gradient goes from {_both('task_norm', lowest, highest)},")
    words.append(f"that of the regularisers from {_both('regulariser_norm', lowest, highest)}.")
    dominated = [str(bucket.number) for bucket in found.buckets if bucket.values.get("dominance", 0.0) > DOMINATED]
    if dominated:
        among = f"bucket {dominated[0]}" if len(dominated) == 1 else f"buckets {', '.join(dominated)}"
        words.append(f"The regularisers are the larger part in {among}: updates on these prompts push towards text that ignores the input.")
    else:
        words.append("The task gradient is the larger part in every bucket.")
    if found.bound_broken is not None:
        holds = (
            "holds in every bucket" if not found.bound_broken else f"is broken in {found.bound_broken} of {len(found.buckets)}: a defect"
        )
        words.append(f"The Cauchy–Schwarz bound {holds}.")
    return " ".join(words)


def table(found: Decomposition) -> list[list[str]]:
    """A row per bucket: its number, then the values of COLUMNS; a dash where one could not be measured."""
    return [[str(bucket.number), *(_plain(bucket.values.get(name)) for name in COLUMNS)] for bucket in found.buckets]


def _both(name: str, lowest: BucketRow, highest: BucketRow) -> str:
    return f"{_plain(lowest.values.get(name))} to {_plain(highest.values.get(name))}"


def _plain(value: float | None) -> str:
    return "—" if value is None else f"{value:.3g}".replace("-", "−")


def _dress_buckets(figure: go.Figure, title: str, **own: Any) -> None:
    common = {"height": 270, "margin": {"r": 86, "b": 56}, "xaxis": {"type": "category", "title": {"text": title}}}
    dress(figure, **merge(common, own))
