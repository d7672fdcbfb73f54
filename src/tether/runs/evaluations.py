"""Saved evaluations: one JSON file each, with everything that a published number needs, and how two of them compare.

A result holds settings, versions, hashes of the data files, sampling, intervals, the outcome on every instance, token counts and examples.
docs/evaluation.md lists the fields. Results are compared instance by instance, on the instances that both played.
"""

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tether.core.config import flattened
from tether.core.errors import BadInput
from tether.core.files import open_to_read
from tether.core.intervals import clustered_interval, difference_interval, instance_values, mean_interval
from tether.core.text import shortened
from tether.runs.files import as_written, read_object, storage_error, write_whole

KIND = "tether evaluation"
SCHEMA = 1
"""Raised whenever a field changes its meaning."""
LEVEL = 0.95
LONGEST_RESULT = 2**30
MOST_TOLD = 4
"""Differences of tasks that a heading names."""

Result = Mapping[str, Any]


# ------------------------------------------------------------------------------------------------------------------ files


def digest(value: Any) -> str:
    """A short hash of anything that JSON can hold."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def file_digest(path: Path) -> str:
    """SHA-256 of a file; of a folder, that of the names and hashes of its files."""
    try:
        if path.is_dir():
            inside = sorted(found for found in path.rglob("*") if found.is_file())
            listing = "".join(f"{file_digest(found)}  {found.relative_to(path).as_posix()}\n" for found in inside)
            return hashlib.sha256(listing.encode()).hexdigest()
        with open_to_read(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise storage_error(path, error, doing="read") from error


def file_stem(identity: Mapping[str, Any]) -> str:
    """The name of a result's files, from what identifies the evaluation: the same command finds them again."""
    name = re.sub(r"[^\w.]+", "-", str(identity["model"]).rpartition("/")[2] or str(identity["model"])).strip("-")
    envs = "+".join(re.sub(r"[^\w.]+", "-", str(env["name"]).rpartition("://")[2] or str(env["name"])) for env in identity["environments"])
    return f"{name}-{envs}-{digest(identity)[:8]}"


def prepare_folder(folder: Path) -> None:
    """Make the folder that results go to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error


def write_result(result: Result, path: Path) -> None:
    write_whole(path, json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read_result(path: Path) -> dict[str, Any] | None:
    """A result; None for a JSON file that is something else."""
    data = read_object(path, LONGEST_RESULT)
    if data.get("kind") != KIND:
        return None
    if data.get("schema") != SCHEMA:
        raise BadInput(f"'{path}' has schema {shortened(repr(data.get('schema')))}, this Tether reads {SCHEMA}; upgrade Tether to read it")
    with as_written(path):
        boards([data]), categories(data)
        numbers = (
            *data["intervals"]["success"],
            data["metrics"]["reward_mean"],
            data["metrics"]["errors"],
            data["protocol"]["temperature"],
        )
        data["tokens"]["uncounted"], data["protocol"]["samples"], f"{math.fsum(numbers):.3f}"
    return data


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Every result under a folder, in the order of the file names."""
    if not folder.is_dir():
        raise BadInput(f"folder '{folder}' does not exist; give the folder that `tether eval --out` wrote")
    found = [(path, read_result(path)) for path in sorted(folder.rglob("*.json"))]
    results = [{**result, "file": path.stem} for path, result in found if result is not None]
    if not results:
        raise BadInput(f"folder '{folder}' holds no results; write some with: tether eval MODEL --env ENV --out {folder}")
    return results


# ------------------------------------------------------------------------------------------------------------- comparison


@dataclass(frozen=True, slots=True)
class Difference:
    """How much better the first model is than the second on the instances that both played. Example: 0.12, from 0.03 to 0.21."""

    first: str
    second: str
    success: float
    low: float
    high: float
    reward: float
    reward_interval: tuple[float, float] | None
    """None where the instances show no spread."""
    num_instances: int
    level: float = LEVEL

    @property
    def beyond_chance(self) -> bool:
        return self.low > 0 or self.high < 0


