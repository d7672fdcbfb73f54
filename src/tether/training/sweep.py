"""A sweep: every combination of some settings, each under the same seeds, trained side by side, and the table of their results.

    trials = sweep_trials({"env": {"name": "frozen_lake"}}, variants(["learner.learning_rate=1e-5,1e-4"]), seeds=range(3))
    state = tether.sweep(trials, Path("runs/sweep"))
    rows = table_rows(trials, Path("runs/sweep"), [Quantity.parse("last validation/success")])

    OUT/ID/            the run folder of a trial, which `tether report` and `tether eval` read; its log and settings beside it
    OUT/sweep.json     the table

The id of a trial is its name and a hash of its settings: the same command resumes, and a folder may hold several sweeps. The hash is taken of
the settings that decide the result, as far as they differ from the defaults of their environment, model and algorithm: two spellings of one run
are one trial, and a new setting with a default does not change the id of an old one. Settings that decide only speed, memory or disk do not enter.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

from tether.core.config import flattened, merge
from tether.core.errors import BadInput, ConfigError
from tether.core.intervals import Estimate, contrast
from tether.envs.wording import EXAMPLE
from tether.runs.quantities import Curves, Quantity
from tether.runs.store import ABOUT, RunStore
from tether.training.agent import Agent
from tether.training.resolve import overrides, resolve_settings

RESULT = "sweep.json"
MOST_RUNS = 1000
"""More than this is surely a slip of the keys."""
_OPENING, _CLOSING = "[{(", "]})"
_LONGEST_NAME = 80

WITHOUT_EFFECT = (
    "checkpoint",
    "model.device",
    "env.step_timeout",
    "env.weight",
    "rollout.max_rows",
    "rollout.cache_gb",
    "rollout.speculative_tokens",
    "rollout.error_retries",
    "learner.micro_tokens",
    "learner.packing",
    "learner.share_prompts",
    "learner.gradient_checkpointing",
)
"""Dotted keys of settings that do not decide what a run learns or measures."""
UNKNOWN_MODEL = "any/model"
"""A model of which nothing is known: all that a run says of how it is asked counts."""
ALWAYS = ("env.name", "model.name", "algorithm.name", "steps", "seed")
"""Keys that are part of an identity, defaults or not."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One run of a sweep. Example id: "frozen_lake-learning_rate=1e-5-seed0-1f6b09ac"."""

    id: str
    name: str
    """What it varies; the trials of one name differ in their seed."""
    seed: int
    steps: int
    settings: dict[str, Any]
    """As given to `tether train`."""
    identity: dict[str, Any]
    """The dotted settings behind the hash."""

    @classmethod
    def of(cls, env: str, name: str, seed: int, settings: dict[str, Any]) -> "Trial":
        """The trial of these settings, which are checked; `env` begins its id."""
        identity = identity_of(settings)
        digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
        return cls(f"{env}-{name}-seed{seed}-{digest}", name, seed, int(identity["steps"]), settings, identity)


def identity_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted settings that decide the result of a run, where they differ from the defaults; every setting is checked on the way."""
    resolved = flattened(resolve_settings(None, settings, {}).model_dump(mode="json"))
    plain = {section: {"name": resolved[f"{section}.name"]} for section in ("env", "model", "algorithm")}
    if Agent.read(resolved["model.name"]) is not None:  # or an id would depend on whether the model's folder is there
        plain["model"] = {"name": UNKNOWN_MODEL}
    defaults = flattened(resolve_settings(None, plain, {}).model_dump(mode="json"))
    if resolved.get("env.options.instructions") == EXAMPLE:
        defaults |= {"env.options.few_shot": 0}  # none, as in cells that are older than the option; other wordings show none by themselves
    # A value of the algorithm that is given counts, also where it is the preset's own: it did when the first cells were published.
    always = {*ALWAYS, *(f"algorithm.{key}" for key in settings.get("algorithm") or {})}
    return {
        key: value
        for key, value in sorted(resolved.items())
        if key in always or (value != defaults.get(key) and not any(key == name or key.startswith(f"{name}.") for name in WITHOUT_EFFECT))
    }


@dataclass(frozen=True, slots=True)
class Variant:
    """One combination. Example: Variant({"learner.learning_rate": "1e-6"}, {"learner": {"learning_rate": 1e-06}})."""

    values: dict[str, str]
    """The settings that the sweep varies, as they were written."""
    settings: dict[str, Any]
    """Everything that was set."""

    @property
    def name(self) -> str:
        """For ids and file names."""
        words = "-".join(f"{key.rpartition('.')[2]}={value}" for key, value in self.values.items())
        return re.sub(r"[^\w.=+-]+", "_", words)[:_LONGEST_NAME] or "base"


def split_values(text: str) -> list[str]:
    """The values of `a,b,c`; commas inside brackets or quotes do not separate.

    >>> split_values("1e-6,3e-6"), split_values("[1, 2],[3]"), split_values('"a,b"')
    (['1e-6', '3e-6'], ['[1, 2]', '[3]'], ['"a,b"'])
    """
    values, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        depth += (not quote) * ((sign in _OPENING) - (sign in _CLOSING))
        if sign == "," and not quote and depth <= 0:
            values.append("")
        else:
            values[-1] += sign
    return [value.strip() for value in values]


def variants(pairs: Iterable[str]) -> list[Variant]:
    """The cross product of `key=value,value` pairs, the last key varying fastest."""
    choices: list[list[tuple[str, str, bool]]] = []
    for pair in pairs:
        key, equals, raw = pair.partition("=")
        values = split_values(raw)
        if not equals or not key.strip() or (len(values) > 1 and "" in values):
            raise ConfigError(f"--set got '{pair}'; write it as key=value or key=value,value, for example learner.learning_rate=1e-6,3e-6")
        if len(set(values)) < len(values):
            raise ConfigError(f"--set {key.strip()} has a value twice ({raw}); give each once")
        choices.append([(key.strip(), value, len(values) > 1) for value in values])
    keys = [options[0][0] for options in choices]
    if twice := [key for key in dict.fromkeys(keys) if keys.count(key) > 1]:
        raise ConfigError(f"--set {twice[0]} was given twice; give its values with commas between")
    return [
        Variant(
            {key: value for key, value, varies in combination if varies},
            overrides([f"{key}={value}" for key, value, _ in combination]),
        )
        for combination in itertools.product(*choices)
    ]


def parse_seeds(text: str) -> list[int]:
    """Seeds from words such as "0-2" or "0,3,5-6".

    >>> parse_seeds("0,3,5-6")
    [0, 3, 5, 6]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        last = last if dash else first
        if not first.isdigit() or not last.isdigit() or int(last) < int(first):
            raise BadInput(f"seeds are '{text}'; write them as 0-2 or 0,3,5")
        seeds += range(int(first), int(last) + 1)
    return list(dict.fromkeys(seeds))


