"""The charts of the dashboard as data: the figures of the report, made for whatever runs a page shows.

A chart is asked for by name, and answered as the JSON of a plotly figure with its reading. Figures are kept until the files they are drawn from
change: making one takes tens of milliseconds, and a page holds a dozen.

Seeds of the same settings can be drawn as one curve: the mean at every step over the seeds that have recorded the metric there, with Student's
95% interval of that mean, drawn where more than half of the seeds that ever recorded it have; so a curve does not jump when one of five runs is
further than the others. Pooled numbers take the form of step records, so the charts of a report draw them like any run; the ends of the
interval are metrics of their own, `<metric> low` and `<metric> high`.
"""

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tether.core.config import flattened
from tether.core.errors import BadInput, did_you_mean
from tether.core.intervals import mean_interval
from tether.runs.dashboard.catalogue import LiveRun, Stamp, file_stamp
from tether.runs.dashboard.episodes import step_groups
from tether.runs.figures import RUN_COLOURS, Chart, dress, panel_chart, plane_chart
from tether.runs.gradient_buckets import GRADIENTS, decompositions, gradient_chart
from tether.runs.index import TRAJECTORIES
from tether.runs.panels import BLUE, COST, FAIL, SECTIONS, Panel, Section, Style
from tether.runs.schema import StepRecord
from tether.runs.store import METRICS, TIMINGS
from tether.runs.timings import as_records

PAGE_SECTIONS: tuple[Section, ...] = (*SECTIONS, COST)
PANELS = {panel.key: panel for section in PAGE_SECTIONS for panel in section.panels}
_COST_KEYS = frozenset(panel.key for panel in COST.panels)
PLANE, GROUPS = "plane", "step_groups"
NOT_SETTINGS = ("seed", "tags")
"""Runs that differ in these alone are repetitions of one another."""
READING = "The mean over seeds of the same settings, with Student's 95% interval of that mean; a run without other seeds has no band here."
MOST_LINES = len(RUN_COLOURS)
MOST_TICKS = 96
"""Groups that are all named on their axis."""
MOST_KEPT = 512
"""Charts that are kept, a few to a hundred kilobytes each."""


@dataclass(frozen=True, slots=True)
class Lines:
    """What the curves of several runs are drawn from: a name and the runs under it, several where they are seeds."""

    groups: dict[str, list[LiveRun]]
    num_left_out: int

    @property
    def has_seeds(self) -> bool:
        return any(len(runs) > 1 for runs in self.groups.values())


def lines_of(runs: Sequence[LiveRun], *, pool: bool) -> Lines:
    """One line for each run, or with `pool` for each group of seeds; at most as many as there are colours."""
    groups = seed_groups(runs) if pool else [[run] for run in runs]
    named: dict[str, list[LiveRun]] = {}
    for group in groups[:MOST_LINES]:
        name = group_name(group)
        named[name if name not in named else f"{name} · {len(named)}"] = group
    return Lines(named, max(0, len(groups) - MOST_LINES))


def colours_of(lines: Lines, places: Mapping[str, int]) -> dict[str, int]:
    """The number of each line's colour. A run keeps its colour on every page, as long as no other line of the page has it.

    Args:
        places: of all runs; a line of several seeds goes by its first.
    """
    found: dict[str, int] = {}
    for name, runs in sorted(lines.groups.items(), key=lambda item: places.get(item[1][0].name, 0)):
        place = places.get(runs[0].name, 0) % MOST_LINES
        found[name] = next((place + step) % MOST_LINES for step in range(MOST_LINES) if (place + step) % MOST_LINES not in found.values())
    return found