def units(result: Result) -> dict[str, tuple[list[float], list[float]]]:
    """Successes and rewards of the episodes of every distinct instance that was played, by its key."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for instance in result["instances"]:
        if instance["successes"]:
            successes, rewards = found.setdefault(instance["key"], ([], []))
            successes += map(float, instance["successes"])
            rewards += instance["rewards"]
    return found


def compare(first: Result, second: Result, level: float = LEVEL) -> Difference | None:
    """The paired difference of two results; None where no instance was played by both."""
    a, b = units(first), units(second)
    shared = [key for key in a if key in b]
    if not shared:
        return None
    success, reward = (
        [x - y for x, y in zip(*(instance_values([played[key][part] for key in shared]) for played in (a, b)), strict=True)]
        for part in (0, 1)
    )
    samples = min(len(played[key][0]) for played in (a, b) for key in shared)
    low, high = difference_interval(success, samples, level=level)
    names = (str(first["model"]["name"]), str(second["model"]["name"]))
    return Difference(*names, _mean(success), low, high, _mean(reward), mean_interval(reward), len(shared), level)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def categories(result: Result) -> dict[str, list[dict[str, Any]]]:
    """For each kind of category that the instances carry, a row for each of its values: instances, success and its interval."""
    kinds: dict[str, dict[str, dict[str, list[float]]]] = {}
    for instance in result["instances"]:
        for kind, value in instance["categories"].items():
            if instance["successes"]:
                played = kinds.setdefault(kind, {}).setdefault(value, {}).setdefault(instance["key"], [])
                played += map(float, instance["successes"])
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    for kind, found in kinds.items():
        for value in sorted(found, key=_order):
            outcomes = list(found[value].values())
            low, high = clustered_interval(outcomes)
            rate = sum(map(sum, outcomes)) / sum(map(len, outcomes))
            rows[kind].append({"value": value, "instances": len(outcomes), "success": rate, "low": low, "high": high})
    return rows


def _order(value: str) -> tuple[float, str]:
    """Numbers by size, then words."""
    return (float(value), "") if value.replace(".", "", 1).isdigit() else (float("inf"), value)


# ------------------------------------------------------------------------------------------------------------ leaderboard


@dataclass(frozen=True, slots=True)
class Board:
    """Results of one task, best first: the same environment, options, data and number of prompts."""

    title: str
    results: list[dict[str, Any]]
    differences: list[Difference]
    """Of every pair, at the level that holds for all of them together."""
    level: float

    def beyond(self, result: Result) -> list[str]:
        """The models that differ from this one beyond chance."""
        name = str(result["model"]["name"])
        return [d.second if d.first == name else d.first for d in self.differences if name in (d.first, d.second) and d.beyond_chance]


def task_key(result: Result) -> str:
    """Equal for results that may be ranked against each other: environments with options and data, and how many prompts."""
    return digest([result["environments"], result["protocol"]["prompts"]])


def boards(results: Sequence[dict[str, Any]]) -> list[Board]:
    """Results by task, ranked by success. With m pairs in a task, differences are judged at the level 1 - 0.05 / m (Bonferroni)."""
    tasks: dict[str, list[dict[str, Any]]] = {}
    for result in distinct_names(results):
        tasks.setdefault(task_key(result), []).append(result)
    found = []
    for ranked in tasks.values():
        ranked.sort(key=lambda result: -result["metrics"]["success"])
        pairs = list(itertools.combinations(ranked, 2))
        level = 1 - (1 - LEVEL) / max(1, len(pairs))
        differences = [difference for a, b in pairs if (difference := compare(a, b, level)) is not None]
        found.append(Board(task_title(ranked[0]), ranked, differences, level))
    return sorted(_with_own_titles(found), key=lambda board: board.title)


def _with_own_titles(found: Sequence[Board]) -> list[Board]:
    """The boards, with what tells them apart behind titles that several would share: what they differ in, or else a hash of the task."""
    named: dict[str, Board] = {}
    for board in found:
        title, own = board.title, _task_facts(board.results[0])
        alike = [_task_facts(other.results[0]) for other in found if other.title == title]
        if len(alike) > 1:
            names = [
                name for name in dict.fromkeys(name for facts in alike for name in facts) if len({facts.get(name) for facts in alike}) > 1
            ]
            title += f" ({told})" if (told := ", ".join(f"{name} {own.get(name, 'not set')}" for name in names[:MOST_TOLD])) else ""
        if title in named or (title == board.title and len(alike) > 1):
            title += f", task {task_key(board.results[0])[:8]}"
        named[title] = replace(board, title=title)
    return list(named.values())


def _task_facts(result: Result) -> dict[str, str]:
    """What a task is made of, each in a few words. Example: {"size": "4", "test.jsonl": "sha256 1f0c"}."""
    facts: dict[str, str] = {}
    for env in result["environments"]:
        facts |= {str(name): shortened(json.dumps(value, default=str), 40) for name, value in flattened(env["options"]).items()}
        facts |= {str(data["name"]): f"sha256 {str(data['sha256'])[:8]}" for data in env["data"].values() if "sha256" in data}
    return facts


def distinct_names(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results with names that tell them apart: where a model was evaluated twice, its sampling stands behind its name."""
    names = [str(result["model"]["name"]) for result in results]
    renamed = []
    for result, name in zip(results, names, strict=True):
        if names.count(name) > 1:
            protocol = result["protocol"]
            name = f"{name} (temperature {protocol['temperature']:g}, {result['file'].rpartition('-')[2] if 'file' in result else result['created']})"
        renamed.append({**result, "model": {**result["model"], "name": name}})
    return renamed


def task_title(result: Result) -> str:
    """Example: "metamathqa, test.jsonl, split all, 1319 prompts"."""
    parts = []
    for env in result["environments"]:
        files = [str(data["name"]) for data in env["data"].values()]
        split = [f"split {env['options']['split']}"] if "split" in env["options"] else []
        parts.append(", ".join([str(env["name"]), *files, *split]))
    return f"{' + '.join(parts)}, {result['protocol']['prompts']} prompts"