def sweep_trials(base: Mapping[str, Any], chosen: Sequence[Variant], seeds: Sequence[int]) -> list[Trial]:
    """The trials of a sweep, seed by seed, so that whole comparisons finish early. Every setting is checked on the way."""
    if len(chosen) * len(seeds) > MOST_RUNS:
        raise BadInput(f"the sweep has {len(chosen)} x {len(seeds)} runs; {MOST_RUNS} are the most")
    trials = []
    for seed in seeds:
        for variant in chosen:
            settings: dict[str, Any] = reduce(merge, [variant.settings, {"seed": seed}], dict(base))
            env = re.sub(r"\W+", "_", str((settings.get("env") or {}).get("name", ""))) or "run"
            trials.append(Trial.of(env, variant.name, seed, settings))
    ids = [trial.id for trial in trials]
    if twice := next((one for one in ids if ids.count(one) > 1), None):
        raise BadInput(f"two combinations are the same run ({twice}); give values that differ")
    return trials


# ------------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True, slots=True)
class Row:
    """One variant in the table."""

    values: dict[str, str]
    done: int
    planned: int
    levels: dict[str, Estimate]
    """By quantity, over the seeds that are done."""
    by_seed: dict[str, dict[int, float]]
    difference: Estimate | None
    """Of the first quantity to that of the first row, within seeds where both have two of them."""


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a run that ended by itself."""
    return (folder / ABOUT).is_file() and RunStore.open(folder).finished is not None


def run_curves(store: RunStore) -> Curves:
    """Every metric of a run, by step."""
    curves: dict[str, dict[int, float]] = {}
    for record in store.steps():
        for name, value in record.metrics.items():
            curves.setdefault(name, {})[record.step] = value
    return curves


def table_rows(trials: Sequence[Trial], folder: Path, chosen: Sequence[Variant], quantities: Sequence[Quantity]) -> list[Row]:
    """The table from the runs that are finished."""
    curves = {trial.id: run_curves(RunStore.open(folder / trial.id)) for trial in trials if is_finished(folder / trial.id)}
    rows: list[Row] = []
    first = str(quantities[0])
    for variant in chosen:
        own = [trial for trial in trials if trial.name == variant.name]
        by_seed: dict[str, dict[int, float]] = {}
        for quantity in quantities:
            found = {trial.seed: quantity.of(curves[trial.id], trial.steps) for trial in own if trial.id in curves}
            by_seed[str(quantity)] = {seed: value for seed, value in sorted(found.items()) if value is not None}
        lead = rows[0].by_seed[first] if rows else {}
        compared = [(1.0, by_seed[first]), (-1.0, lead)]
        rows.append(
            Row(
                variant.values,
                sum(trial.id in curves for trial in own),
                len(own),
                {str(each): each.level(list(by_seed[str(each)].values())) for each in quantities if by_seed[str(each)]},
                by_seed,
                contrast(compared, quantities[0].bounds) if lead and by_seed[first] else None,
            )
        )
    return rows


def to_json(rows: Sequence[Row], failed: Mapping[str, str]) -> str:
    """The table as a file."""

    def values(estimate: Estimate) -> dict[str, Any]:
        interval = [estimate.low, estimate.high] if estimate.has_interval and estimate.error else None
        return {"value": estimate.value, "interval": interval, "n": estimate.num, "how": estimate.how}

    data = {
        "rows": [
            {
                "settings": row.values,
                "done": row.done,
                "planned": row.planned,
                "quantities": {
                    name: {**values(found), "by_seed": {str(seed): value for seed, value in row.by_seed[name].items()}}
                    for name, found in row.levels.items()
                },
                "against_first_row": values(row.difference) if row.difference is not None else None,
            }
            for row in rows
        ],
        "failed": dict(failed),
    }
    return json.dumps(data, indent=1) + "\n"
