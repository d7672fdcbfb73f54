"""MLflow: the server of MLFLOW_TRACKING_URI, or a database mlflow.db beside the run folder, which `mlflow ui` shows."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow.entities import Metric, Param
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from tether.runs.trackers import PROJECT, TrackedRun

RUN_ID_TAG = "tether.run"
PARAM_CHARACTERS = 500
"""MLflow refuses longer values."""


class Mlflow:
    """One MLflow run per Tether run, found again by a tag."""

    errors = (MlflowException, OSError)

    def __init__(self, run: TrackedRun) -> None:
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
        now = int(1000 * time.time())
        self._client.log_batch(self._id, metrics=[Metric(_named(name), value, now, step) for name, value in metrics.items()])

    def close(self) -> None:
        self._client.set_terminated(self._id)


def _named(name: str) -> str:
    """MLflow's names hold letters, digits and few signs: pass@4 becomes pass_at_4."""
    return re.sub(r"[^\w\-./ ]", "_", name.replace("@", "_at_"))


make = Mlflow
