"""What each page shows, as plain values for its template. Nothing here knows HTTP: a page takes the catalogue and the words of its address."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.config import flattened
from tether.core.errors import BadInput, StorageError
from tether.core.grammar import parse_response
from tether.runs.alarms import alarm_history
from tether.runs.compare import compare_runs, settings_difference, shown
from tether.runs.dashboard.catalogue import Catalogue, LiveRun
from tether.runs.dashboard.charts import MOST_LINES, PAGE_SECTIONS, PANELS, gradient_steps, lines_of
from tether.runs.dashboard.episodes import (
    Filter,
    Piece,
    context_text,
    episode,
    find,
    neighbours,
    pieces,
    run_tokenizer,
    standing_alarms,
    step_groups,
    train_steps,
)
from tether.runs.gradient_buckets import GRADIENTS, TABLE, decompositions, reading, table
from tether.runs.index import ORDERS, TRAJECTORIES
from tether.runs.reasoning_view import StepTemplates, template_views
from tether.runs.schema import StepRecord
from tether.runs.store import METRICS
from tether.runs.timings import fast_path_words, machine_words
from tether.runs.verdict import tiles, verdict

PAGE_ROWS = 50
"""Episodes on one page of the list."""
SORTS = ("name", "state", "env", "model", "algorithm", "seed", "step", "success", "retrieval", "regime", "alarms", "started")
STATES = ("training", "finished", "stopped")
MOST_NOTES = 200

StepTemplateSearch = Callable[[int, str, Any], StepTemplates]
"""Finds the templates in the episodes of a step; given by the command line, because diagnosis is not known here."""


@dataclass(frozen=True, slots=True)
class RunRow:
    """One line of the list of runs."""

    name: str
    state: str
    env: str
    model: str
    algorithm: str
    seed: str
    tags: list[str]
    step: int
    steps: int | None
    """How many it is to have."""
    success: float | None
    """Of the last validation, or of training where there was none."""
    retrieval: float | None
    regime: str
    alarms: int
    """That stand at its last step."""
    started: str


class Words:
    """The words of an address: `run` may stand several times, and an empty word is none."""

    def __init__(self, pairs: Sequence[tuple[str, str]]) -> None:
        self._values: dict[str, list[str]] = {}
        for name, value in pairs:
            if value.strip():
                self._values.setdefault(name, []).append(value.strip())

    def text(self, name: str, default: str = "") -> str:
        return self._values.get(name, [default])[0]

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
            rows.append(_run_row(run))
        except (BadInput, StorageError) as error:  # one folder that cannot be read does not hide the others
            unreadable[run.name] = str(error)
    state, tag, sort = words.text("state"), words.text("tag"), words.text("sort", "started")
    if sort not in SORTS:
        raise BadInput(f"sort is '{sort}'; choose one of {', '.join(SORTS)}")
    if state and state not in STATES:
        raise BadInput(f"state is '{state}'; choose one of {', '.join(STATES)}")
    wanted = words.text("q").lower().split()
    shown_rows = [
        row
        for row in rows
        if all(word in _searched(row) for word in wanted) and (not state or row.state == state) and (not tag or tag in row.tags)
    ]
    falling = words.text("order", "falling" if sort in ("started", "success", "retrieval", "step", "alarms") else "rising") == "falling"
    # Rows without a value come last in either order.
    shown_rows.sort(key=lambda row: row.name)
    shown_rows.sort(key=lambda row: _sort_key(getattr(row, sort)), reverse=falling)
    shown_rows.sort(key=lambda row: getattr(row, sort) is None)
    chosen = [runs[row.name] for row in shown_rows]
    panel = words.text("panel", "success")
    if panel not in PANELS:
        raise BadInput(f"panel is '{panel}'; choose one of {', '.join(PANELS)}")
    pool = words.text("pool", "yes") == "yes"
    lines = lines_of(chosen, pool=pool)
    return {
        "rows": shown_rows,
        "num_runs": len(rows),
        "unreadable": unreadable,
        "tags": sorted({tag for row in rows for tag in row.tags}),
        "states": STATES,
        "panels": [(key, each.title) for key, each in PANELS.items()],
        "panel": panel,
        "panel_title": PANELS[panel].title,
        "pool": pool,
        "lines": lines,
        "line_of": {run.name: place for place, group in enumerate(lines.groups.values()) for run in group},
        "drawn": [run.name for group in lines.groups.values() for run in group],
        "most_lines": MOST_LINES,
        "differences": settings_difference({run.name: run.config() for run in chosen}) if 1 < len(chosen) <= 12 else (),
        "sort": sort,
        "falling": falling,
        "folder": catalogue.shown,
    }


def _run_row(run: LiveRun) -> RunRow:
    about, config = run.about(), run.config()
    facts = run.once("row", (METRICS,), lambda: _last_facts(run.records()))
    steps = config.get("steps")
    return RunRow(
        name=run.name,
        state=run.state(),
        env=str(about.get("env", "")),
        model=_model_name(str(about.get("model", ""))),
        algorithm=str(about.get("algorithm", "")),
        seed=shown(about.get("seed", config.get("seed", ""))),
        tags=run.tags(),
        steps=steps if isinstance(steps, int) else None,
        started=str(about.get("started", ""))[:19].replace("T", " "),
        **facts,
    )


def _model_name(model: str) -> str:
    """A model's name; of a file or folder the last part of its path."""
    return model.rstrip("/").rpartition("/")[2] if model.startswith(("/", ".", "~")) else model


