"""Plotly figures of one run or of several: the small curves and the regime plane.

One look for all: white ground, hairline grid, the system's font, lines labelled at their end instead of by a legend (one run) or
coloured by run (several; the page shows the key once). The steps at which an alarm stood are shaded in the curves that draw its evidence.
Every function takes runs by name and returns None where the runs hold nothing to draw, so that the caller can say so instead of showing
an empty chart.
"""

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from tether.core.config import merge
from tether.core.enums import REGIME_FRACTION, Regime
from tether.core.evidence import recorded_evidence
from tether.core.shares import percent as as_percent
from tether.runs.alarms import alarm_history
from tether.runs.panels import Panel, Series, Style, drawn
from tether.runs.schema import StepRecord
from tether.runs.verdict import change_words

Runs = Mapping[str, Sequence[StepRecord]]

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e9edf1"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
RUN_COLOURS = ("#2b6cb0", "#c2622d", "#2f855a", "#805ad5", "#b7791f", "#b83280", "#2c7a7b", "#4a5568")
REGIME_TINTS = {
    Regime.DIVERSE: "#eaf5ee",
    Regime.TEMPLATE_COLLAPSE: "#fbeceb",
    Regime.COMPRESSED: "#eaf1f9",
    Regime.LOW_ENTROPY_COLLAPSE: "#f0f1f3",
}
_PALEST = 0.75
"""How far the first point of a path is mixed with white."""
_LABEL_GAP = 0.085
"""Least distance of two end-of-line labels, as a share of the axis."""
_CROWDED = 30
"""More measurements than this are drawn as a plain line, without a dot each."""
ALARM_COLOURS = {"critical": "#c53030", "warning": "#c77700"}


_SCOPES = {
    "trajectory": "purple, of one turn drawn from each trajectory",
    "turn": "teal, of turns drawn from all trajectories",
}
"""Label of a line of another scope to what it is."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with how to read it: what the report, the audit and the dashboard show; `figure` is None where nothing was recorded."""

    key: str
    """Unique on its page."""
    title: str
    reading: str
    figure: go.Figure | None
    needs: str = ""
    """What was not recorded, in a sentence, for where there is no figure."""

    def to_json(self) -> str:
        """For the browser, with what there is to say."""
        figure = "null" if self.figure is None else self.figure.to_json(validate=False)
        return f'{{"figure": {figure}, "reading": {json.dumps(self.reading if self.figure is not None else self.needs)}}}'


def panel_chart(panel: Panel, runs: Runs, colours: Mapping[str, str] | None = None) -> Chart:
    """The chart of a panel: how to read it, which of its lines are there if some are not, what dashed lines are, and the change on a fixed probe."""
    shown = drawn(panel, list(runs.values()))
    words, usual = [panel.reading], [series.label for series in shown if not series.beside]
    if shown and len(usual) < sum(not series.beside for series in panel.series):
        words.append(f"Drawn here: {', '.join(usual)}.")
    if scopes := [_SCOPES[series.label] for series in shown if series.label in _SCOPES]:
        words.append(f"Dashed: the same, {' and '.join(scopes)}.")
    if len(runs) == 1 and (change := change_words(next(iter(runs.values())), panel.series[0].metric)):
        words.append(f"{change[0].upper()}{change[1:]}.")
    needs = f"Not recorded: {', '.join(series.metric for series in panel.series if not series.beside)}."
    return Chart(panel.key, panel.title, " ".join(words), curve(panel, runs, colours) if runs else None, needs)


def plane_chart(runs: Runs, colours: Mapping[str, str] | None = None) -> Chart:
    """The regime plane."""
    reading = (
        "Each dot is one measurement, divided by the run's first: right is more variety within a prompt, up is more dependence on the "
        f"prompt. The path starts at the hollow dot and darkens with the steps; an axis counts as low below {as_percent(REGIME_FRACTION)} "
        "of its start. A point is one of collapse only if the verdict says so too."
    )
    measured = any("information/mi_seq" in record.metrics for records in runs.values() for record in records)
    needs = (
        "The first measurement found no information above zero, or all were on too few prompts for a verdict, so there is no start to compare with."
        if measured
        else "Not recorded: no step measured information."
    )
    return Chart("plane", "The regime plane", reading, regime_plane(runs, colours) if runs else None, needs)