class Charts:
    """Makes charts and keeps the latest of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[tuple[Stamp, ...], str]] = OrderedDict()
        self._guard = threading.Lock()

    def get(
        self,
        name: str,
        runs: Sequence[LiveRun],
        *,
        pool: bool = False,
        step: int | None = None,
        beside: int | None = None,
        colours: Mapping[str, int] | None = None,
    ) -> str:
        """The JSON of one chart. `step` and `beside` are for the charts of a step: groups, and the two decompositions to compare."""
        known = [*PANELS, PLANE, GROUPS, *GRADIENTS]
        if name not in known:
            raise BadInput(f"unknown chart '{name}': {did_you_mean(name, known)}")
        if not runs:
            return Chart(name, "", "", None, "No runs are chosen.").to_json()
        file = TRAJECTORIES if name == GROUPS else TIMINGS if name in _COST_KEYS else METRICS
        stamps = tuple(file_stamp(run.folder / file) for run in runs)
        tints = {line: RUN_COLOURS[number] for line, number in (colours or {}).items()}
        key = (name, tuple(run.name for run in runs), pool, step, beside, tuple(tints.items()))
        with self._guard:
            kept = self._kept.get(key)
            if kept is not None and kept[0] == stamps:
                self._kept.move_to_end(key)
                return kept[1]
        if name == GROUPS:
            made = _groups_chart(runs[0], step).to_json()
        elif name in GRADIENTS:
            made = gradient_chart(name, decompositions(runs[0].records()), beside, step).to_json()
        else:
            made = _curves(name, lines_of(runs, pool=pool), tints).to_json()
        with self._guard:
            self._kept[key] = (stamps, made)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return made


def _curves(name: str, lines: Lines, tints: Mapping[str, str]) -> Chart:
    """A chart of steps."""
    panel = PANELS.get(name)
    share = shares(list(PANELS.values()))
    drawn: dict[str, Sequence[StepRecord]] = {}
    for line, runs in lines.groups.items():
        records = [as_records(run.timings()) if name in _COST_KEYS else run.records() for run in runs]
        drawn[line] = records[0] if len(records) == 1 else pooled(records, share=share)
    if panel is None:
        return plane_chart(drawn, tints)
    return panel_chart(over_seeds(panel) if lines.has_seeds else panel, drawn, tints)


def _groups_chart(run: LiveRun, step: int | None) -> Chart:
    groups = step_groups(run, step) if step is not None else []
    measured = [group for group in groups if group.reward_variance is not None]
    if not measured:
        return Chart(GROUPS, "", "", None, "No training episodes are on record for this step.")
    figure = go.Figure()
    for kept, label, colour in ((True, "kept", BLUE), (False, "dropped", FAIL)):
        held = [group for group in measured if group.kept is kept]
        numbers, heights = [str(group.number) for group in held], [group.reward_variance for group in held]
        hover = "group %{x}: %{y:.4~g}<extra></extra>"
        figure.add_trace(go.Bar(x=numbers, y=heights, name=label, marker={"color": colour}, hovertemplate=hover))
    few = {"tickmode": "linear", "dtick": 1} if len(measured) <= MOST_TICKS else {}
    categories = {"type": "category", "categoryorder": "array", "categoryarray": [str(group.number) for group in measured]}
    title, size = {"text": "group, most reward variance first"}, 11 if len(measured) <= 24 else 9
    dress(
        figure,
        barmode="overlay",
        bargap=0.25,
        hovermode="closest",
        showlegend=True,
        legend={"orientation": "h", "y": 1.14, "x": 0},
        xaxis={**categories, "title": title, "tickfont": {"size": size}, **few},
        yaxis={"rangemode": "tozero", "tickformat": "~g", "nticks": 5},
    )
    return Chart(GROUPS, "Reward variance by group", "Reward variance of each group of the step, and what the filter kept of them.", figure)


def differs_most(records: Mapping[str, Sequence[StepRecord]]) -> Panel | None:
    """The panel whose main line ends furthest apart between the runs, as a share of its axis; None where no panel has two lines."""

    def spread(panel: Panel) -> float:
        if panel.series[0].style is not Style.MAIN:
            return 0.0
        ends = [values[-1] for found in records.values() if (values := panel.series[0].points(found)[1])]
        scale = 1.0 if panel.percent else max(map(abs, ends), default=0.0)
        return (max(ends) - min(ends)) / scale if len(ends) > 1 and scale else 0.0

    found = max((panel for section in SECTIONS for panel in section.panels), key=spread)
    return found if spread(found) > 0 else None


# ------------------------------------------------------------------------------------------------------------------- seeds


def seed_groups(runs: Sequence[LiveRun]) -> list[list[LiveRun]]:
    """The runs in order, those that differ in nothing but the seed together."""
    groups: dict[str, list[LiveRun]] = {}
    for run in runs:
        kept = {name: value for name, value in flattened(run.config()).items() if name not in NOT_SETTINGS}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def group_name(runs: Sequence[LiveRun]) -> str:
    """What a group of seeds is called: its run, or what their names begin with and how many there are.

    The names of seeds mostly differ in their ends: `sokoban-seed0` and `sokoban-seed1` are `sokoban-seed* (2 seeds)`.
    """
    if len(runs) == 1:
        return runs[0].name
    names = [run.name for run in runs]
    common = 0
    while all(len(name) > common and name[common] == names[0][common] for name in names):
        common += 1
    return f"{names[0][:common]}* ({len(runs)} seeds)"


def pooled(seeds: Sequence[Sequence[StepRecord]], *, share: frozenset[str] = frozenset()) -> list[StepRecord]:
    """The mean of several runs, step by step, as records; intervals of the metrics in `share` stay between 0 and 1."""
    values: dict[int, dict[str, list[float]]] = {}
    recorded: dict[str, int] = {}
    for records in seeds:
        for metric in {metric for record in records for metric in record.metrics}:
            recorded[metric] = recorded.get(metric, 0) + 1
        for record in records:
            for metric, value in record.metrics.items():
                values.setdefault(record.step, {}).setdefault(metric, []).append(value)
    return [StepRecord(step, _summary(found, recorded, share)) for step, found in sorted(values.items())]


def _summary(found: dict[str, list[float]], recorded: dict[str, int], share: frozenset[str]) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for metric, values in found.items():
        if 2 * len(values) <= recorded[metric]:
            continue
        metrics[metric] = sum(values) / len(values)
        ends = mean_interval(values, (0.0, 1.0) if metric in share else None)
        if ends is not None:
            metrics[f"{metric} low"], metrics[f"{metric} high"] = ends
    return metrics


def over_seeds(panel: Panel) -> Panel:
    """A panel whose bands are intervals over seeds, not over the prompts of one run."""
    series = tuple(
        each
        if each.style in (Style.REFERENCE, Style.SHARE)
        else dataclasses.replace(each, band=(f"{each.metric} low", f"{each.metric} high"))
        for each in panel.series
    )
    return dataclasses.replace(panel, series=series, reading=READING)


def shares(panels: Sequence[Panel]) -> frozenset[str]:
    """The metrics that lie between 0 and 1, by the axes of their panels."""
    return frozenset(series.metric for panel in panels if panel.percent for series in panel.series)