def _last_facts(records: Sequence[StepRecord]) -> dict[str, Any]:
    """The latest value of what the list shows of a run."""

    def last(*metrics: str) -> float | None:
        return next((record.metrics[name] for name in metrics for record in reversed(records) if name in record.metrics), None)

    return {
        "step": records[-1].step if records else 0,
        "success": last("validation/success", "rollout/success"),
        "retrieval": last("information/retrieval_acc"),
        "regime": next((record.regime for record in reversed(records) if record.regime), ""),
        "alarms": len(records[-1].alarms) if records else 0,
    }


def _searched(row: RunRow) -> str:
    return " ".join([row.name, row.state, row.env, row.model, row.algorithm, row.regime, *row.tags]).lower()


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
        "sections": [(section.question, [(panel.key, panel.title) for panel in section.panels]) for section in PAGE_SECTIONS],
        "notes": [(record.step, note) for record in reversed(records) for note in record.notes][:MOST_NOTES],
        "machine": [words for words in (machine_words(run.machine()), *fast_path_words(run.machine())) if words],
        "ending": run.finished(),
        "settings": [(name, shown(value)) for name, value in flattened(run.config()).items()],
    }


def trajectories_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """The list of episodes that fit, a page of it."""
    kept = {"": None, "yes": True, "no": False}
    if words.text("kept") not in kept:
        raise BadInput(f"kept is '{words.text('kept')}'; choose yes or no")
    wanted = Filter(
        step=words.whole("step"),
        split=words.text("split"),
        group=words.whole("group"),
        outcome=words.text("outcome"),
        stop_reason=words.text("stop_reason"),
        kept=kept[words.text("kept")],
        reward_min=words.number("reward_min"),
        reward_max=words.number("reward_max"),
        alarm=words.text("alarm"),
        text=words.text("q"),
        order=words.text("order", "newest"),
    )
    start = max(0, words.whole("start") or 0)
    found = find(run, wanted, start=start, limit=PAGE_ROWS)
    blocks = run.index().attempts()
    return {
        "wanted": wanted,
        "found": found,
        "start": start,
        "previous": max(0, start - PAGE_ROWS) if start and not wanted.text else None,
        "splits": sorted({split for _, split in blocks}),
        "steps": sorted({step for step, _ in blocks}),
        "stop_reasons": run.once("stop reasons", (TRAJECTORIES,), lambda: run.index().stop_reasons()),
        "alarm_names": sorted({name for names in standing_alarms(run.records()).values() for name in names}),
        "orders": ORDERS,
    }


@dataclass(frozen=True, slots=True)
class TurnView:
    """One exchange."""

    number: int
    observation: str
    pieces: list[Piece]
    """The sampled tokens; empty where the run has no tokenizer or the turn no token ids."""
    reasoning: str
    rest: str
    """The response cut behind its reasoning, for where there are no pieces."""
    context: str
    """What the model was given before this response and after its last one; empty without a tokenizer."""
    is_new_context: bool
    """The model was given nothing else: the first turn, or one that begins a new context."""
    reward: float | None
    penalty: float | None
    valid: bool
    finish: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EpisodeView:
    """One episode, turn by turn."""

    key: str
    record: Mapping[str, Any]
    turns: list[TurnView]
    alarms: tuple[str, ...]
    neighbours: dict[str, str]


