"""Experiment trackers: the numbers of a run, sent to where its users look. One small protocol, one module per tracker.

    tether train frozen_lake --track tensorboard --track wandb          trackers: [tensorboard, wandb]

| tracker | where it writes | without a network |
|---|---|---|
| `tensorboard` | RUN/tensorboard | always local |
| `wandb` | the account of `wandb login`, project WANDB_PROJECT or "tether" | RUN/wandb, for `wandb sync` |
| `trackio` | its local database, project TRACKIO_PROJECT or "tether" | always local |
| `mlflow` | MLFLOW_TRACKING_URI, or mlflow.db beside the run folder | always local there |

metrics.jsonl stays the record of a run; a tracker gets a copy. What a tracker needs to continue its curve after a resume is kept in
RUN/trackers.json. A tracker that fails never ends a run: it gets nothing more, and the reason is said.
"""

import importlib
import importlib.util
import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tether.core.errors import BadInput, MissingDependency, UnknownName, did_you_mean
from tether.runs.files import write_whole

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Each a module here, and the name of the package it needs and of the extra that brings it."""
PROJECT = "tether"
"""Under which a tracker files the run, unless its own environment variable names another."""
STATE = "trackers.json"


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """What a tracker is told of a run."""

    folder: Path
    config: Mapping[str, Any]
    """Every setting, by its dotted name."""
    first_step: int
    """The first step that will be sent; above 0 in a resumed run, whose later steps were sent before and are played again."""
    id: str
    """Of the run, the same after a resume."""
    say: Callable[[str], None]
    """Tells the user something worth knowing before the first step."""

    @property
    def name(self) -> str:
        return self.folder.name


class Tracker(Protocol):
    """A place that numbers are sent to. Made by `open_tracker`, with the run as its only argument."""

    errors: tuple[type[Exception], ...]
    """What it raises when it cannot be reached or written to."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step; a second call for a step brings what has changed."""

    def close(self) -> None:
        """Everything was sent."""


def check_tracker(name: str) -> str:
    """The name, if there is such a tracker and its package is installed."""
    if name not in TRACKERS:
        raise UnknownName(f"unknown tracker '{name}': {did_you_mean(name, TRACKERS)}")
    if importlib.util.find_spec(name) is None:
        raise MissingDependency(
            f"tracker '{name}' needs the package {name}, which is not installed; run: pip install 'tether-agents[{name}]'"
        )
    return name


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """The tracker of this name, ready for the first step."""
    check_tracker(name)
    make = importlib.import_module(f"tether.runs.trackers.{name}").make
    try:
        made: Tracker = make(run)
    except make.errors as error:  # nothing was trained yet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"tracker '{name}' cannot start: {reason}; check its settings, or leave it out") from error
    return made


def run_id(folder: Path) -> str:
    """The id of the run in this folder, made at its first call and kept there."""
    path = folder / STATE
    if path.is_file():
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    made = uuid.uuid4().hex[:12]
    write_whole(path, json.dumps({"id": made}) + "\n")
    return made


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flat({"env": {"name": "sokoban"}, "steps": 3})
    {'env.name': 'sokoban', 'steps': 3}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return found
