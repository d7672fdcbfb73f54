"""What each page shows, as plain values for its template. Nothing here knows HTTP: a page takes the catalogue and the words of its address."""

import os
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tether.core.config import flattened
from tether.core.errors import BadInput, StorageError
from tether.runs.alarms import alarm_history
from tether.runs.compare import compare_runs, settings_difference, shown
from tether.runs.dashboard.catalogue import Catalogue, LiveRun
from tether.runs.dashboard.charts import MOST_LINES, PAGE_SECTIONS, PANELS, Lines, colours_of, differs_most, lines_of
from tether.runs.dashboard.episodes import episode, find, first_pictures, neighbours, previews, standing_alarms, step_groups, train_steps
from tether.runs.files import as_written
from tether.runs.gradient_buckets import COLUMNS, GRADIENTS, decompositions, reading, table
from tether.runs.images import named
from tether.runs.index import ORDERS, TRAJECTORIES
from tether.runs.pages import moment
from tether.runs.panels import shown_sections
from tether.runs.reasoning_view import StepTemplates, episode_view, template_views
from tether.runs.schema import StepRecord
from tether.runs.store import METRICS
from tether.runs.timings import fast_path_words, machine_words
from tether.runs.verdict import step_verdicts, tiles, verdict

PAGE_ROWS = 50
"""Episodes on one page of the list."""
SORTS = ("name", "state", "step", "success", "retrieval", "regime", "alarms", "env", "model", "algorithm", "seed", "started")
STATES = ("training", "finished", "stopped")
MOST_NOTES = 200
FILTERS = ("q", "step", "group", "outcome", "stop_reason", "kept", "alarm", "reward_min", "reward_max")
ANY = "any"
"""The word for episodes of every split."""

StepTemplateSearch = Callable[[int, str, Any], StepTemplates]
"""Finds the templates in the episodes of a step; given by the command line, because diagnosis is not known here."""


class Words:
    """The words of an address: `run` may stand several times, and an empty word is none."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if value.strip():
                self._values.setdefault(name, []).append(value.strip())

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[0]

    def choice(self, name: str, known: Collection[str], default: str = "") -> str:
        """One of the known words."""
        if (value := self.text(name, default)) not in known:
            raise BadInput(f"{name} is '{value}'; choose one of {', '.join(word for word in known if word)}")
        return value

    def every(self, name: str) -> list[str]:
        return list(dict.fromkeys(self._values.get(name, [])))

    def whole(self, name: str) -> int | None:
        return self._number(name, int, "a whole number")

    def number(self, name: str) -> float | None:
        return self._number(name, float, "a number")

    def _number(self, name: str, convert: Any, what: str) -> Any:
        value = self.text(name)
        try:
            return convert(value) if value else None
        except ValueError:
            raise BadInput(f"{name} is '{value}'; expected {what}") from None


def runs_page(catalogue: Catalogue, words: Words) -> dict[str, Any]:
    """The list of runs: filtered, sorted, with one chart over all of them and what their settings differ in."""
    runs = catalogue.runs()
    rows, unreadable = [], dict(catalogue.unreadable)
    for run in runs.values():
        try:
            with as_written(run.folder):
                rows.append(_run_row(run))
        except (BadInput, StorageError) as error:  # one folder that cannot be read does not hide the others
            unreadable[run.name] = str(error)
    state, tag, sort = words.choice("state", ("", *STATES)), words.text("tag"), words.choice("sort", SORTS, "started")
    wanted = words.text("q").lower().split()
    shown_rows = []
    for row in rows:
        searched = " ".join([*(row[name] for name in ("name", "state", "env", "model", "algorithm", "regime")), *row["tags"]]).lower()
        if all(word in searched for word in wanted) and (not state or row["state"] == state) and (not tag or tag in row["tags"]):
            shown_rows.append(row)
    falling = words.text("order", "falling" if sort in ("started", "success", "retrieval", "step", "alarms") else "rising") == "falling"
    # Rows without a value come last in either order.
    shown_rows.sort(key=lambda row: str(row["name"]))
    shown_rows.sort(key=lambda row: _sort_key(row[sort]), reverse=falling)
    shown_rows.sort(key=lambda row: row[sort] is None)
    chosen = [runs[row["name"]] for row in shown_rows]
    panel = words.choice("panel", PANELS, "success")
    pool = words.text("pool", "yes") == "yes"
    lines = lines_of(chosen, pool=pool)
    return {
        "rows": shown_rows,
        "num_runs": len(rows),
        "unreadable": unreadable,
        "tags": sorted({tag for row in rows for tag in row["tags"]}),
        "states": STATES,
        "panels": [(key, each.title) for key, each in PANELS.items()],
        "panel": panel,
        "panel_title": PANELS[panel].title,
        "pool": pool,
        "lines": lines,
        **_colours(lines, catalogue),
        "drawn": [run.name for group in lines.groups.values() for run in group],
        "most_lines": MOST_LINES,
        "differences": settings_difference({run.name: run.config() for run in chosen}) if 1 < len(chosen) <= 12 else (),
        "sort": sort,
        "falling": falling,
        "folder": catalogue.shown,
    }


def _run_row(run: LiveRun) -> dict[str, Any]:
    """One line of the list of runs."""
    about, config = run.about(), run.config()
    model, steps = str(about.get("model", "")), config.get("steps")
    if model.startswith(("/", ".", "~")):  # a file or folder
        model = model.rstrip("/").rpartition("/")[2]
    return {
        "name": run.name,
        "state": run.state(),
        "env": str(about.get("env", "")),
        "model": model,
        "algorithm": str(about.get("algorithm", "")),
        "seed": shown(about.get("seed", config.get("seed", ""))),
        "tags": run.tags(),
        "steps": steps if isinstance(steps, int) else None,
        "started": moment(about.get("started", "")),
        **run.once("row", (METRICS,), lambda: _last_facts(run.records())),
    }


def _last_facts(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The latest value of what the list shows of a run: success of the last validation (of training where there was none), alarms that stand."""

    def last(*metrics: str) -> float | None:
        return next((record.metrics[name] for name in metrics for record in reversed(records) if name in record.metrics), None)

    verdicts = step_verdicts(records)  # not the regimes on record: earlier versions named them on smaller samples
    return {
        "step": records[-1].step if records else 0,
        "success": last("validation/success", "rollout/success"),
        "retrieval": last("information/retrieval_acc"),
        "regime": verdicts[-1][1].label if verdicts else "",
        "alarms": len(records[-1].alarms) if records else 0,
    }


