"""Weights & Biases. Without credentials, or with WANDB_MODE=offline, the run is kept in RUN/wandb for `wandb sync`."""

import os
from collections.abc import Mapping

import wandb

from tether.runs.trackers import PROJECT, TrackedRun


class WeightsAndBiases:
    """One W&B run per Tether run; a resumed one continues it by its id."""

    errors = (wandb.Error,)

    def __init__(self, run: TrackedRun) -> None:
        mode = os.environ.get("WANDB_MODE")
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


make = WeightsAndBiases
