"""What a reader sees of the results: the block in an experiment's README, its plots, and all verdicts in the README of the experiments folder.

Only the text between two markers is written; what stands around it is written by hand and stays. Everything is deterministic.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from harness.cells import CellFiles
from harness.claims import Finding, Predicts, Verdict
from harness.grid import Grid, Library, Plan, Plot
from harness.plan import plan
from harness.plots import COLOURS, Mark, Panel, Series, can_write_pictures, draw, write_pictures
from harness.results import Level, Results, read_results, to_json
from tether.core.config import flattened
from tether.core.errors import BadInput
from tether.runs.files import write_whole
from tether.runs.quantities import Quantity, estimate_words, shown

_LOG = logging.getLogger(__name__)

BEGIN, END = "<!-- written by `tether reproduce`: do not edit -->", "<!-- end -->"
README, RESULTS = "README.md", "results"


def write_pages(library: Library, names: Sequence[str]) -> list[Path]:
    """Results, README block and plots of some experiments, and the page of all verdicts; the files that were written."""
    found = {
        name: {scale: read_results(library, name, scale, CellFiles(library.folder, scale)) for scale in scales_of(library, name)}
        for name in library.shared.order
    }
    written = [path for name in names for path in write_experiment(library, name, list(found[name].values()))]
    every = [
        (name, plot, results) for name in names for plot in library.grids[name].plots for results in found[name].values() if results.records
    ]
    if can_write_pictures():
        figures = {library.folder / name / plot_name(plot, results.scale): plotted(library, plot, results) for name, plot, results in every}
        written += write_pictures({path: figure for path, figure in figures.items() if figure is not None})
    elif every:
        _LOG.warning("pictures are as they were: kaleido, which draws them, is not installed (pip install kaleido)")
    glance = library.folder / README
    if glance.is_file():
        _replace_block(glance, glance_table(library, found), "")
        written.append(glance)
    return written


def scales_of(library: Library, name: str) -> list[str]:
    """The scales at which an experiment has cells, its own or of others."""
    return [
        scale
        for scale in library.shared.scales
        if any(library.grids[source].scales.get(scale) for source in (name, *library.grids[name].reads))
    ]


def write_experiment(library: Library, name: str, found: Sequence[Results]) -> list[Path]:
    """The files of one experiment."""
    folder, grid = library.folder / name, library.grids[name]
    written = []
    for results in found:
        if results.records:
            (folder / RESULTS).mkdir(parents=True, exist_ok=True)
            written.append(_write(folder / RESULTS / f"{results.scale}.json", to_json(results)))
    _replace_block(folder / README, readme_block(library, name, found), f"# {grid.title}\n\n")
    return [*written, folder / README]


def plot_name(plot: Plot, scale: str) -> str:
    return f"{scale}_{plot.file}"


# ------------------------------------------------------------------------------------------------------------------ README


def readme_block(library: Library, name: str, found: Sequence[Results]) -> str:
    """Claim, command, the paper's values, ours, verdicts and what was not run."""
    grid = library.grids[name]
    parts = [f"**Claim.** {grid.claim}", f"    tether reproduce {name} --scale {next(iter(grid.scales), 'tiny')}", _cost(library, found)]
    parts += _paper(library.papers[name])
    for results in found:
        parts.append(f"## Results at scale {results.scale}")
        parts.append(f"{_capital(library.scale(results.scale).words)}. Cells: {len(results.records)} of {len(results.cells)} done.")
        parts += _own_plan(grid.scales.get(results.scale))
        parts.append(_claims(results))
        if results.levels:
            parts.append(_levels(library, results.levels))
        parts += _correlations(grid, results)
        parts += [
            f"![{plot.title}]({plot_name(plot, results.scale)})"
            for plot in grid.plots
            if results.records and _panels(library, plot, results)
        ]
        parts += [f"- failed: `{cell}`: {reason}" for cell, reason in results.failures.items()]
    if grid.not_run:
        parts.append("## Not run")
        parts.append("\n".join(f"- {part.what}: {part.why}." for part in grid.not_run))
    if grid.notes:
        parts.append("## Notes")
        parts.append("\n".join(f"- {note}" for note in grid.notes))
    return "\n\n".join(part for part in parts if part)


