"""Small charts as SVG text: lines with bands, bars with intervals, dots. One row of panels, a legend below, readable on light and dark pages.

No library: GitHub shows the file as a picture, so it must be static, deterministic and a few kilobytes. Colours of text and grid follow the
reader's theme by a media query inside the file.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLOURS = (
    "#3b82c4",
    "#d97a3a",
    "#3f9e6e",
    "#9a6fd0",
    "#c9a227",
    "#c75a94",
    "#3aa0a0",
    "#8a94a0",
    "#b0584f",
    "#6f8f3a",
    "#5d6fc0",
    "#a0765a",
)
PANEL_WIDTH, PANEL_HEIGHT, LEFT, TOP, GAP, LEGEND_LINE = 250, 180, 46, 62, 58, 18
LETTER = 6.3
"""Width of a letter of the legend, about."""
_STYLE = """<style>
text { font: 11px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif; fill: #4b5563; }
.title { font-size: 13px; font-weight: 600; } .grid { stroke: #9ca3af; stroke-opacity: 0.3; } .axis { stroke: #6b7280; }
@media (prefers-color-scheme: dark) { text { fill: #c3cad3; } .axis { stroke: #9ca3af; } }
</style>"""


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


def draw(title: str, panels: Sequence[Panel], *, kind: str, x_label: str, y_label: str) -> str:
    """The picture of some panels, which share the range of their values. `kind` is curves, bars or scatter."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    ends = [value for panel in panels for series in panel.series for mark in series.marks for value in (mark.y, mark.low, mark.high)]
    low, high = _padded([value for value in ends if value is not None], from_zero=kind == "bars")
    width = LEFT + len(panels) * (PANEL_WIDTH + GAP)
    parts = [f'<text class="title" x="8" y="18">{html.escape(title)}</text>']
    for number, panel in enumerate(panels):
        parts += _panel(panel, LEFT + number * (PANEL_WIDTH + GAP), (low, high), colours, kind, x_label)
    parts.append(f'<text x="8" y="34">{html.escape(y_label)}</text>')
    legend, height = _legend(names, colours, width)
    body = "\n".join([*parts, *legend])
    return f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n{_STYLE}\n{body}\n</svg>\n'


def _panel(panel: Panel, left: float, bounds: tuple[float, float], colours: dict[str, str], kind: str, x_label: str) -> list[str]:
    low, high = bounds
    bottom = TOP + PANEL_HEIGHT
    marks = [mark for series in panel.series for mark in series.marks]
    first, last = _padded([mark.x for mark in marks], from_zero=False) if kind == "scatter" else _exact([mark.x for mark in marks])

    def at_x(value: float) -> float:
        return left + PANEL_WIDTH * (value - first) / (last - first)

    def at_y(value: float) -> float:
        return bottom - PANEL_HEIGHT * (min(max(value, low), high) - low) / (high - low)

    parts = [f'<text x="{left:.1f}" y="{TOP - 6}">{html.escape(panel.title)}</text>']
    for tick in ticks(low, high):
        parts.append(f'<line class="grid" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{at_y(tick):.1f}" y2="{at_y(tick):.1f}"/>')
        parts.append(f'<text x="{left - 4}" y="{at_y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts.append(f'<line class="axis" x1="{left}" x2="{left + PANEL_WIDTH}" y1="{bottom}" y2="{bottom}"/>')
    if kind == "bars":
        return parts + _bars(panel, left, at_y, colours)
    for tick in ticks(first, last):
        parts.append(f'<text x="{at_x(tick):.1f}" y="{bottom + 14}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<text x="{left + PANEL_WIDTH / 2}" y="{bottom + 28}" text-anchor="middle">{html.escape(x_label)}</text>')
    for series in panel.series:
        colour = colours[series.name]
        places = [(at_x(mark.x), at_y(mark.y)) for mark in series.marks]
        if kind == "curves":
            banded = [mark for mark in series.marks if mark.low is not None and mark.high is not None]
            outline = [(at_x(mark.x), at_y(mark.high or 0.0)) for mark in banded]
            outline += [(at_x(mark.x), at_y(mark.low or 0.0)) for mark in reversed(banded)]
            parts.append(f'<polygon points="{_points(outline)}" fill="{colour}" fill-opacity="0.15"/>')
            parts.append(f'<polyline points="{_points(places)}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
        else:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}" fill-opacity="0.75"/>' for x, y in places]
    return parts


def _bars(panel: Panel, left: float, at_y: object, colours: dict[str, str]) -> list[str]:
    assert callable(at_y)
    slot = PANEL_WIDTH / max(1, len(panel.series))
    parts = []
    for number, series in enumerate(panel.series):
        mark, middle = series.marks[0], left + (number + 0.5) * slot
        top, base = sorted((at_y(mark.y), at_y(0.0)))
        parts.append(
            f'<rect x="{middle - 0.35 * slot:.1f}" y="{top:.1f}" width="{0.7 * slot:.1f}" height="{max(0.5, base - top):.1f}" '
            f'fill="{colours[series.name]}" fill-opacity="0.8"/>'
        )
        if mark.low is not None and mark.high is not None:
            parts.append(f'<line class="axis" x1="{middle:.1f}" x2="{middle:.1f}" y1="{at_y(mark.low):.1f}" y2="{at_y(mark.high):.1f}"/>')
    return parts


def _legend(names: Sequence[str], colours: dict[str, str], width: float) -> tuple[list[str], int]:
    """The names under the panels, wrapped; and the height of the picture."""
    x, y = 12.0, TOP + PANEL_HEIGHT + 48
    parts = []
    for name in names:
        needed = 22 + LETTER * len(name)
        if x > 12 and x + needed > width:
            x, y = 12.0, y + LEGEND_LINE
        parts.append(f'<rect x="{x:.1f}" y="{y - 9}" width="10" height="10" rx="2" fill="{colours[name]}"/>')
        parts.append(f'<text x="{x + 14:.1f}" y="{y}">{html.escape(name)}</text>')
        x += needed
    return parts, y + 12


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two ends, about five.

    >>> ticks(0.0, 0.43)
    [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(number * step, 10) for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _padded(values: Sequence[float], *, from_zero: bool) -> tuple[float, float]:
    low, high = _exact([*values, 0.0] if from_zero else values)
    room = 0.05 * (high - low)
    return (low if from_zero and low == 0 else low - room), high + room


def _exact(values: Sequence[float]) -> tuple[float, float]:
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