def run_colours(names: Sequence[str]) -> dict[str, str]:
    """The colour of each run, the same in every chart and in the key of the page."""
    return dict(zip(names, RUN_COLOURS, strict=False))


def curve(panel: Panel, runs: Runs, colours: Mapping[str, str] | None = None) -> go.Figure | None:
    """One small chart over the steps; None if no run holds any of its series. `colours` are those of the runs, by default in their order."""
    shown = drawn(panel, list(runs.values()))
    if not shown:
        return None
    figure = go.Figure()
    several = len(runs) > 1
    colours = colours or run_colours(list(runs))
    for name, records in runs.items():
        for series in shown:
            steps, values = series.points(records)
            if not steps:
                continue
            colour = colours[name] if several and series.style is not Style.REFERENCE else series.colour
            label = html.escape(name) if several else series.label
            if several and series.style is Style.REFERENCE:
                label += f" ({series.label})"
            if series.band:
                _add_band(figure, series.band, records, colour)
            figure.add_trace(_line(series, steps, values, colour, label, panel.percent))
    low, high = _value_range(panel, shown, runs)
    ticks = {"tickformat": ".0%", "dtick": 0.25} if panel.percent else {"tickformat": "~g"}
    # The same x axis in every chart, so that they compare down the page.
    recorded = [record.step for records in runs.values() for record in records]
    first, last = min(recorded), max(recorded)
    room = 0.02 * (last - first) or 0.5
    few = {"dtick": 1} if last - first + 2 * room < 8 else {}  # left alone, plotly would put ticks between the steps
    dress(
        figure,
        margin={"r": 20 if several else 86},
        xaxis={"title": {"text": "step"}, "range": [first - room, last + room], **few},
        yaxis={"range": [low, high], "nticks": 5, **ticks},
    )
    if not several:
        _mark_alarms(figure, shown, next(iter(runs.values())), (low, high))
        _label_ends(figure, shown, next(iter(runs.values())), (low, high), panel.percent)
    return figure


def regime_plane(runs: Runs, colours: Mapping[str, str] | None = None) -> go.Figure | None:
    """Each run's path over H(Z|X) and MI-Seq-Est, both relative to the run's own start; a path goes from pale to full colour.

    None if no run has a start to be relative to: no information metrics, or none above zero at the first measurement.
    """
    paths = {name: path for name, records in runs.items() if (path := _relative_path(records))}
    if not paths:
        return None
    right = max(1.6 if len(runs) > 1 else 1.45, 1.12 * max(x for path in paths.values() for x in path["x"]))
    top = max(1.45, 1.12 * max(y for path in paths.values() for y in path["y"]))
    bottom = min(0.0, 1.1 * min(y for path in paths.values() for y in path["y"]))
    figure = go.Figure()
    axis = {"tickformat": "~g", "showgrid": False, "nticks": 6}
    dress(
        figure,
        height=440,
        hovermode="closest",
        xaxis={"title": {"text": "H(Z|X), times its start"}, "range": [0, right], **axis},
        yaxis={"title": {"text": "MI, times its start"}, "range": [bottom, top], **axis},
    )
    _shade_quadrants(figure, (bottom, right, top))
    colours = colours or run_colours(list(runs))
    for name, path in paths.items():
        _add_path(figure, path, colours[name], html.escape(name), several=len(runs) > 1)
    return figure


