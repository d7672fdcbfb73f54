"""Settings of several runs side by side: what differs, and which runs are seeds of the same settings."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tether.dashboard.catalogue import LiveRun

NOT_SETTINGS = ("seed", "tags")
"""Runs that differ in these alone are repetitions of one another."""
ABSENT = "—"


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted name.

    >>> flattened({"env": {"name": "sokoban", "options": {}}, "steps": 3})
    {'env.name': 'sokoban', 'env.options': {}, 'steps': 3}
    """
    found: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            found |= flattened(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """Every setting that is not the same everywhere, with its value in each; a dash where a run has no such setting."""
    flat = [flattened(config) for config in configs]
    names = dict.fromkeys(name for each in flat for name in each)
    rows = [(name, [shown(each[name]) if name in each else ABSENT for each in flat]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def shown(value: Any) -> str:
    """A setting's value as it is written on the command line.

    >>> shown(True), shown(None), shown("top_p"), shown([1, 2]), shown(1e-6)
    ('true', 'null', 'top_p', '[1, 2]', '1e-06')
    """
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def is_same_task(runs: Sequence[LiveRun]) -> bool:
    """Whether the runs are evaluated on the same prompts of the same environment, so that their success can be ranked."""
    configs = [run.config() for run in runs]
    return all(config.get(part) == configs[0].get(part) for config in configs for part in ("env", "also", "evaluation"))


def seed_groups(runs: Sequence[LiveRun]) -> list[list[LiveRun]]:
    """The runs in order, those that differ in nothing but the seed together."""
    groups: dict[str, list[LiveRun]] = {}
    for run in runs:
        kept = {name: value for name, value in flattened(run.config()).items() if name not in NOT_SETTINGS}
        groups.setdefault(json.dumps(kept, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def group_name(runs: Sequence[LiveRun]) -> str:
    """What a group of seeds is called: its run, or what their names begin with and how many there are.

    The names of seeds mostly differ in their ends: `sokoban-seed0` and `sokoban-seed1` are `sokoban-seed* (2 seeds)`.
    """
    if len(runs) == 1:
        return runs[0].name
    names = [run.name for run in runs]
    common = 0
    while all(len(name) > common and name[common] == names[0][common] for name in names):
        common += 1
    return f"{names[0][:common]}* ({len(runs)} seeds)"
