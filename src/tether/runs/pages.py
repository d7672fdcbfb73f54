"""The one writer of Tether's HTML pages: self-contained files that load nothing from the network.

`templates/page.html` is the frame of every page: the styles, plotly.js, which is inlined once, a content-security policy that forbids the
browser to load anything, the script that fits charts to their cards, a table of contents from the page's headings, and a light and a dark look
(the system's, or by the switch). A page extends it. All text goes through jinja2's escaping, because model output may hold HTML.

The pages of an evaluation, of a leaderboard and of an audit are written here, report.py has that of a run. Each starts with the answer: the
verdict and its key figures. A result page holds what a reader needs to judge a number: settings, versions, hashes of the data, sampling, intervals,
tables by category, and conversations that succeeded and that failed. An audit's page is made from the plain JSON object that `tether diagnose
--json` prints: the curves over training, templates and their slots, sample reasonings of different prompts, what was read, dropped and noted.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from tether.core.shares import exact_percent, interval_words, percent, range_words
from tether.core.text import for_html, for_markdown
from tether.runs.evaluations import Board, Difference, Result, categories, task_title
from tether.runs.figures import Chart, panel_chart
from tether.runs.files import write_whole
from tether.runs.images import EmbeddedPictures
from tether.runs.panels import AUDIT, WORDS
from tether.runs.reasoning_view import episode_view
from tether.runs.schema import StepRecord
from tether.runs.verdict import Tile, number

Document = Mapping[str, Any]
MARKS = {"tied": "good", "weakly_tied": "unsure", "cannot_be_told": "unsure"}
"""How a verdict is coloured; the others are bad news."""

_HEADING = re.compile(r"<h2>(.*?)</h2>", re.DOTALL)
_WORD = re.compile(r"[a-z0-9]+")
LONGEST_TEXT = 1200
_PLOTLY_CONFIG = {"displayModeBar": False}


def figure_html(chart: Chart) -> Markup:
    """The figure of a chart as a part of a page."""
    assert chart.figure is not None
    # plotly escapes angle brackets inside the script it writes, so its output is safe to place as it is.
    return Markup(chart.figure.to_html(full_html=False, include_plotlyjs=False, config=_PLOTLY_CONFIG, div_id=f"chart-{chart.key}"))


def write_page(template: str, out: Path, *, charts_inside: bool = True, **values: Any) -> Path:
    """Render a template of this package to a file and return its path; a page without charts needs no library (`charts_inside` False)."""
    # A closing tag inside the library would end its script element; the library ships none, which the tests hold.
    page = template_environment().get_template(template).render(plotly_js=Markup(get_plotlyjs() if charts_inside else ""), **values)
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


def template_environment(*folders: str) -> jinja2.Environment:
    """The templates of this package, and of further folders of it, with everything escaped."""
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("tether.runs", folder) for folder in ("templates", *folders)]),
        autoescape=True,
        finalize=for_html,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "percent": percent,
        "number": number,
        "cut": cut,
        "headings": headings,
        "linked": linked,
        "figure": figure_html,
        "moment": moment,
    }
    return environment


def moment(recorded: object) -> str:
    """A time on record, to be read. Example: "2026-11-18 06:30:02"."""
    return str(recorded)[:19].replace("T", " ")


def cut(text: str) -> str:
    """A text of an episode, at most `LONGEST_TEXT` characters of it; the store holds the rest."""
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT].rstrip()} … ({len(text) - LONGEST_TEXT} more characters)"


# ----------------------------------------------------------------------------------------------------------- evaluations


def rate(value: float | None) -> str:
    """A share with one decimal. Example: "41.4%"."""
    return "-" if value is None else f"{100 * value:.1f}%"


def signed(value: float) -> str:
    """A difference of shares in points. Example: "+12.0"."""
    return f"{100 * value:+.1f}"


def pass_names(results: Sequence[Result]) -> list[str]:
    """The k of pass@k beyond 1 that any of the results measured, as text."""
    names = {name.removeprefix("pass_at_") for result in results for name in result["metrics"] if name.startswith("pass_at_")}
    return sorted(names - {"1"}, key=int)


def spent(result: Result) -> str:
    """Tokens and cost in words. Example: "120,000 prompt + 30,000 completion tokens, 0.05"."""
    tokens = result["tokens"]
    if tokens["uncounted"]:
        return f"tokens of {tokens['uncounted']} of {tokens['responses']} responses were not counted by the server"
    words = f"{tokens['prompt']:,} prompt + {tokens['completion']:,} completion tokens"
    return f"{words}, cost {tokens['cost']:.4g}" if tokens.get("cost") is not None else words


def difference_words(difference: Difference) -> str:
    """Example: "A is 12.0 points above B (+3.0 to +21.0, 120 instances)"."""
    side = "below" if difference.success < 0 else "above"
    ends = f"{signed(difference.low)} to {signed(difference.high)}, {difference.num_instances} instances"
    chance = "beyond chance" if difference.beyond_chance else "within chance"
    return f"{difference.first} is {abs(100 * difference.success):.1f} points {side} {difference.second} ({ends}): {chance}"


def write_result_page(result: Result, out: Path) -> Path:
    """Write the page of one result and return its path."""
    metrics, protocol, pictures = result["metrics"], result["protocol"], EmbeddedPictures(out.parent)
    low, high = result["intervals"]["success"]
    rewards = result["intervals"]["reward_mean"]
    spread = "no interval: the instances show no spread" if rewards is None else f"95% interval {rewards[0]:.3f} to {rewards[1]:.3f}"
    tiles = [
        Tile("Success", rate(metrics["success"]), f"95% interval {rate(low)} to {rate(high)}"),
        Tile("Mean reward", f"{metrics['reward_mean']:.3f}", spread),
        *(
            Tile(f"pass@{k}", rate(metrics[f"pass_at_{k}"]), f"{rate(ends[0])} to {rate(ends[1])}")
            for k in pass_names([result])
            if (ends := result["intervals"].get(f"pass_at_{k}")) is not None
        ),
        Tile(
            "Instances",
            f"{metrics['instances']:.0f}",
            f"{metrics['prompts']:.0f} prompts, {protocol['samples']} sample{'s' * (protocol['samples'] != 1)} each",
        ),
        Tile("Failed", f"{metrics['errors']:.0f}", "conversations without a result, left out of every number"),
        Tile("Well formed", rate(metrics["format_valid"]), f"of the turns; {result['cut_responses']} responses were cut at their budget"),
    ]
    return write_page(
        "evaluation.html",
        out,
        charts_inside=False,
        result=result,
        title=task_title(result),
        tiles=tiles,
        spent=spent(result),
        categories={kind: rows for kind, rows in categories(result).items() if len(rows) > 1},
        examples={
            kind: [episode_view({**each, "success": kind == "successes"}, pictures) for each in shown]
            for kind, shown in result["examples"].items()
        },
        rate=rate,
    )


def write_leaderboard(boards: Sequence[Board], out: Path) -> Path:
    """Write the page of all results and return its path."""
    views = [(board, board_rows(board)) for board in boards]
    return write_page("leaderboard.html", out, charts_inside=False, boards=views, words=WORDED, difference_words=difference_words)


WORDED = ("model", "spent", "beyond chance from")
"""Columns of words; the others are numbers."""


def board_rows(board: Board) -> list[dict[str, str]]:
    """The table of a board: the cells of each result by the title of their column."""
    rows = []
    for rank, result in enumerate(board.results, start=1):
        metrics, protocol, (low, high) = result["metrics"], result["protocol"], result["intervals"]["success"]
        rows.append(
            {
                "#": str(rank),
                "model": str(result["model"]["name"]),
                "success": rate(metrics["success"]),
                "95% interval": f"{rate(low)} to {rate(high)}",
                **{f"pass@{k}": rate(metrics.get(f"pass_at_{k}")) for k in pass_names(board.results)},
                "reward": f"{metrics['reward_mean']:.3f}",
                "temperature": str(protocol["temperature"]),
                "samples": str(protocol["samples"]),
                "failed": f"{metrics['errors']:.0f}",
                "spent": spent(result),
                "beyond chance from": ", ".join(board.beyond(result)) or "none",
            }
        )
    return rows


def markdown(boards: Sequence[Board]) -> str:
    """The leaderboard as Markdown."""
    parts = []
    for board in boards:
        rows = board_rows(board)
        titles = [title for title in rows[0] if title not in ("temperature", "samples", "spent")]
        lines = [["" if title == "#" else title for title in titles], ["---" if title in WORDED else "---:" for title in titles]]
        lines += [[for_markdown(row[title]) for title in titles] for row in rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        parts.append(f"## {for_markdown(board.title)}\n\n{table}")
        if board.differences:
            parts.append("\n".join(f"- {for_markdown(difference_words(difference), 800)}" for difference in board.differences))
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------------------------- audits


def write_audit_report(document: Document, out: Path) -> Path:
    """Write the page and return its path."""
    last = next(window for window in document["windows"] if window["name"] == document["verdict_step"])
    records = _records(document)
    # Rollouts of one window have no curve.
    charts = [panel_chart(panel, {"audit": records}) for panel in AUDIT.panels] if len(records) > 1 else []
    return write_page(
        "audit.html",
        out,
        document=document,
        last=last,
        mark=MARKS.get(document["verdict"]["code"], "bad"),
        tiles=_tiles(last),
        evidence=[(*WORDS["evidence"][item["name"]], item) for item in document["verdict"]["evidence"]],
        charts=[chart for chart in charts if chart.figure is not None],
    )


def _tiles(window: Document) -> list[Tile]:
    measured = window["measured"]
    information, lexical = measured["information"], measured["lexical"]
    ends = information["intervals"]
    low, high = ends.get("retrieval_acc", (0.0, 1.0))
    mi = ends.get("mi_seq", (0.0, information["mi_ceiling"]))
    rewards = window["rewards"]
    tiles = [
        Tile(
            "Retrieval accuracy",
            exact_percent(information["retrieval_acc"]),
            f"{interval_words(information['retrieval_acc'], low, high, measured['prompts'])}; {exact_percent(information['chance'])} is chance",
        ),
        Tile(
            "Information (MI), nats",
            number(information["mi_seq"]),
            f"{number(mi[0])} to {number(mi[1])}; at most {number(information['mi_ceiling'])}",
        ),
        Tile("Diversity H(Z|X), nats", number(information["h_conditional"]), "per token, under the model that scored"),
        Tile(
            "Different reasonings",
            str(lexical["distinct"]),
            f"of {measured['reasonings']}; the most common is {percent(lexical['top_share'])}",
        ),
        Tile("Scored", f"{measured['reasonings']} × {measured['prompts']}", "reasonings under every prompt"),
        Tile(
            "Without reasoning",
            percent(window["empty"] / window["in_scope"]) if window["in_scope"] else "—",
            f"of {window['in_scope']} responses",
        ),
    ]
    if rewards is not None:
        ratio = "no prompt varies" if rewards["rv_ratio"] is None else f"std / mean over prompts {number(rewards['rv_ratio'])}"
        tiles.append(
            Tile("Reward variance", number(rewards["rv_mean"]), f"zero in {percent(rewards['zero_share'])} of the prompts; {ratio}")
        )
    if window["success"] is not None:
        low, high = window["success_interval"]
        tiles.append(Tile("Success", percent(window["success"]), range_words(low, high)))
    return tiles


def _records(document: Document) -> list[StepRecord]:
    points = {point["name"]: point for point in (document["trend"] or {"points": []})["points"]}
    records = []
    for window in document["windows"]:
        values: dict[str, float | None] = {"success": window["success"], "rv_mean": (window["rewards"] or {}).get("rv_mean")}
        if window["in_scope"]:
            values["empty"] = window["empty"] / window["in_scope"]
        if window["success_interval"] is not None:
            values["success_low"], values["success_high"] = window["success_interval"]
        if (measured := window["measured"]) is not None:
            information = measured["information"]
            values |= {
                name: information[name] for name in ("retrieval_acc", "chance", "mi_seq", "mi_ceiling", "h_conditional", "h_marginal")
            }
            values["reasoning_tokens"] = measured["reasoning_tokens"]
            for name, ends in information["intervals"].items():
                values[f"{name}_low"], values[f"{name}_high"] = ends
        if (point := points.get(window["name"])) is not None:
            values |= {"indicator": point["value"], "indicator_low": point["low"], "indicator_high": point["high"]}
        records.append(StepRecord(window["step"] or 0, {name: value for name, value in values.items() if value is not None}))
    return records


def slot_words(slots: Sequence[Document]) -> str:
    """How many slots of a template are tied, noise or unknown. Example: "2 tied, 1 noise"; empty without slots."""
    kinds = [str(slot["agreement"]["kind"]) for slot in slots]
    return ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("tied", "noise", "unknown") if kind in kinds)
