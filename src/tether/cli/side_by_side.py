"""Runs side by side in the terminal, for `tether reproduce` and `tether sweep`: how many, how far they are, and how it ended."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from tether.experiments.cells import Cell, CellFiles, CellRecord
    from tether.experiments.schedule import State

STATUS_EVERY = 60.0
"""Seconds between two lines of progress where there is no terminal to draw on."""


def run_side_by_side(
    cells: Sequence["Cell"],
    files: "CellFiles",
    runs: Path,
    console: Console,
    *,
    noun: str,
    jobs: int | None,
    most: int | None = None,
    max_minutes: float | None = None,
    keep_runs: bool = False,
) -> "State":
    """Run the cells that are not finished: `jobs` at a time, or as many as the device takes, at most `most`."""
    from tether.experiments.capacity import Capacity, count_cores, read_gpu
    from tether.experiments.schedule import run_cells

    if jobs is not None:
        capacity = Capacity.fixed(jobs)
    elif (gpu := read_gpu()) is not None:
        capacity = Capacity.of_gpu(gpu, count_cores(), runs / "side_by_side.json")
    else:
        capacity = Capacity.of_cores(min(count_cores(), most or count_cores()))
    view = CellsView(console, noun)
    seconds = None if max_minutes is None else 60 * max_minutes
    with view.drawing():
        return run_cells(cells, files, runs, capacity, view, commit=_commit(), max_seconds=seconds, keep_runs=keep_runs)


class CellsView:
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

    def on_change(self, state: "State") -> None:
        if self._live is not None:
            running = Table("running", "step", "success", box=None, pad_edge=False)
            for job in state.running:
                success = "" if job.success is None else f"{job.success:.1%}"
                running.add_row(job.cell.id, f"{job.step}/{job.cell.steps}", success)
            running.title, running.title_justify = Text(self._summary(state)), "left"
            self._live.update(running)
        elif state.running and time.monotonic() - self._told >= STATUS_EVERY:
            self._told = time.monotonic()
            steps = ", ".join(f"{job.cell.id} {job.step}/{job.cell.steps}" for job in state.running)
            self._console.print(f"{self._summary(state)}: {steps}", highlight=False)

    def on_done(self, cell: "Cell", record: "CellRecord") -> None:
        curve = record.curves.get("validation/success", {})
        peak = f", peak success {max(curve.values()):.1%}" if curve else ""
        self._console.print(f"done: {cell.id}: {record.finished}{peak}", highlight=False, markup=False)

    def on_failed(self, cell: "Cell", reason: str) -> None:
        self._console.print(f"failed: {cell.id}: {reason}", style="red", highlight=False, markup=False)

    def _summary(self, state: "State") -> str:
        left = state.seconds_left()
        time_left = "" if left is None else f", about {left / 60:.0f} min left"
        failed = f", {len(state.failed)} failed" if state.failed else ""
        return f"{state.present + len(state.done)} of {state.total} {self._noun} done, {len(state.running)} running{failed}{time_left}"


def end(state: "State", console: Console, noun: str) -> None:
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


def memory_bound(settings: Sequence[Any]) -> int | None:
    """How many such runs fit into memory beside each other, by the largest of them; None where that cannot be counted. Loads torch."""
    from tether.training.build import resolve_algorithm
    from tether.training.memory import plan_memory

    plans = [plan_memory(one, resolve_algorithm(one.algorithm)) for one in settings]
    if any(plan is None for plan in plans):
        return None
    return max(1, min(plan.available // max(1, plan.total) for plan in plans if plan is not None))


def _commit() -> str:
    """TETHER_COMMIT where it is set; otherwise the commit of the code that runs, with a plus if it was changed since."""
    if named := os.environ.get("TETHER_COMMIT"):
        return named
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    changed = subprocess.run(["git", "status", "--porcelain", "--", "."], cwd=folder.parent, capture_output=True, text=True, check=False)
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
