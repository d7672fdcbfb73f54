"""The report of a run, or the comparison of several: one self-contained HTML file.

The page starts with the answer: the verdict in words and the key figures. The alarms follow with their evidence and remedies, then the
curves with how to read them, the regime plane, the gradients by reward variance, the templates of the reasoning, sample episodes from
different prompts, the timings, the settings and the command that repeats the run. What a run did not record is named as missing.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tether.core.enums import Regime
from tether.core.errors import BadInput
from tether.core.text import visible
from tether.runs.alarms import alarm_history, are_recorded
from tether.runs.compare import compare_runs, evaluation_prompts
from tether.runs.figures import REGIME_TINTS, RUN_COLOURS, panel_chart, plane_chart, run_colours
from tether.runs.gradient_buckets import COLUMNS, GRADIENTS, Decomposition, decompositions, gradient_chart, reading, table
from tether.runs.pages import write_page
from tether.runs.panels import COST, SECTIONS, WORDS, shown_sections
from tether.runs.reasoning_view import StepTemplates, sample_steps, template_views
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.timings import as_records, fast_path_words, machine_words, mean_rates, stage_times, token_account
from tether.runs.verdict import failures, tiles, verdict


def write_report(stores: Sequence[RunStore], out: Path, templates: Sequence[Sequence[StepTemplates]] | None = None) -> Path:
    """Write the report of one run, or the comparison of several, and return its path; `templates` are those of each run, in order."""
    if not stores:
        raise BadInput("a report needs at least one run; give its folder")
    if len(stores) > len(RUN_COLOURS):
        raise BadInput(f"a report compares at most {len(RUN_COLOURS)} runs, got {len(stores)}; more lines cannot be told apart")
    short = [visible(store.folder.resolve().name) for store in stores]
    names = short if len(set(short)) == len(short) else [visible(str(store.folder)) for store in stores]
    if len(set(names)) < len(names):
        raise BadInput(f"a run was given twice: {', '.join(names)}; give each folder once")
    records = {name: store.steps() for name, store in zip(names, stores, strict=True)}
    colours = run_colours(names)
    found = templates if templates is not None else [None] * len(stores)
    runs = [_view(name, colours[name], store, records[name], own) for name, store, own in zip(names, stores, found, strict=True)]
    stepped = {name: steps for name, steps in records.items() if steps}
    timed = {name: costs for name, store in zip(names, stores, strict=True) if (costs := as_records(store.timings()))}
    comparison = None
    if len(runs) > 1:
        by_name = dict(zip(names, stores, strict=True))
        configs = {name: store.config() for name, store in by_name.items()}
        comparison = compare_runs(configs, records, lambda name: evaluation_prompts(by_name[name], records[name]))
    return write_page(
        "report.html",
        out,
        runs=runs,
        title=names[0] if len(runs) == 1 else f"{len(runs)} runs compared",
        comparison=comparison,
        gradient_columns=list(COLUMNS.values()),
        sections=[
            (section.question, [panel_chart(panel, stepped) for panel in section.panels])
            for section in shown_sections(SECTIONS, list(records.values()))
        ],
        plane=plane_chart(stepped),
        cost=(COST.question, [panel_chart(panel, timed) for panel in COST.panels]),
        regimes=[(name, REGIME_TINTS[Regime(name)], meaning) for name, meaning in WORDS["regimes"].items()],
    )


def _view(name: str, colour: str, store: RunStore, records: list[StepRecord], templates: Sequence[StepTemplates] | None) -> dict[str, Any]:
    """Everything the page shows about one run; `templates` is None where they were not searched for."""
    timings = store.timings()
    samples = sample_steps(store)
    torn = sum(len(lines) for lines in store.torn_lines.values())
    ending = f"Finished: {store.finished}." if store.finished else "Not marked as finished: still running, or stopped from outside."
    if torn:
        ending += f" {torn} incomplete {'line was' if torn == 1 else 'lines were'} skipped, as a kill leaves behind."
    return {
        "name": name,
        "colour": colour,
        "folder": store.folder,
        "about": store.about(),
        "version": store.version,
        "ending": ending,
        "num_records": len(records),
        "last_step": records[-1].step if records else 0,
        "verdict": verdict(records),
        "tiles": tiles(records),
        "alarms": alarm_history(records),
        "alarms_recorded": are_recorded(records),
        "gradients": _gradients(decompositions(records), colour),
        "gradient_failure": failures(records).get("gradients", ""),
        "templates": None if templates is None else template_views(templates),
        "notes": [(record.step, note) for record in records for note in record.notes],
        "samples": samples,
        "machine": machine_words(store.machine()),
        "fast_path": fast_path_words(store.machine()),
        "stage_times": stage_times(timings),
        "rates": mean_rates(timings),
        "tokens": token_account(records),
        "config": store.config_text(),
    }


def _gradients(found: Sequence[Decomposition], colour: str) -> dict[str, Any] | None:
    """The gradients by reward variance of the last decomposition, compared with the first."""
    if not found:
        return None
    names = GRADIENTS if len(found) > 1 else GRADIENTS[1:]
    charts = [gradient_chart(name, found, run=colour[1:]) for name in names]  # the colour tells runs apart on the page
    return {"reading": reading(found[-1]), "charts": charts, "step": found[-1].step, "rows": table(found[-1])}
