"""The report of a run, or the comparison of several: one self-contained HTML file.

The page starts with the answer: the verdict in words and the key figures. The alarms follow with their evidence and remedies, then the
curves with how to read them, the regime plane, the gradients by reward variance, the templates of the reasoning, sample episodes from
different prompts, the timings, the settings and the command that repeats the run. What a run did not record is named as missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.enums import REGIME_FRACTION, Regime
from tether.core.errors import BadInput
from tether.core.shares import percent
from tether.runs.alarms import AlarmSummary, alarm_history, are_recorded
from tether.runs.compare import Comparison, compare_runs, evaluation_prompts
from tether.runs.figures import REGIME_TINTS, RUN_COLOURS, Runs, curve, regime_plane, run_colours
from tether.runs.gradient_buckets import TABLE, Decomposition, decompositions, norm_figure, reading, share_figure, table
from tether.runs.pages import Chart, figure_html, write_page
from tether.runs.panels import COST, SECTIONS, Panel, Series, drawn
from tether.runs.reasoning_view import SampleStep, StepTemplates, TemplatesView, sample_steps, template_views
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StageTime, as_records, fast_path_words, machine_words, mean_rates, stage_times
from tether.runs.verdict import Tile, change_words, failures, tiles, verdict

_PLOTLY_CONFIG = {"displayModeBar": False}

_REGIME_MEANINGS = {
    Regime.DIVERSE: "varied within a prompt, different across prompts: healthy.",
    Regime.TEMPLATE_COLLAPSE: "looks varied, ignores the prompt; entropy alone does not show it.",
    Regime.COMPRESSED: "terse, and still about the prompt.",
    Regime.LOW_ENTROPY_COLLAPSE: "one fixed text for everything.",
}


_SCOPES = {
    "trajectory": "purple, of one turn drawn from each trajectory",
    "turn": "teal, of turns drawn from all trajectories",
}
"""Label of a line of another scope to what it is."""

_NORM_READING = (
    "Prompts in buckets of equal size, least reward variance on the left. In the paper the task gradient rises with the variance and the "
    "regularisers' stays flat. A hollow dot on the floor is zero or next to it."
)
_BUCKET_CHARTS = (
    (
        "dominance",
        "Share of the regularisers",
        "Regulariser norm over the sum of both norms. Where it is near 1, updates are not about the task; a filter on reward variance drops these prompts first.",
    ),
    (
        "snr",
        "Signal-to-noise ratio of the task gradient",
        "From two independent halves of each group: what the halves agree on over what they do not. Near 0 the task gradient is noise.",
    ),
)


@dataclass(frozen=True, slots=True)
class GradientView:
    """The gradients of a run by reward variance; of the last decomposition, compared with the first."""

    reading: str
    charts: list[Chart]
    step: int
    rows: list[list[str]]


@dataclass(frozen=True, slots=True)
class RunView:
    """Everything the page shows about one run."""

    name: str
    colour: str
    folder: Path
    about: dict[str, Any]
    version: str
    ending: str
    num_records: int
    """Steps on record, the evaluation before training included."""
    last_step: int
    verdict: list[str]
    tiles: list[Tile]
    alarms: list[AlarmSummary]
    alarms_recorded: bool
    gradients: GradientView | None
    gradient_failure: str
    """Why there are no gradients, where a decomposition was due and failed."""
    templates: list[TemplatesView] | None
    """None where they were not searched for."""
    notes: list[tuple[int, str]]
    samples: list[SampleStep]
    machine: str
    """What it was computed on; empty where the run did not say."""
    fast_path: list[str]
    """Which decoder, attention, scorer and head the run used, and why where a slow one was chosen; empty where the run did not say."""
    stage_times: list[StageTime]
    rates: list[tuple[str, str]]
    config: str


def write_report(stores: Sequence[RunStore], out: Path, templates: Sequence[Sequence[StepTemplates]] | None = None) -> Path:
    """Write the report of one run, or the comparison of several, and return its path; `templates` are those of each run, in order."""
    if not stores:
        raise BadInput("a report needs at least one run; give its folder")
    if len(stores) > len(RUN_COLOURS):
        raise BadInput(f"a report compares at most {len(RUN_COLOURS)} runs, got {len(stores)}; more lines cannot be told apart")
    names = _names(stores)
    records = {name: store.steps() for name, store in zip(names, stores, strict=True)}
    colours = run_colours(names)
    found = templates if templates is not None else [None] * len(stores)
    runs = [_view(name, colours[name], store, records[name], own) for name, store, own in zip(names, stores, found, strict=True)]
    stepped = {name: steps for name, steps in records.items() if steps}
    timed = {name: costs for name, store in zip(names, stores, strict=True) if (costs := as_records(store.timings()))}
    return write_page(
        "report_template.html",
        out,
        runs=runs,
        title=_title(runs),
        comparison=_comparison(dict(zip(names, stores, strict=True)), records) if len(runs) > 1 else None,
        gradient_columns=[title for _, title in TABLE],
        sections=[(section.question, _charts(section.panels, stepped)) for section in SECTIONS],
        plane=_plane(stepped),
        cost=(COST.question, _charts(COST.panels, timed)),
        regimes=[(regime.value, REGIME_TINTS[regime], meaning) for regime, meaning in _REGIME_MEANINGS.items()],
    )


def _names(stores: Sequence[RunStore]) -> list[str]:
    """Folder names; whole paths where two runs share one."""
    short = [store.folder.resolve().name for store in stores]
    names = short if len(set(short)) == len(short) else [str(store.folder) for store in stores]
    if len(set(names)) < len(names):
        raise BadInput(f"a run was given twice: {', '.join(names)}; give each folder once")
    return names


def _view(name: str, colour: str, store: RunStore, records: list[StepRecord], templates: Sequence[StepTemplates] | None) -> RunView:
    timings = store.timings()
    samples = sample_steps(store)
    torn = sum(len(lines) for lines in store.torn_lines.values())
    ending = f"Finished: {store.finished}." if store.finished else "Not marked as finished: still running, or stopped from outside."
    if torn:
        ending += f" {torn} incomplete {'line was' if torn == 1 else 'lines were'} skipped, as a kill leaves behind."
    return RunView(
        name=name,
        colour=colour,
        folder=store.folder,
        about=store.about(),
        version=store.version,
        ending=ending,
        num_records=len(records),
        last_step=records[-1].step if records else 0,
        verdict=verdict(records),
        tiles=tiles(records),
        alarms=alarm_history(records),
        alarms_recorded=are_recorded(records),
        gradients=_gradients(decompositions(records), colour),
        gradient_failure=failures(records).get("gradients", ""),
        templates=None if templates is None else template_views(templates),
        notes=[(record.step, note) for record in records for note in record.notes],
        samples=samples,
        machine=machine_words(store.machine()),
        fast_path=fast_path_words(store.machine()),
        stage_times=stage_times(timings),
        rates=mean_rates(timings),
        config=store.config_text(),
    )


def _comparison(stores: Mapping[str, RunStore], records: Runs) -> Comparison:
    configs = {name: store.config() for name, store in stores.items()}
    return compare_runs(configs, records, lambda name: evaluation_prompts(stores[name], records[name]))


def _title(runs: Sequence[RunView]) -> str:
    return runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared"


def _gradients(found: Sequence[Decomposition], colour: str) -> GradientView | None:
    if not found:
        return None
    last = found[-1]
    compared = [last] if len(found) == 1 else [found[0], last]
    key = f"gradients-{colour[1:]}"  # the colour tells runs apart on the page
    charts = [
        Chart(f"Gradient norms at step {each.step}", _NORM_READING, figure_html(norm_figure(each, compared), f"{key}-{each.step}"), "")
        for each in compared
    ]
    for metric, title, words in _BUCKET_CHARTS:
        figure = share_figure(metric, compared, percent=metric == "dominance")
        charts.append(Chart(title, words, figure_html(figure, f"{key}-{metric}"), f"gradients/{metric}_1, ..."))
    return GradientView(reading(last), [chart for chart in charts if chart.html], last.step, table(last))


def _charts(panels: Sequence[Panel], runs: Runs) -> list[Chart]:
    charts = []
    for panel in panels:
        figure = curve(panel, runs) if runs else None
        wanted = ", ".join(series.metric for series in panel.series if not series.beside)
        reading = _reading(panel, drawn(panel, list(runs.values())))
        if len(runs) == 1 and (change := change_words(next(iter(runs.values())), panel.series[0].metric)):
            reading += f" {change[0].upper()}{change[1:]}."
        charts.append(Chart(panel.title, reading, figure_html(figure, panel.key), wanted))
    return charts


def _reading(panel: Panel, shown: Sequence[Series]) -> str:
    """How to read a panel; which of its lines are there, if some are not; and what the dashed lines beside them are, if there are any."""
    usual = [series.label for series in shown if not series.beside]
    words = panel.reading
    if len(usual) < sum(not series.beside for series in panel.series):
        words += f" Drawn here: {', '.join(usual)}."
    scopes = [_SCOPES[series.label] for series in shown if series.label in _SCOPES]
    return f"{words} Dashed: the same, {' and '.join(scopes)}." if scopes else words


def _plane(runs: Runs) -> Chart:
    reading = (
        "Each dot is one measurement, divided by the run's first: right is more variety within a prompt, up is more dependence on the "
        f"prompt. The path starts at the hollow dot and darkens with the steps; an axis counts as low below {percent(REGIME_FRACTION)} "
        "of its start. A point is one of collapse only if the verdict says so too."
    )
    measured = any("information/mi_seq" in record.metrics for records in runs.values() for record in records)
    needs = (
        "The first measurement found no information above zero, or all were on too few prompts for a verdict, so there is no start to compare with."
        if measured
        else "Not recorded: no step measured information."
    )
    return Chart("The regime plane", reading, figure_html(regime_plane(runs) if runs else None, "regime-plane"), needs)
