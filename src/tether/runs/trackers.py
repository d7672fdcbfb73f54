"""Experiment trackers: the numbers of a run, sent to where its users look. One small interface, one class per tracker.

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

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput, MissingDependency, UnknownName, did_you_mean
from tether.runs.files import read_object, write_whole

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Each a class here, and the name of the package it needs, which is imported where it is used, and of the extra that brings it."""
PROJECT = "tether"
"""Under which a tracker files the run, unless its own environment variable names another."""
STATE = "trackers.json"
RUN_ID_TAG = "tether.run"
PARAM_CHARACTERS = 500
"""MLflow refuses longer values."""


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


class Tracker(ABC):
    """A place that numbers are sent to. Made by `open_tracker`."""

    errors: tuple[type[Exception], ...] = (OSError,)
    """What it raises when it cannot be reached or written to."""

    @abstractmethod
    def __init__(self, run: TrackedRun) -> None: ...

    @abstractmethod
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """The numbers of a step; a second call for a step brings what has changed."""

    @abstractmethod
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
    errors: tuple[type[Exception], ...] = (OSError, RuntimeError) if name == "trackio" else (OSError,)
    if name == "wandb":
        errors = (importlib.import_module("wandb").Error,)
    elif name == "mlflow":
        errors = (importlib.import_module("mlflow.exceptions").MlflowException, OSError)
    try:
        made = _CLASSES[name](run)
    except errors as error:  # nothing was trained yet
        reason = " ".join(str(error).split()) or type(error).__name__
        raise BadInput(f"tracker '{name}' cannot start: {reason}; check its settings, or leave it out") from error
    made.errors = errors
    return made


def run_id(folder: Path) -> str:
    """The id of the run in this folder, made at its first call and kept there."""
    path = folder / STATE
    if os.path.lexists(path):
        if not isinstance(known := read_object(path).get("id"), str):
            raise BadInput(f"'{path}' has no id; delete it, and trackers begin a new curve")
        return known
    made = uuid.uuid4().hex[:12]
    write_whole(path, json.dumps({"id": made}) + "\n")
    return made


class TensorBoard(Tracker):
    """Event files in RUN/tensorboard, written by torch's own writer: scalars by step. Steps that a resumed run plays again replace those that were there."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A purge makes the reader drop what was written from that step on.
        self._writer = SummaryWriter(run.folder / "tensorboard", purge_step=run.first_step)
        self._writer.add_text("settings", "\n".join(f"    {key}: {value}" for key, value in run.config.items()), run.first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """One W&B run per Tether run; a resumed one continues it by its id."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE")  # wandb checks it
        if mode is None and not wandb.login(prompt=False):
            mode = "offline"
            run.say(
                f"wandb: no credentials found (`wandb login`), so the run is tracked offline; later: wandb sync {run.folder}/wandb/offline-run-*"
            )
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume=None if mode == "offline" else "allow",
            dir=run.folder,
            config=dict(run.config),
            mode=mode,
            settings=wandb.Settings(console="off", silent=True),  # the console belongs to the live view
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class Trackio(Tracker):
    """One trackio run per Tether run; a resumed one continues it by its name, which holds the run's id."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        with contextlib.redirect_stdout(io.StringIO()):  # it prints how to open its dashboard; so does docs/trackers.md
            self._run = trackio.init(
                project=os.environ.get("TRACKIO_PROJECT", PROJECT),
                name=f"{run.name}-{run.id}",
                config=dict(run.config),
                resume="allow",
                embed=False,
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._run.finish()


class Mlflow(Tracker):
    """One MLflow run per Tether run, found again by a tag."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        local = f"sqlite:///{Path(run.folder).absolute().parent / 'mlflow.db'}"  # MLflow refuses plain folders since 3.17
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or local)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_ID_TAG}` = '{run.id}'")
        if earlier:
            self._id = earlier[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
            return
        self._id = self._client.create_run(experiment, run_name=run.name, tags={RUN_ID_TAG: run.id}).info.run_id
        params = [Param(_named(key), str(value)[:PARAM_CHARACTERS]) for key, value in run.config.items()]
        for start in range(0, len(params), 100):  # as many as a server takes at once
            self._client.log_batch(self._id, params=params[start : start + 100])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(_named(name), value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _named(name: str) -> str:
    """MLflow's names hold letters, digits and few signs: pass@4 becomes pass_at_4."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))


_CLASSES: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": Mlflow}