def _line(series: Series, steps: list[int], values: list[float], colour: str, label: str, percent: bool) -> go.Scatter:
    """One series as a plotly trace. A lone point is drawn as a dot: a line through it would be invisible."""
    value = "%{y:.1%}" if percent else "%{y:.4~g}"
    look: dict[str, Any] = {"x": steps, "y": values, "name": label, "hovertemplate": f"{label} {value}<extra></extra>"}
    if series.style is Style.SHARE:
        return go.Scatter(**look, mode="lines", line={"width": 0}, stackgroup="shares", fillcolor=colour)
    sparse = len(steps) <= 2 or (series.band is not None and len(steps) <= _CROWDED)
    width = {Style.MAIN: 2.2, Style.LIGHT: 1.6, Style.REFERENCE: 1.3}[series.style]
    dash = "dash" if series.style is Style.REFERENCE or series.beside else "solid"
    mode = "lines+markers" if sparse and series.style is not Style.REFERENCE else "lines"
    return go.Scatter(**look, mode=mode, line={"color": colour, "width": width, "dash": dash}, marker={"size": 5, "color": colour})


def _add_band(figure: go.Figure, band: tuple[str, str], records: Sequence[StepRecord], colour: str) -> None:
    """The shaded interval around a series, below its line."""
    held = [record for record in records if band[0] in record.metrics and band[1] in record.metrics]
    if not held:
        return
    steps = [record.step for record in held]
    outline = [record.metrics[band[1]] for record in held] + [record.metrics[band[0]] for record in reversed(held)]
    figure.add_trace(
        go.Scatter(
            x=steps + steps[::-1], y=outline, fill="toself", fillcolor=f"{colour}22", line={"width": 0}, mode="lines", hoverinfo="skip"
        )
    )


def _mark_alarms(figure: go.Figure, shown: Sequence[Series], records: Sequence[StepRecord], value_range: tuple[float, float]) -> None:
    """Shade the steps at which an alarm stood whose evidence this chart draws, and name it on hovering over the strip at the top."""
    drawn_metrics = {series.metric for series in shown}
    low, high = value_range
    telling = [alarm for alarm in alarm_history(records) if drawn_metrics & alarm.metrics]
    shapes = []
    for row, alarm in enumerate(telling):
        shapes += [
            {
                "type": "rect", "xref": "x", "x0": span.first - 0.5, "x1": span.last + 0.5, "yref": "y domain", "y0": 0, "y1": 1,
                "fillcolor": ALARM_COLOURS.get(span.severity, MUTED), "opacity": 0.07, "line": {"width": 0}, "layer": "below",
            }
            for span in alarm.spans
        ]  # fmt: skip
        stood = [(record.step, span.severity) for span in alarm.spans for record in records if span.first <= record.step <= span.last]
        colours = [ALARM_COLOURS.get(severity, MUTED) for _, severity in stood]
        figure.add_trace(
            go.Scatter(
                x=[step for step, _ in stood], y=[high - (0.02 + 0.045 * row) * (high - low)] * len(stood), mode="markers", name=alarm.title,
                marker={"symbol": "square", "size": 5, "color": colours}, customdata=[severity for _, severity in stood],
                hovertemplate=f"{html.escape(alarm.title)} (%{{customdata}})<extra></extra>",
            )
        )  # fmt: skip
    figure.update_layout(shapes=shapes)  # all at once: plotly's add_vrect takes milliseconds each, and a long run has many spans


def _value_range(panel: Panel, shown: Sequence[Series], runs: Runs) -> tuple[float, float]:
    """The y axis: always from zero (or below it), so that heights compare."""
    if panel.percent:
        return -0.02, 1.04
    values = [value for records in runs.values() for series in shown for value in series.points(records)[1]]
    ends = [end for series in shown for end in series.band or ()]
    values += [record.metrics[end] for records in runs.values() for record in records for end in ends if end in record.metrics]
    low, high = min(0.0, *values), max(0.0, *values)
    room = 0.1 * (high - low) or 1.0
    return low - (room if low < 0 else 0.02 * room), high + room


