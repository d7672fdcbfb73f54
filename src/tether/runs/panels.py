"""What the curves of the pages show: one `Panel` per small chart, one `Series` per line, and the sentence on how to read it, all in panels.yaml.

Panels are grouped under the three questions a reader has. A single run draws every series of a panel; a comparison of several runs
draws only the panel's main series, coloured by run, because four lines per run stop being readable at the second run. The information
section is of the first turn; where a run measured other scopes too, they are dashed lines beside it, each with a chance level of its own.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources
from typing import Any

import yaml

from tether.runs.schema import StepRecord


class Style(StrEnum):
    """How a series is drawn."""

    MAIN = "main"
    LIGHT = "light"
    REFERENCE = "reference"
    """A dashed line to read the others against: chance, a bound."""
    SHARE = "share"
    """One layer of a stack that adds up to the whole."""


COLOURS = {
    **{"blue": "#2b6cb0", "orange": "#c2622d", "grey": "#7b8794", "purple": "#805ad5", "teal": "#2c7a7b"},
    **{"pale_blue": "#93b7d9", "pale_orange": "#dfae8f", "pale_purple": "#c3b1ee", "pale_teal": "#97c4c4"},
    **{"fail": "#c3cbd5", "mixed": "#b9d3ec", "succeed": "#b7dcc4"},
}
"""The names of colours in panels.yaml, which may also write one as #rrggbb."""
BLUE, ORANGE, FAIL = COLOURS["blue"], COLOURS["orange"], COLOURS["fail"]


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart."""

    metric: str
    label: str
    """Written at the end of the line, so two words at most."""
    style: Style = Style.MAIN
    colour: str = BLUE
    band: tuple[str, str] | None = None
    """The metrics that hold the lower and the upper end of its interval."""
    transform: Callable[[float], float] | None = None
    beside: bool = False
    """Measured beside the others in some runs only: a dashed line for a single run, not missed where it is absent."""

    def points(self, records: Sequence[StepRecord]) -> tuple[list[int], list[float]]:
        """Steps and values of the records that hold this metric."""
        held = [(record.step, record.metrics[self.metric]) for record in records if self.metric in record.metrics]
        return [step for step, _ in held], [self.transform(value) if self.transform else value for _, value in held]


@dataclass(frozen=True, slots=True)
class Panel:
    """One small chart."""

    key: str
    title: str
    reading: str
    """One or two sentences on how to read it."""
    series: tuple[Series, ...]
    percent: bool = False
    """The axis runs from 0% to 100%."""
    optional: bool = False
    """Of something that few runs do: left out, and not missed, where no run holds any of its series."""


@dataclass(frozen=True, slots=True)
class Section:
    """The panels that answer one question."""

    question: str
    panels: tuple[Panel, ...]


def _section(given: Mapping[str, Any]) -> Section:
    """A section as panels.yaml has it."""
    panels = []
    for panel in given["panels"]:
        lines = []
        for line in panel["series"]:
            read = {"style": Style(line.get("style", "main")), "colour": COLOURS.get(line.get("colour", "blue"), line.get("colour"))}
            read |= {"band": tuple(line["band"]) if "band" in line else None, "transform": None}
            if "transform" in line:  # the most information that a choice among so many prompts can carry
                read["transform"] = lambda prompts: math.log(max(1.0, prompts))
            lines.append(Series(**{**line, **read}))
        panels.append(Panel(**{**panel, "series": tuple(lines)}))
    return Section(given["question"], tuple(panels))


def _read(name: str) -> Any:
    text = resources.files("tether.runs").joinpath(name).read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))


WORDS: dict[str, Any] = _read("words.yaml")
"""What the pages say beside the charts, by the part of the page."""
_PANELS = _read("panels.yaml")
SECTIONS: tuple[Section, ...] = tuple(map(_section, _PANELS["report"]))
"""Of a report: drawn from the metrics of a run."""
COST = _section(_PANELS["cost"])
"""Drawn from its timings."""
AUDIT = _section(_PANELS["audit"])
"""Of an audit: drawn from its windows."""


def shown_sections(sections: Sequence[Section], runs: Sequence[Sequence[StepRecord]]) -> list[Section]:
    """The sections without the optional panels that these runs hold nothing of."""
    return [Section(each.question, tuple(p for p in each.panels if not p.optional or drawn(p, runs))) for each in sections]


def drawn(panel: Panel, runs: Sequence[Sequence[StepRecord]]) -> list[Series]:
    """The series of a panel that these runs hold and that are shown: all for one run, the main ones for several.

    Where several runs hold no main series the light ones stand in, so runs without validation still compare on training success.
    A reference line alone is not shown: it says nothing without the line it is read against.
    """
    held = [series for series in panel.series if any(series.points(records)[0] for records in runs)]
    if len(runs) > 1:
        held = [series for series in held if not series.beside]
        main = [series for series in held if series.style is Style.MAIN] or [series for series in held if series.style is Style.LIGHT]
        held = main + [series for series in held if series.style is Style.REFERENCE]
    return held if any(series.style is not Style.REFERENCE for series in held) else []