def episode_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """One episode, or two side by side."""
    keys = [words.text("key"), *([words.text("beside")] if words.text("beside") else [])]
    return {"episodes": [_episode_view(run, key) for key in keys], "has_tokens": run_tokenizer(run) is not None}


def _episode_view(run: LiveRun, key: str) -> EpisodeView:
    record = episode(run, key)
    tokenizer = run_tokenizer(run)
    turns = [_turn_view(number, turn, tokenizer) for number, turn in enumerate(record.get("turns") or [], start=1)]
    return EpisodeView(key, record, turns, standing_alarms(run.records()).get(int(record["step"]), ()), neighbours(run, key))


def _turn_view(number: int, turn: Mapping[str, Any], tokenizer: Any | None) -> TurnView:
    response = str(turn.get("response") or "")
    end = parse_response(response).reasoning_end or 0
    return TurnView(
        number=number,
        observation=str(turn.get("observation") or ""),
        pieces=pieces(tokenizer, turn) if tokenizer is not None else [],
        reasoning=response[:end],
        rest=response[end:],
        context=context_text(tokenizer, turn) if tokenizer is not None else "",
        is_new_context=bool(turn.get("fresh", number == 1)),
        reward=turn.get("reward"),
        penalty=turn.get("penalty"),
        valid=bool(turn.get("valid")),
        finish=str(turn.get("finish") or "").replace("_", " "),
        num_tokens=len(turn.get("response_ids") or []),
    )


def groups_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """The groups of a training step, the last one by default."""
    steps = train_steps(run)
    step = words.whole("step")
    if step is None:
        step = steps[-1] if steps else None
    elif step not in steps:
        raise BadInput(f"run '{run.name}' has no training episodes at step {step}; it has steps {_range(steps)}")
    groups = step_groups(run, step) if step is not None else []
    record = next((record for record in run.records() if record.step == step), None)
    return {
        "steps": steps,
        "step": step,
        "groups": groups,
        "notes": record.notes if record else [],
        "filter": run.config().get("filter") or {},
    }


def templates_page(run: LiveRun, words: Words) -> dict[str, Any]:
    """Which steps can be searched for templates; the first and the last by default."""
    steps = train_steps(run)
    asked = [step for step in (words.whole("first"), words.whole("last")) if step is not None]
    for step in asked:
        if step not in steps:
            raise BadInput(f"run '{run.name}' has no training episodes at step {step}; it has steps {_range(steps)}")
    chosen = asked or list(dict.fromkeys((steps[0], steps[-1]))) if steps else []
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
    steps = gradient_steps(run)
    first, last = words.whole("first"), words.whole("last")
    for step in (first, last):
        if step is not None and step not in steps:
            raise BadInput(f"run '{run.name}' has no gradient decomposition at step {step}; it has steps {_range(steps)}")
    by_step = {each.step: each for each in decompositions(run.records())}
    shown_step = last if last is not None else steps[-1] if steps else None
    return {
        "steps": steps,
        "first": first if first is not None else steps[0] if steps else None,
        "last": shown_step,
        "charts": GRADIENTS if len(steps) > 1 else GRADIENTS[1:],
        "reading": reading(by_step[shown_step]) if shown_step is not None else "",
        "columns": [title for _, title in TABLE],
        "table": table(by_step[shown_step]) if shown_step is not None else [],
    }


def compare_page(catalogue: Catalogue, words: Words) -> dict[str, Any]:
    """Several runs side by side."""
    runs = [catalogue.get(name) for name in words.every("run")]
    if len(runs) < 2:
        raise BadInput("a comparison needs two runs at least; tick them in the list of runs")
    pool = words.text("pool", "yes") == "yes"
    lines = lines_of(runs, pool=pool)
    records = {run.name: run.records() for run in runs}
    return {
        "runs": [(run, verdict(records[run.name]), tiles(records[run.name]) if records[run.name] else []) for run in runs],
        "names": [run.name for run in runs],
        "lines": lines,
        "line_of": {run.name: place for place, group in enumerate(lines.groups.values()) for run in group},
        "pool": pool,
        "comparison": compare_runs(
            {run.name: run.config() for run in runs}, records, lambda name: catalogue.get(name).evaluation_prompts()
        ),
        "sections": [(section.question, [(panel.key, panel.title) for panel in section.panels]) for section in PAGE_SECTIONS],
    }


def _range(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]}" if steps else "none"