def _label_ends(
    figure: go.Figure, shown: Sequence[Series], records: Sequence[StepRecord], value_range: tuple[float, float], percent: bool
) -> None:
    """Write each series' name in its colour beside its last value, pushed apart where they would overlap."""
    low, high = value_range
    places: list[tuple[float, Series]] = []
    stacked = 0.0
    for series in shown:
        last = series.points(records)[1][-1]
        if series.style is Style.SHARE:
            places.append((stacked + last / 2, series))
            stacked += last
        else:
            places.append((last, series))
    # A layer that is everywhere thinner than its label has no room for it; hovering still names it.
    thin = _LABEL_GAP / 2 * (high - low)
    places = [(y, series) for y, series in places if series.style is not Style.SHARE or max(series.points(records)[1]) > thin]
    places.sort(key=lambda place: place[0])
    heights = pushed_apart([(y - low) / (high - low) for y, _ in places])
    for height, (_, series) in zip(heights, places, strict=True):
        colour = mixed(series.colour, INK, 0.55 if series.style is Style.SHARE else 0.25)
        # A line on its own is named by the title already; its last value says more.
        text = _shown(series.points(records)[1][-1], percent) if len(shown) == 1 else series.label
        figure.add_annotation(
            x=1.012, xref="paper", y=height, yref="paper", text=text, showarrow=False, xanchor="left",
            yanchor="middle", font={"color": colour, "size": 12},
        )  # fmt: skip


def _shown(value: float, percent: bool) -> str:
    return f"{value:.0%}" if percent else f"{value:.3g}"


def pushed_apart(heights: list[float]) -> list[float]:
    """Ascending heights in [0, 1], moved as little as a single sweep up and one back down allow to lie _LABEL_GAP apart."""
    apart = list(heights)
    for index in range(1, len(apart)):
        apart[index] = max(apart[index], apart[index - 1] + _LABEL_GAP)
    ceiling = 0.98
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], ceiling)
        ceiling = apart[index] - _LABEL_GAP
    return apart


def _relative_path(records: Sequence[StepRecord]) -> dict[str, list[float]] | None:
    """The run's measurements on the plane, divided by the first one; those on too few prompts for a verdict have no place on it."""
    held = [record for record in records if {"information/h_conditional", "information/mi_seq"} <= record.metrics.keys()]
    held = [record for record in held if (found := recorded_evidence(record.metrics)) is None or found.is_sufficient]
    if not held:
        return None
    h_start, mi_start = held[0].metrics["information/h_conditional"], held[0].metrics["information/mi_seq"]
    if h_start <= 0 or mi_start <= 0:
        return None
    h = [record.metrics["information/h_conditional"] for record in held]
    mi = [record.metrics["information/mi_seq"] for record in held]
    steps = [float(record.step) for record in held]
    return {"x": [value / h_start for value in h], "y": [value / mi_start for value in mi], "h": h, "mi": mi, "step": steps}


def _shade_quadrants(figure: go.Figure, edges: tuple[float, float, float]) -> None:
    """Tint and name the four regimes, each name in the upper outer corner of its quadrant: a path that collapses ends at the bottom."""
    bottom, right, top = edges
    low = REGIME_FRACTION
    quadrants = {
        Regime.COMPRESSED: (0.0, low, low, top),
        Regime.DIVERSE: (low, right, low, top),
        Regime.LOW_ENTROPY_COLLAPSE: (0.0, low, bottom, low),
        Regime.TEMPLATE_COLLAPSE: (low, right, bottom, low),
    }
    for regime, (x0, x1, y0, y1) in quadrants.items():
        tint = REGIME_TINTS[regime]
        figure.add_shape(type="rect", x0=x0, x1=x1, y0=y0, y1=y1, fillcolor=tint, line={"color": "white", "width": 2}, layer="below")
        outer_right = x1 == right
        figure.add_annotation(
            x=x1 if outer_right else x0, y=y1, text=regime.value.replace(" ", "<br>", 1), showarrow=False,
            xanchor="right" if outer_right else "left", yanchor="top", xshift=-8 if outer_right else 8,
            yshift=-6, align="right" if outer_right else "left", font={"color": mixed(tint, INK, 0.62), "size": 13},
        )  # fmt: skip


