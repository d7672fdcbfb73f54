"""Runs side by side in the terminal, for `tether reproduce` and `tether sweep`: how many, how far they are, and how it ended."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tether.runs.store import RunStore
from tether.training.side_by_side import Observer, SweepState
from tether.training.sweep import Trial

STATUS_EVERY = 60.0
"""Seconds between two lines of progress where there is no terminal to draw on."""


class SweepView(Observer):
    """Progress in the terminal: redrawn in place, or a line per finished run and a line a minute."""

    def __init__(self, console: Console, noun: str) -> None:
        self._console, self._noun = console, noun
        self._live: Live | None = None
        self._told = 0.0

    @contextmanager
    def drawing(self) -> Iterator[None]:
        if not self._console.is_terminal:
            yield
            return
        with Live(console=self._console, refresh_per_second=2) as self._live:
            yield
        self._live = None

    def on_change(self, state: SweepState) -> None:
        if self._live is not None:
            running = Table("running", "step", "success", box=None, pad_edge=False)
            for job in state.running:
                success = "" if job.success is None else f"{job.success:.1%}"
                running.add_row(job.trial.id, f"{job.step}/{job.trial.steps}", success)
            running.title, running.title_justify = Text(self._summary(state)), "left"
            self._live.update(running)
        elif state.running and time.monotonic() - self._told >= STATUS_EVERY:
            self._told = time.monotonic()
            steps = ", ".join(f"{job.trial.id} {job.step}/{job.trial.steps}" for job in state.running)
            self._console.print(f"{self._summary(state)}: {steps}", highlight=False)

    def on_finished(self, trial: Trial, folder: Path) -> None:
        store = RunStore.open(folder)
        success = [record.metrics["validation/success"] for record in store.steps() if "validation/success" in record.metrics]
        peak = f", peak success {max(success):.1%}" if success else ""
        self._console.print(f"done: {trial.id}: {store.finished}{peak}", highlight=False, markup=False)

    def on_failed(self, trial: Trial, reason: str) -> None:
        self._console.print(f"failed: {trial.id}: {reason}", style="red", highlight=False, markup=False)

    def _summary(self, state: SweepState) -> str:
        left = state.seconds_left()
        time_left = "" if left is None else f", about {left / 60:.0f} min left"
        failed = f", {len(state.failed)} failed" if state.failed else ""
        return f"{state.present + len(state.done)} of {state.total} {self._noun} done, {len(state.running)} running{failed}{time_left}"


def end(state: SweepState, console: Console, noun: str) -> None:
    """What is left to do, and the exit code: 130 after Ctrl-C, 1 if a run failed."""
    if state.failed:
        console.print(f"{len(state.failed)} {noun} failed; the next call tries them again; their logs lie beside the runs", style="red")
    if state.stopped is not None:
        left = len(state.waiting) + len(state.running)
        console.print(f"stopped: {state.stopped}; {left} {noun} are left, and the same command continues them", highlight=False)
    if state.stopped == "interrupted":
        sys.exit(130)
    if state.failed:
        sys.exit(1)
