"""Which runs may be ranked against each other, and how their settings differ.

A success rate is one of a task: runs are ranked only if their environments, the options of these, and their evaluation (settings and prompts) are
the same. Everything else may differ, and is what a comparison is about. Other runs are shown side by side, with the reason.

The settings are those of config.yaml, which holds every option that the run was made with. The prompts are compared as they were played, because
a data file can change under the same name: the first observations of the last validation on record.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.config import flattened
from tether.core.enums import Split
from tether.core.shares import percent
from tether.core.text import shortened
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore
from tether.runs.verdict import comparison, validation

NOT_RECORDED = "not recorded"
SAME_EVALUATION = ("evaluation.prompts", "evaluation.temperature", "evaluation.samples", "evaluation.env")
NOT_THE_TASK = ("env.step_timeout", "env.weight")
"""Settings of an environment that do not change its instances. Weights count where there are several environments."""
DEFAULTS: dict[str, Any] = {"evaluation.samples": 1, "evaluation.env": None, "also": []}
"""What settings meant in runs of before they existed."""
MOST_NAMED = 3
MOST_SHOWN = 80
"""Characters of a setting's value in a sentence."""

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SettingDifference:
    """A setting that differs. Example: SettingDifference("env.options.size", ("4", "6"), True)."""

    key: str
    values: tuple[str, ...]
    """Of each run, in order."""
    is_task: bool
    """Whether runs that differ in it are of different tasks."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Several runs, ranked or not."""

    sentence: str
    is_ranked: bool
    differences: tuple[SettingDifference, ...]


def compare_runs(
    configs: Mapping[str, Config], records: Mapping[str, Sequence[StepRecord]], prompts: Callable[[str], frozenset[str]]
) -> Comparison:
    """The runs by name: ranked where they are of one task, with the settings that differ. `prompts` are those of a run's last validation; they
    are asked for only where the settings allow a ranking."""
    differences = settings_difference(configs)
    reasons = why_not_ranked(configs, differences)
    # As far as prompts are on record.
    if not reasons and len(played := {found for name in configs if (found := prompts(name))}) > 1:
        shared, most = frozenset.intersection(*played), max(map(len, played))
        reasons = [f"the runs were not evaluated on the same prompts, they share {len(shared)} of {most}"]
    if not reasons:
        return Comparison(comparison(records), True, differences)
    ends = [f"{name} {percent(rates[-1].value)}" for name in configs if (rates := validation(records[name]))]
    beside = f" Side by side, validation success at the end: {', '.join(ends)}." if ends else ""
    return Comparison(f"Not ranked: {'; '.join(reasons)}.{beside}", False, differences)


def settings_difference(configs: Mapping[str, Config]) -> tuple[SettingDifference, ...]:
    """The settings that are not the same in all runs; those of the task first."""
    flat = [DEFAULTS | flattened(config) for config in configs.values()]
    mixed = any(values.get("also") != [] for values in flat)
    keys = dict.fromkeys(key for values in flat for key in values)
    found = []
    for key in keys:
        if any(key not in values or values[key] != flat[0].get(key, NOT_RECORDED) for values in flat):
            of_task = key.startswith(("env.", "also", "evaluation.env.")) or key in SAME_EVALUATION
            is_task = of_task and (key not in NOT_THE_TASK or (mixed and key == "env.weight"))
            found.append(SettingDifference(key, tuple(shown(values[key]) if key in values else NOT_RECORDED for values in flat), is_task))
    return tuple(sorted(found, key=lambda difference: not difference.is_task))


def why_not_ranked(configs: Mapping[str, Config], differences: Sequence[SettingDifference]) -> list[str]:
    """Why the settings of these runs forbid a ranking; empty where they do not."""
    silent = [name for name, config in configs.items() if "env.name" not in flattened(config)]
    if silent:
        return [f"{' and '.join(silent)} {'does' if len(silent) == 1 else 'do'} not record the environment"]
    task = [difference for difference in differences if difference.is_task]
    if not task:
        return []
    named = [
        f"{difference.key} ({', '.join(shortened(value, MOST_SHOWN) for value in difference.values)})" for difference in task[:MOST_NAMED]
    ]
    more = f" and {len(task) - MOST_NAMED} more" if len(task) > MOST_NAMED else ""
    return [f"the runs are not of one task, they differ in {', '.join(named)}{more}"]


def shown(value: Any) -> str:
    """A setting's value in a few words; single values as they are written on the command line.

    >>> shown(True), shown(None), shown("top_p"), shown([1, 2]), shown(1e-6), shown([{"name": "sokoban", "options": {"size": 6}}])
    ('true', 'null', 'top_p', '1, 2', '1e-06', 'name sokoban, options (size 6)')
    """
    if isinstance(value, list):
        return ("; " if any(isinstance(inner, dict) for inner in value) else ", ").join(map(shown, value)) if value else "none"
    if isinstance(value, dict):
        inside = {name: f"({shown(inner)})" if isinstance(inner, dict) else shown(inner) for name, inner in value.items()}
        return ", ".join(f"{name} {inner}" for name, inner in inside.items()) if inside else "none"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def evaluation_prompts(store: RunStore, records: Sequence[StepRecord]) -> frozenset[str]:
    """The first observations of the last validation on record; empty where its episodes were not kept. Errored ones may have none."""
    rates = validation(records)
    if not rates:
        return frozenset()
    episodes = store.trajectories(rates[-1].step, Split.VALIDATION.value)
    return frozenset(
        f"{episode.get('env', '')}\n{episode['turns'][0].get('observation', '')}" for episode in episodes if episode.get("turns")
    )
