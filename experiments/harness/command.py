"""What `tether reproduce` does: run the grid of a table or figure, resume it, write its results and verdicts."""

import dataclasses
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

import tether
from harness.cells import Cell, CellFiles
from harness.claims import Verdict
from harness.grid import Library, read_library
from harness.harvest import harvest
from harness.page import finding_words, scales_of, spread_words, write_experiment, write_pages
from harness.plan import plan
from harness.results import compare, read_results
from harness.statistics import POWER
from tether.cli.console import SafeConsole
from tether.cli.side_by_side import SweepView, end
from tether.core.errors import BadInput
from tether.core.temporary import temporary_folder
from tether.runs.quantities import estimate_words
from tether.training.side_by_side import SweepState
from tether.training.sweep import Trial, parse_seeds

LEFTOVERS = ("checkpoints", "trajectories.jsonl", "trajectories.sqlite", "trajectories.index", "report.html")
"""Of a harvested run; metrics, timings and settings stay."""
PLANNED = (5, 10, 20, 100)
"""Numbers of seeds that a plan sums its claims up for."""


def reproduce(
    name: str | None,
    experiments: Path,
    runs: Path,
    *,
    scale: str,
    seeds: str | None,
    jobs: int | None,
    max_minutes: float | None,
    again: bool,
    no_run: bool,
    smoke: bool,
    list_: bool,
    plan_: bool = False,
) -> None:
    """The verb, with its options."""
    library = read_library(experiments)
    console = SafeConsole(soft_wrap=True)
    if list_:
        _list(library, console)
        return
    if name is None:
        raise BadInput("which experiment? name one, as in `tether reproduce table_4`, or see --list")
    if again and name == "all":
        raise BadInput("--again takes one experiment; name it")
    names, chosen = library.names(name), parse_seeds(seeds) if seeds is not None else None
    library.scale(scale)
    if max_minutes is not None and max_minutes <= 0:
        raise BadInput(f"--max-minutes is {max_minutes:g}; give more than 0")
    if smoke:
        with temporary_folder("tether-smoke-") as folder:
            _smoke(library, names[0], chosen, jobs, folder, console)
    elif plan_:
        _plan(library, names, scale, console)
    elif no_run:
        _pages(library, names, scale, console)
    elif again:
        _again(library, name, scale, chosen, jobs, max_minutes, runs, console)
    else:
        _reproduce(library, names, scale, chosen, jobs, max_minutes, runs, console)


class Harvester(SweepView):
    """Takes finished runs in: their numbers are kept in a small file, and most of the run folder is deleted."""

    def __init__(self, cells: Sequence[Cell], files: CellFiles, console: Console) -> None:
        super().__init__(console, "cells")
        self._cells, self._files, self._commit = {cell.id: cell for cell in cells}, files, current_commit()

    def on_finished(self, trial: Trial, folder: Path) -> None:
        cell = self._cells[trial.id]
        self._files.write(cell, harvest(cell, folder, commit=self._commit))
        super().on_finished(trial, folder)
        for path in (folder / name for name in LEFTOVERS):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def on_failed(self, trial: Trial, reason: str) -> None:
        self._files.write_failure(self._cells[trial.id], reason)
        super().on_failed(trial, reason)


def _run(cells: Sequence[Cell], files: CellFiles, runs: Path, console: Console, jobs: int | None, max_minutes: float | None) -> SweepState:
    """Train the cells that have no file yet."""
    harvester = Harvester(cells, files, console)
    present = {cell.id: cell for cell in cells}
    with harvester.drawing():
        return tether.sweep(
            cells, runs, jobs=jobs, max_minutes=max_minutes, observer=harvester, is_done=lambda trial: files.has(present[trial.id])
        )


def _reproduce(
    library: Library,
    names: Sequence[str],
    scale: str,
    seeds: list[int] | None,
    jobs: int | None,
    max_minutes: float | None,
    runs: Path,
    console: Console,
) -> None:

    cells = list({cell.id: cell for name in names for cell in library.cells(name, scale, seeds)}.values())
    if not cells:
        raise BadInput(f"{', '.join(names)} has no cells at scale {scale}; see `tether reproduce --list`")
    state = _run(cells, CellFiles(library.folder, scale), runs / scale, console, jobs, max_minutes)
    _pages(library, names, scale, console)
    end(state, console, "cells")


def _again(
    library: Library,
    name: str,
    scale: str,
    seeds: list[int] | None,
    jobs: int | None,
    max_minutes: float | None,
    runs: Path,
    console: Console,
) -> None:
    """Run the cells of an experiment in a folder of their own, and compare levels and verdicts with the published ones."""

    folder = runs / "again"
    state = _run(library.cells(name, scale, seeds), CellFiles(folder, scale), folder / scale, console, jobs, max_minutes)
    published = read_results(library, name, scale, CellFiles(library.folder, scale))
    others = read_results(library, name, scale, CellFiles(folder, scale), seeds)
    shown = Table("environment", "arm", "quantity", "published", "again", "agrees", box=None, pad_edge=False)
    words = {True: "yes", False: "no", None: "cannot tell"}
    pairs = compare(published, others)
    for pair in pairs:
        ours, theirs = (estimate_words(found.estimate, found.quantity) for found in (pair.published, pair.again))
        shown.add_row(pair.published.env, pair.published.arm, str(pair.published.quantity), ours, theirs, words[pair.agrees])
    console.print(shown)
    counts = {word: sum(words[pair.agrees] == word for pair in pairs) for word in words.values()}
    console.print(
        f"levels: {counts['yes']} agree, {counts['no']} do not, {counts['cannot tell']} cannot tell (95%: 1 in 20 differs by chance)"
    )
    for (claim, before), (_, after) in zip(published.judgements, others.judgements, strict=True):
        console.print(f"{claim.text} published: {before.verdict}; again: {after.verdict}", highlight=False, markup=False)
    end(state, console, "cells")


