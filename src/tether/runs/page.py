"""The one writer of Tether's HTML pages: self-contained files that load nothing from the network.

`page_template.html` is the frame of every page: the styles, plotly.js, which is inlined once, a content-security policy that forbids the
browser to load anything, the script that fits charts to their cards, a table of contents from the page's headings, and a light and a dark look
(the system's, or by the switch). A page extends it. All text goes through jinja2's escaping, because
model output may hold HTML.
"""

import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tether.core.shares import percent
from tether.runs.files import write_whole
from tether.runs.verdict import number

_HEADING = re.compile(r"<h2>(.*?)</h2>", re.DOTALL)
_WORD = re.compile(r"[a-z0-9]+")
_PLOTLY_CONFIG = {"displayModeBar": False}


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure with its explanation; `html` is None where nothing was recorded."""

    title: str
    reading: str
    html: Markup | None
    needs: str = ""
    """What was not recorded, for the page to name where `html` is None."""


def figure_html(figure: go.Figure | None, key: str) -> Markup | None:
    """A figure as a part of a page; `key` is unique on the page."""
    if figure is None:
        return None
    # plotly escapes angle brackets inside the script it writes, so its output is safe to place as it is.
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config=_PLOTLY_CONFIG, div_id=f"chart-{key}"))


def write_page(template: str, out: Path, *, charts_inside: bool = True, **values: Any) -> Path:
    """Render a template of this package to a file and return its path; a page without charts needs no library (`charts_inside` False)."""
    # A closing tag inside the library would end its script element; the library ships none, which the tests hold.
    page = _environment().get_template(template).render(plotly_js=Markup(get_plotlyjs() if charts_inside else ""), **values)
    write_whole(out, page)
    return out


def headings(content: Markup) -> list[tuple[str, str]]:
    """(place, title) of every section of a page, for its table of contents.

    >>> headings(Markup("<h2>Is it tied?</h2><p>x</p><h2>Is it tied?</h2>"))
    [('is-it-tied', 'Is it tied?'), ('is-it-tied-2', 'Is it tied?')]
    """
    found: list[tuple[str, str]] = []
    for title in _HEADING.findall(str(content)):
        place = "-".join(_WORD.findall(Markup(title).striptags().lower())) or "section"
        taken = sum(known == place or known.startswith(f"{place}-") for known, _ in found)
        found.append((f"{place}-{taken + 1}" if taken else place, Markup(title).striptags()))
    return found


def linked(content: Markup) -> Markup:
    """The page with a place on every heading, to link to. Text of models is escaped before, so it holds no heading."""
    places = iter(headings(content))
    return Markup(_HEADING.sub(lambda heading: f'<h2 id="{next(places)[0]}">{heading[1]}</h2>', str(content)))


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_source), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = percent
    environment.filters["number"] = number
    environment.filters["headings"] = headings
    environment.filters["linked"] = linked
    return environment


def _source(name: str) -> str:
    return resources.files("tether.runs").joinpath(name).read_text(encoding="utf-8")
