"""`Run`: a finished or resumable run, as `tether.train` returns it and as any run folder opens."""

from pathlib import Path
from typing import Any

from tether.runs.checkpoints import MODEL, find_checkpoint
from tether.runs.schema import StepRecord
from tether.runs.store import RunStore


class Run:
    """A read-only view of a run folder.

    Example: `run = tether.train("frozen_lake", steps=20); run.metrics("validation/success")` gives {0: 0.4453125, 20: 0.8125}.
    """

    def __init__(self, path: Path | str) -> None:
        self.store = RunStore.open(Path(path))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.store.folder

    @property
    def records(self) -> list[StepRecord]:
        """One record per step, in order; step 0 is the untrained policy."""
        return self.store.steps()

    @property
    def settings(self) -> dict[str, Any]:
        """The resolved settings; training from them repeats the run."""
        return self.store.config()

    @property
    def finished(self) -> str | None:
        """How the run ended; None while it can be resumed."""
        return self.store.finished

    def metrics(self, name: str) -> dict[int, float]:
        """The values of a metric, by step; docs/metrics.md lists the names."""
        return {record.step: record.metrics[name] for record in self.records if name in record.metrics}

    def model(self, *, best: bool = False, step: int | None = None) -> Path:
        """The model folder of the newest checkpoint, of the best by validation, or of a step; `tether.load_model` reads it."""
        return find_checkpoint(self.store.checkpoints, best=best, step=step)[0] / MODEL

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r}, steps={len(self.records)}, finished={self.finished!r})"
