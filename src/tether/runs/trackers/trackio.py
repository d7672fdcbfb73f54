"""trackio: a local database with W&B's calls; `trackio show` opens it."""

import contextlib
import io
import os
from collections.abc import Mapping

import trackio

from tether.runs.trackers import PROJECT, TrackedRun


class Trackio:
    """One trackio run per Tether run; a resumed one continues it by its name, which holds the run's id."""

    errors = (OSError, RuntimeError)

    def __init__(self, run: TrackedRun) -> None:
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


make = Trackio
