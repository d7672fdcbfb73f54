"""The report of a run, or the comparison of several: one self-contained HTML file.

The page starts with the answer: the verdict in words and the key figures. The alarms follow with their evidence and remedies, then the
curves with how to read them, the regime plane, the gradients by reward variance, the templates of the reasoning, sample episodes from
different prompts, the timings, the settings and the command that repeats the run. What a run did not record is named as missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.enums import Regime
from tether.core.errors import BadInput
from tether.runs.alarms import AlarmSummary, alarm_history, are_recorded
from tether.runs.compare import Comparison, compare_runs, evaluation_prompts
from tether.runs.figures import REGIME_TINTS, RUN_COLOURS, Chart, Runs, panel_chart, plane_chart, run_colours
from tether.runs.gradient_buckets import GRADIENTS, TABLE, Decomposition, decompositions, gradient_chart, reading, table
from tether.runs.pages import write_page
from tether.runs.panels import COST, SECTIONS
from tether.runs.reasoning_view import SampleStep, StepTemplates, TemplatesView, sample_steps, template_views
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import StageTime, as_records, fast_path_words, machine_words, mean_rates, stage_times
from tether.runs.verdict import Tile, failures, tiles, verdict

_REGIME_MEANINGS = {
    Regime.DIVERSE: "varied within a prompt, different across prompts: healthy.",
    Regime.TEMPLATE_COLLAPSE: "looks varied, ignores the prompt; entropy alone does not show it.",
    Regime.COMPRESSED: "terse, and still about the prompt.",
    Regime.LOW_ENTROPY_COLLAPSE: "one fixed text for everything.",
}


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
        "report.html",
        out,
        runs=runs,
        title=runs[0].name if len(runs) == 1 else f"{len(runs)} runs compared",
        comparison=_comparison(dict(zip(names, stores, strict=True)), records) if len(runs) > 1 else None,
        gradient_columns=[title for _, title in TABLE],
        sections=[(section.question, [panel_chart(panel, stepped) for panel in section.panels]) for section in SECTIONS],
        plane=plane_chart(stepped),
        cost=(COST.question, [panel_chart(panel, timed) for panel in COST.panels]),
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


def _gradients(found: Sequence[Decomposition], colour: str) -> GradientView | None:
    if not found:
        return None
    names = GRADIENTS if len(found) > 1 else GRADIENTS[1:]
    charts = [gradient_chart(name, found, run=colour[1:]) for name in names]  # the colour tells runs apart on the page
    return GradientView(reading(found[-1]), [chart for chart in charts if chart.figure is not None], found[-1].step, table(found[-1]))