def _smoke(library: Library, name: str, seeds: list[int] | None, jobs: int | None, folder: Path, console: Console) -> None:
    """One environment, two arms, two steps: the same code as a real call, in a folder that is deleted."""

    small = dataclasses.replace(library.in_small(name), folder=folder)
    cells = small.cells(name, "tiny", seeds)
    files = CellFiles(folder, "tiny")
    state = _run(cells, files, folder / "runs", console, jobs, None)
    results = read_results(small, name, "tiny", files, seeds)
    written = write_experiment(small, name, [results])
    console.print(
        f"{name}: {len(results.records)} of {len(cells)} cells, {len(written)} files, verdicts: {results.verdict()} (of no meaning)"
    )
    end(state, console, "cells")


def _pages(library: Library, names: Sequence[str], scale: str, console: Console) -> None:
    """Write the pages of all experiments, which share cells, and print the verdicts of those that were asked for."""

    write_pages(library, library.shared.order)
    for name in names:
        results = read_results(library, name, scale, CellFiles(library.folder, scale))
        if not results.cells:
            continue
        console.print(f"\n{library.grids[name].title} ({scale}: {len(results.records)} of {len(results.cells)} cells)", style="bold")
        for claim, judged in results.judgements:
            console.print(f"{judged.verdict}: {claim.text}", highlight=False, markup=False)
            for finding in judged.findings if len(names) == 1 else []:
                console.print(f"    {finding_words(finding)}", highlight=False, markup=False)
        if len(names) == 1:
            console.print(f"written: {library.folder / name / 'README.md'}", highlight=False)


def _plan(library: Library, names: Sequence[str], scale: str, console: Console) -> None:
    """For every open claim: effect and spread of a seed, the seeds that would tell it, and their cost."""
    console.print(
        f"Seeds for a power of {POWER:g}, if effects and spread stay what the cells say; seconds are of steps, as the cells took them."
    )
    seeds, num_open, num_claims = list[int](), 0, 0
    for name in names:
        results = read_results(library, name, scale, CellFiles(library.folder, scale))
        num_claims += len(results.judgements)
        for claim, judged in results.judgements:
            if judged.verdict is not Verdict.CANNOT_TELL:
                continue
            found, num_open = plan(claim, judged, results), num_open + 1
            seeds += [found.seeds] if found.seeds else []
            more = f"; {found.seconds:.0f} s for the further ones" if found.seeds else ""
            console.print(f"\n{name}: {claim.text}\n  {found.words()}, has {found.now}{more}", highlight=False, markup=False)
            for finding in judged.findings:
                console.print(f"    {finding_words(finding)}{spread_words(finding)}", highlight=False, markup=False)
    shown = ", ".join(f"{sum(needed <= most for needed in seeds)} need up to {most} seeds" for most in PLANNED)
    console.print(f"\n{num_open} of {num_claims} claims cannot be told at {scale}: {shown}", highlight=False)


def _list(library: Library, console: Console) -> None:

    for name in library.shared.order:
        grid = library.grids[name]
        console.print(f"{name}", style="bold", end="")
        console.print(f"  {grid.claim}", highlight=False, markup=False)
        for scale in scales_of(library, name):
            results = read_results(library, name, scale, CellFiles(library.folder, scale))
            left = library.scale(scale).minutes_of(cell for cell in results.cells if cell.id not in results.records)
            cost = f", about {left:.0f} min of one GPU left" if left else ""
            console.print(
                f"    {scale}: {len(results.records)} of {len(results.cells)} cells{cost}; {results.verdict()}",
                highlight=False,
                markup=False,
            )

    for scale in library.shared.scales:
        every = {cell.id: cell for name in library.grids for cell in library.own_cells(name, scale)}
        missing = [cell for cell in every.values() if not CellFiles(library.folder, scale).has(cell)]
        minutes, done = library.scale(scale).minutes_of(missing), len(every) - len(missing)
        console.print(f"all at {scale}: {done} of {len(every)} cells, about {minutes:.0f} min of one GPU left", highlight=False)


def current_commit() -> str:
    """TETHER_COMMIT where it is set; otherwise the commit of the code that runs, with a plus if it was changed since."""
    if named := os.environ.get("TETHER_COMMIT"):
        return named
    folder = Path(__file__).parent
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=folder, capture_output=True, text=True, check=False)
    if head.returncode != 0:
        return "unknown"
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "."], cwd=folder.parents[1], capture_output=True, text=True, check=False
    )
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")