def _add_path(figure: go.Figure, path: dict[str, list[float]], colour: str, name: str, several: bool) -> None:
    """A thin line through dots that darken with the steps; hollow at the start, a large solid dot at the end."""
    count = len(path["x"])
    shades = [mixed(colour, "#ffffff", _PALEST * (1 - index / max(1, count - 1))) for index in range(count)]
    sizes, symbols = [7] * count, ["circle"] * count
    sizes[-1], shades[-1] = 14, colour
    sizes[0], shades[0], symbols[0] = 13, colour, "circle-open"
    figure.add_trace(
        go.Scatter(
            x=path["x"], y=path["y"], mode="lines+markers", name=name,
            customdata=list(zip(path["step"], path["h"], path["mi"], strict=True)),
            line={"color": mixed(colour, "#ffffff", 0.6), "width": 1.4}, cliponaxis=False,
            marker={"color": shades, "size": sizes, "symbol": symbols, "opacity": 1, "line": {"width": 2, "color": shades}},
            hovertemplate=f"{name}, step %{{customdata[0]}}<br>H(Z|X) %{{customdata[1]:.3f}} (%{{x:.2f}}×)"
            "<br>MI %{customdata[2]:.3f} (%{y:.2f}×)<extra></extra>",
        )
    )  # fmt: skip
    ends = [(0, "start")] if count == 1 else [(0, "start"), (count - 1, f"step {path['step'][-1]:.0f}")]
    for index, words in ends:
        if several and index == 0:
            continue
        # On the side away from where the path came from, so that the label does not lie on it.
        leftward = index > 0 and path["x"][index] < path["x"][0]
        figure.add_annotation(
            x=path["x"][index], y=path["y"][index], text=name if several else words, showarrow=False,
            xanchor="right" if leftward else "left", xshift=-12 if leftward else 12, font={"color": colour, "size": 12},
        )  # fmt: skip


LOOK: dict[str, Any] = {
    "template": "none", "height": 250, "showlegend": False, "hovermode": "x unified", "paper_bgcolor": "rgba(0,0,0,0)", "plot_bgcolor": "rgba(0,0,0,0)",
    "margin": {"l": 46, "r": 20, "t": 10, "b": 40}, "font": {"family": FONT, "size": 12, "color": MUTED},
    "hoverlabel": {"bgcolor": "white", "bordercolor": "#cbd2d9", "font": {"family": FONT, "size": 12, "color": INK}, "namelength": -1},
    "dragmode": False,
    "xaxis": {
        "showgrid": False, "zeroline": False, "linecolor": "#cbd2d9", "ticks": "outside", "tickcolor": "#cbd2d9", "ticklen": 4, "nticks": 7,
        "title": {"standoff": 6, "font": {"size": 12}},
    },
    "yaxis": {"gridcolor": GRID, "zeroline": False, "linewidth": 0, "title": {"standoff": 8, "font": {"size": 12}}},
}  # fmt: skip
"""What all charts have in common."""


def dress(figure: go.Figure, **own: Any) -> None:
    """The layout of a figure, whole: its own on top of the common look. Plotly takes a sixth of the time for it that updates one by one take, which
    were half of a report. Annotations and shapes come afterwards."""
    figure.layout = merge(LOOK, own)


def mixed(colour: str, other: str, share: float) -> str:
    """`colour` with a share of `other` mixed in, both as #rrggbb."""
    channels = [round(int(colour[i : i + 2], 16) * (1 - share) + int(other[i : i + 2], 16) * share) for i in (1, 3, 5)]
    return "#" + "".join(f"{channel:02x}" for channel in channels)