def _own_plan(plan: Plan | None) -> list[str]:
    """In what an experiment's runs differ from others of the scale, and what they are compared at."""
    if plan is None:
        return []
    settings = ", ".join(f"`{key}` {value}" for key, value in flattened(plan.settings).items())
    targets = "; ".join(f"{env} {target.level:.0%}, {target.million_tokens:g} million tokens" for env, target in plan.targets.items())
    return [f"Here with {settings}."] * bool(settings) + [f"Level of success and budget: {targets}."] * bool(targets)


def _cost(library: Library, found: Sequence[Results]) -> str:
    lines = []
    for results in found:
        own = library.own_cells(results.name, results.scale)
        if not own:
            lines.append(f"Cost at scale {results.scale}: none of its own, it reads cells of other experiments.")
            continue
        done = [results.records[cell.id] for cell in own if cell.id in results.records]
        spent = f"; {len(done)} are done, {sum(record.seconds for record in done) / 60:.0f} minutes of steps in all" if done else ""
        machines = sorted({str(record.about["machine"]) for record in done})
        where = f", on {', '.join(machines)}" if machines else ""
        minutes = library.scale(results.scale).minutes_of(own)
        lines.append(
            f"Cost at scale {results.scale}: {len(own)} cells, about {minutes:.0f} minutes of one GPU with several side by side{spent}{where}."
        )
    return "\n".join(lines)


def _paper(paper: dict[str, Any]) -> list[str]:
    if not paper:
        return []
    parts = ["## The paper's values", f"{paper['source']}. {paper['what']}"]
    if "rows" in paper:
        parts.append(table(paper["columns"], paper["rows"]))
    parts += [f"> {quote}" for quote in paper.get("quotes", [])]
    return parts


def _claims(results: Results) -> str:
    rows = []
    for claim, judged in results.judgements:
        numbers = "<br>".join(finding_words(finding) for finding in judged.findings)
        needs = f"; {plan(claim, judged, results).words()}" if judged.verdict is Verdict.CANNOT_TELL else ""
        rows.append([claim.text, claim.paper or "not in the paper", numbers, f"**{judged.verdict}**{needs}"])
    return table(["claim", "the paper", "ours: difference [95% interval], n", "verdict"], rows)


def finding_words(finding: Finding) -> str:
    """An estimate behind a verdict, in one line."""
    if finding.estimate is None:
        return f"{finding.label}: {finding.verdict}"
    return f"{finding.label}: {estimate_words(finding.estimate, finding.quantity, signed=True)} ({finding.verdict})"


def spread_words(finding: Finding) -> str:
    """How far a seed is from the mean of all, where the estimate is over seeds."""
    estimate, quantity = finding.estimate, finding.quantity
    if estimate is None or math.isnan(estimate.error):
        return ""
    spread = estimate.error * math.sqrt(estimate.num)
    return f"; spread of a seed {shown(quantity, spread) if quantity else f'{spread:.2f}'}"


def _levels(library: Library, levels: Sequence[Level]) -> str:
    """One row per environment and arm, one column per quantity."""
    columns = list(dict.fromkeys(str(found.quantity) for found in levels))
    rows: dict[tuple[str, str], dict[str, str]] = {}
    for found in levels:
        place = rows.setdefault((found.env, library.arms[found.arm].words), {})
        place[str(found.quantity)] = estimate_words(found.estimate, found.quantity)
    units = {str(found.quantity): " (%)" if found.quantity.is_share else "" for found in levels}
    heading = ["environment", "arm", *(f"{column}{units[column]}" for column in columns)]
    return table(heading, [[env, arm, *(place.get(column, "-") for column in columns)] for (env, arm), place in rows.items()])


def _correlations(grid: Grid, results: Results) -> list[str]:
    parts = []
    if any(judged.findings[0].estimate for _, judged in results.correlations):
        rows = []
        for text, judged in results.correlations:
            estimate = judged.findings[0].estimate
            rows.append([text, estimate_words(estimate, None, signed=True) if estimate else "not measured"])
        parts.append(table(["quantity", f"rank correlation with {grid.correlate_with}, within environments"], rows))
    for claim, _ in results.judgements:
        if isinstance(claim.rule, Predicts) and (settings := claim.rule.settings(results.outcomes)):
            gain = Quantity.parse(claim.rule.gain)
            rows = [[name, f"{x:.3g}", estimate_words(estimate, gain, signed=True)] for name, x, estimate in settings]
            parts.append(table(["setting", claim.rule.x, f"gain in {claim.rule.gain}"], rows))
    return parts


