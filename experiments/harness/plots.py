"""The pictures of the experiments, by plotly: lines with bands, bars with intervals, dots; one row of panels that share the range of their values.

A README shows static pictures, which plotly writes with kaleido and a browser (`pip install kaleido`, and Chrome or Chromium). Without these the
tables are written and the pictures that are there stay. Text is grey on no ground, so it can be read on light and on dark pages.
"""

import importlib.util
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

from tether.runs.files import write_whole

COLOURS = (
    *("#3b82c4", "#d97a3a", "#3f9e6e", "#9a6fd0", "#c9a227", "#c75a94", "#3aa0a0", "#8a94a0", "#b0584f", "#6f8f3a", "#5d6fc0", "#a0765a"),
)
PANEL_WIDTH, HEIGHT, LEGEND_LINE = 300, 300, 20
_UID = re.compile(rb'id="(?:top)?defs-([0-9a-f]+)"')
"""A random name that plotly gives a figure, and all parts of it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A point with its interval. Example: Mark(25, 0.31, 0.27, 0.36)."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Series:
    """Marks of one name, drawn in one colour."""

    name: str
    marks: Sequence[Mark]


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart of the row."""

    title: str
    series: Sequence[Series]


def draw(title: str, panels: Sequence[Panel], *, kind: str, x_label: str, y_label: str) -> go.Figure:
    """The figure of some panels. `kind` is curves, bars or scatter."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    figure = make_subplots(1, len(panels), shared_yaxes=True, subplot_titles=[panel.title for panel in panels], horizontal_spacing=0.04)
    for column, panel in enumerate(panels, start=1):
        for series in panel.series:
            number = names.index(series.name)
            is_first = not any(trace.name == series.name for trace in figure.data)
            for trace in _traces(series, kind, number, COLOURS[number % len(COLOURS)]):
                shown = is_first and trace.name is not None
                figure.add_trace(
                    trace.update(showlegend=shown, uid=str(len(figure.data))), 1, column
                )  # plotly draws a name of its own otherwise
    width = 70 + PANEL_WIDTH * len(panels)
    lines = 1 + sum(60 + 7 * len(name) for name in names) // width
    figure.update_layout(
        template="none", title={"text": f"<b>{title}</b><br>{y_label}", "font": {"size": 13}, "x": 0.01, "y": 1, "yanchor": "top", "pad": {"t": 12}}, width=width,
        height=HEIGHT + LEGEND_LINE * lines, margin={"l": 50, "r": 10, "t": 76, "b": 60 + LEGEND_LINE * lines}, barmode="group", bargap=0.3,
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"size": 11, "color": "#7a828e"},
        legend={"orientation": "h", "x": 0, "y": -0.3, "yanchor": "top"},
    )  # fmt: skip
    figure.update_annotations(font_size=12)
    figure.update_yaxes(gridcolor="rgba(156,163,175,0.3)", zeroline=kind == "bars", zerolinecolor="#7a828e")
    figure.update_xaxes(
        showgrid=False, zeroline=False, linecolor="#7a828e", showticklabels=kind != "bars", title_text="" if kind == "bars" else x_label
    )
    return figure


def _traces(series: Series, kind: str, number: int, colour: str) -> list[go.Scatter | go.Bar]:
    """What one series draws; the one that the legend names has a name."""
    x, y = [mark.x for mark in series.marks], [mark.y for mark in series.marks]
    ends = [(mark.x, mark.low, mark.high) for mark in series.marks if mark.low is not None and mark.high is not None]
    if kind == "bars":
        mark = series.marks[0]
        error = None
        if mark.low is not None and mark.high is not None:
            error = {"array": [mark.high - mark.y], "arrayminus": [mark.y - mark.low], "thickness": 1, "color": "#7a828e"}
        return [go.Bar(x=[number], y=y, name=series.name, marker={"color": colour}, error_y=error)]
    if kind == "scatter":
        return [go.Scatter(x=x, y=y, name=series.name, mode="markers", marker={"color": colour, "size": 6, "opacity": 0.75})]
    across = [point for point, _, _ in ends]
    outline = [high for _, _, high in ends] + [low for _, low, _ in reversed(ends)]
    band = go.Scatter(x=across + across[::-1], y=outline, fill="toself", fillcolor=f"{colour}26", line={"width": 0}, mode="lines")
    return [*([band] if ends else []), go.Scatter(x=x, y=y, name=series.name, mode="lines", line={"color": colour, "width": 1.8})]


def can_write_pictures() -> bool:
    """Whether kaleido is installed. Figures that nobody can write need not be made: those of all experiments take seconds."""
    return importlib.util.find_spec("kaleido") is not None


def write_pictures(figures: Mapping[Path, go.Figure]) -> list[Path]:
    """Write the figures as SVG, by one browser, and return their paths. Equal figures give equal bytes."""
    if not figures:
        return []
    with tempfile.TemporaryDirectory() as folder:
        drafts = [Path(folder) / f"{number}.svg" for number in range(len(figures))]
        sizes = {side: [figure.layout[side] for figure in figures.values()] for side in ("width", "height")}
        pio.write_images(list(figures.values()), drafts, **sizes)
        for path, draft in zip(figures, drafts, strict=True):
            drawn = draft.read_bytes()
            found = _UID.search(drawn)
            write_whole(path, (drawn.replace(found[1], b"0") if found else drawn).decode() + "\n")
    return list(figures)