def _sort_key(value: Any) -> tuple[int, Any]:
    if value is None:
        return (0, 0)
    if isinstance(value, str) and value.lstrip("-").isdigit():  # seeds are numbers written as text
        return (1, int(value))
    return (1, value) if not isinstance(value, str) else (2, value.lower())


def run_page(run: LiveRun) -> dict[str, Any]:
    """One run: the verdict, the key figures, alarms, the charts of the report, notes, settings."""
    records = run.records()
    return {
        "verdict": run.once("verdict", (METRICS,), lambda: verdict(records)),
        "tiles": run.once("tiles", (METRICS,), lambda: tiles(records)) if records else [],
        "alarms": run.once("alarms", (METRICS,), lambda: alarm_history(records)),
        "num_records": len(records),
        "sections": _sections([records]),
        "notes": [(record.step, note) for record in reversed(records) for note in record.notes][:MOST_NOTES],
        "machine": [words for words in (machine_words(run.machine()), *fast_path_words(run.machine())) if words],
        "ending": run.finished(),
        "settings": [(name, shown(value)) for name, value in flattened(run.config()).items()],
    }


def _sections(runs: Sequence[Sequence[StepRecord]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The questions of a page, with key and title of each chart."""
    return [(each.question, [(panel.key, panel.title) for panel in each.panels]) for each in shown_sections(PAGE_SECTIONS, runs)]


def trajectories_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """The list of episodes that fit, a page of it."""
    outcome = words.choice("outcome", ("", "success", "failure"))
    kept = words.choice("kept", ("", "yes", "no"))
    start = max(0, words.whole("start") or 0)
    blocks = run.index().attempts()
    splits = sorted({split for _, split in blocks})
    # The newest episodes are those of a validation, which hide what was trained on: a list that asks for nothing else begins with training.
    usual = "train" if "train" in splits and not any(map(words.text, FILTERS)) else ANY
    split = words.text("split", usual)
    found = find(
        run,
        step=words.whole("step"),
        split="" if split == ANY else split,
        group=words.whole("group"),
        success=outcome == "success" if outcome else None,
        stop_reason=words.text("stop_reason"),
        kept=kept == "yes" if kept else None,
        reward_at_least=words.number("reward_min"),
        reward_at_most=words.number("reward_max"),
        alarm=words.text("alarm"),
        text=words.text("q"),
        order=words.choice("order", ORDERS, "newest"),
        start=start,
        limit=PAGE_ROWS,
    )
    return {
        "found": found,
        "previews": found.excerpts or previews(run, found.rows),
        "split": split,
        "any_split": ANY,
        "start": start,
        "previous": max(0, start - PAGE_ROWS) if start and not words.text("q") else None,
        "splits": splits,
        "stop_reasons": run.once("stop reasons", (TRAJECTORIES,), lambda: run.index().stop_reasons()),
        "alarm_names": sorted({name for names in found.alarms.values() for name in names}),
    }


def episode_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """One episode, or two side by side."""
    tokenizer, missing = run.tokenizer()
    alarms = standing_alarms(run.records())
    shown_episodes = []
    for key in (words.text("key"), *words.every("beside")[:1]):
        record = episode_view(episode(run, key), named(run.folder), tokenizer)
        standing = alarms.get(int(record["step"]), ())
        shown_episodes.append({"key": key, "record": record, "alarms": standing, "neighbours": neighbours(run, key)})
    return {"episodes": shown_episodes, "no_tokens": missing}


def groups_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """The groups of a training step, the last one by default."""
    steps = train_steps(run)
    step = _asked_step(words, "step", run, steps, "training episodes")
    if step is None and steps:
        step = steps[-1]
    return {
        "steps": steps,
        "step": step,
        "groups": (groups := step_groups(run, step) if step is not None else []),
        "pictures": first_pictures(run, groups),
        "notes": next((record.notes for record in run.records() if record.step == step), []),
        "filter": run.config().get("filter") or {},
    }


def templates_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """Which steps can be searched for templates; the first and the last by default."""
    steps = train_steps(run)
    asked = [_asked_step(words, name, run, steps, "training episodes") for name in ("first", "last")]
    chosen = [step for step in asked if step is not None] or list(dict.fromkeys((steps[0], steps[-1]))) if steps else []
    return {"steps": steps, "chosen": chosen}


def found_templates(run: LiveRun, words: Words, search: StepTemplateSearch) -> dict[str, Any]:
    """The templates of one step, which take seconds to find the first time."""
    step = words.whole("step")
    if step not in train_steps(run):
        raise BadInput(f"run '{run.name}' has no training episodes at step {step}")
    index = run.index()
    attempt = index.attempts()[step, "train"]
    rows = index.select(step=step, split="train")
    found = run.once(f"templates {step} {attempt}", (), lambda: search(step, "train", (each for each in index.read(rows) if each)))
    return {"found": template_views([found])[0]}


def gradients_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """The gradients by reward variance at two steps, the first and the last by default."""
    by_step = {each.step: each for each in decompositions(run.records())}
    steps = list(by_step)
    first, last = (_asked_step(words, name, run, steps, "gradient decomposition") for name in ("first", "last"))
    shown_step = last if last is not None else steps[-1] if steps else None
    return {
        "steps": steps,
        "first": first if first is not None else steps[0] if steps else None,
        "last": shown_step,
        "charts": GRADIENTS if len(steps) > 1 else GRADIENTS[1:],
        "reading": reading(by_step[shown_step]) if shown_step is not None else "",
        "columns": list(COLUMNS.values()),
        "table": table(by_step[shown_step]) if shown_step is not None else [],
    }


def compare_page(catalogue: Catalogue, words: Words) -> dict[str, Any]:
    """Several runs side by side."""
    runs = [catalogue.get(name) for name in words.every("run")]
    if len(runs) < 2:
        raise BadInput("a comparison needs two runs at least; tick them in the list of runs")
    pool = words.text("pool", "yes") == "yes"
    lines = lines_of(runs, pool=pool)
    # Runs of one sweep begin with its folder: what tells them apart is shown.
    common = os.path.commonpath([run.name.rpartition("/")[0] or "." for run in runs]) + "/"
    shorts = {run.name.removeprefix(common): run for run in runs}
    records = {short: run.records() for short, run in shorts.items()}
    return {
        "runs": [(short, run, verdict(records[short]), tiles(records[short]) if records[short] else []) for short, run in shorts.items()],
        "names": [run.name for run in runs],
        "shorts": list(shorts),
        "common": common,
        "lines": lines,
        **_colours(lines, catalogue),
        "most": differs_most(records),
        "pool": pool,
        "comparison": compare_runs(
            {short: run.config() for short, run in shorts.items()}, records, lambda short: shorts[short].evaluation_prompts()
        ),
        "sections": _sections(list(records.values())),
    }


def _colours(lines: Lines, catalogue: Catalogue) -> dict[str, Any]:
    """The numbers of the colours: by line, and by run."""
    colours = colours_of(lines, catalogue.places())
    return {"colours": colours, "line_of": {run.name: colours[name] for name, group in lines.groups.items() for run in group}}


def _asked_step(words: Words, name: str, run: LiveRun, steps: Sequence[int], what: str) -> int | None:
    """The step that the address names, if any, which must be one of those that have something to show."""
    step = words.whole(name)
    if step is not None and step not in steps:
        known = f"{steps[0]} to {steps[-1]}" if steps else "none"
        raise BadInput(f"run '{run.name}' has no {what} at step {step}; it has steps {known}")
    return step