def glance_table(library: Library, found: Mapping[str, Mapping[str, Results]]) -> str:
    """Every claim of every experiment with its verdicts, for the README of the experiments folder."""
    scales = list(library.shared.scales)
    rows = []
    for name, results in found.items():
        for number, claim in enumerate(library.grids[name].claims):
            verdicts = [str(results[scale].judgements[number][1].verdict) if scale in results else "-" for scale in scales]
            link = f"[{name}]({name}/{README})" if number == 0 else ""
            rows.append([link, claim.text, claim.paper or "not in the paper", *verdicts])
    return table(["experiment", "claim", "the paper", *scales], rows)


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown; a bar inside a cell is escaped."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _replace_block(path: Path, block: str, head: str) -> None:
    """Write the text between the markers of a file; a file that does not exist begins with `head`."""
    text = path.read_text(encoding="utf-8") if path.is_file() else f"{head}{BEGIN}\n{END}\n"
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInput(f"'{path}' lacks the lines '{BEGIN}' and '{END}', between which results are written; put them back")
    _write(path, f"{before}{BEGIN}\n\n{block}\n\n{END}{after}")


def _write(path: Path, text: str) -> Path:
    """Write a file, unless it holds that text already."""
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return path


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ------------------------------------------------------------------------------------------------------------------- plots


def plotted(library: Library, plot: Plot, results: Results) -> go.Figure | None:
    """The picture, or None where no cell has its numbers."""
    panels = _panels(library, plot, results)
    if not panels:
        return None
    axis = plot.y if plot.kind == "curves" else str(Quantity.parse(plot.y))
    return draw(plot.title, panels, kind=plot.kind, x_label=plot.x or "step", y_label=axis)


def _panels(library: Library, plot: Plot, results: Results) -> list[Panel]:
    """What a picture shows, one part per environment that has numbers for it."""
    runs = results.outcomes.runs
    arms = [arm for arm in dict.fromkeys(run.arm for run in runs) if plot.arms is None or arm in plot.arms]
    environments = [env for env in dict.fromkeys(run.env for run in runs) if plot.environments is None or env in plot.environments]
    panels = []
    for env in environments:
        series = [(arm, _marks(plot, env, arm, results)) for arm in arms]
        drawn = [Series(library.arms[arm].words, marks) for arm, marks in series if marks]
        if plot.kind == "scatter" and len(arms) > len(COLOURS):  # more arms than colours: they are not told apart
            drawn = [Series("one run each", [mark for one in drawn for mark in one.marks])] if drawn else []
        if drawn:
            panels.append(Panel(env, drawn))
    return panels


def _marks(plot: Plot, env: str, arm: str, results: Results) -> list[Mark]:
    runs = [run for run in results.outcomes.runs if (run.env, run.arm) == (env, arm)]
    if plot.kind == "curves":
        curves = [run.curves[plot.y] for run in runs if run.curves.get(plot.y)]
        steps = sorted(set().union(*curves)) if curves else []
        # A run that stopped counts with its last value: a mean over those that go on would jump where it stops.
        drawn = np.array([np.interp(steps, list(curve), list(curve.values())) for curve in curves])
        return [Mark(step, float(own.mean()), float(own.min()), float(own.max())) for step, own in zip(steps, drawn.T, strict=True)]
    y = Quantity.parse(plot.y)
    if plot.kind == "bars":
        found = next((level for level in results.levels if (level.env, level.arm, level.quantity) == (env, arm, y)), None)
        if found is None:
            return []
        ends = (found.estimate.low, found.estimate.high) if found.estimate.has_interval else (None, None)
        return [Mark(0, found.estimate.value, *ends)]
    x = Quantity.parse(plot.x or "")
    pairs = [(x.of(run.curves, run.planned), y.of(run.curves, run.planned)) for run in runs]
    return [Mark(across, up) for across, up in pairs if across is not None and up is not None]
