"""`tether reproduce`: run the grid of a table or figure, resume it, write its results and verdicts."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tether.cli.side_by_side import end, run_side_by_side
from tether.cli.terminal import SafeConsole
from tether.core.errors import BadInput

if TYPE_CHECKING:
    from tether.experiments.grid import Library

EXAMPLES = """\b
Examples:
  tether reproduce --list
  tether reproduce table_4 --smoke
  tether reproduce table_4 --jobs 12
  tether reproduce all --max-minutes 25
  tether reproduce figure_5_14 --scale qwen-1.5b --seeds 0
  tether reproduce table_6 --again --seeds 3-5
"""


def reproduce(
    name: Annotated[str | None, typer.Argument(help="An experiment, see --list, or all.")] = None,
    scale: Annotated[str, typer.Option(help="tiny or qwen-1.5b.")] = "tiny",
    seeds: Annotated[str | None, typer.Option(help="Other seeds than the grid's, such as 3-5 or 0,2.")] = None,
    jobs: Annotated[int | None, typer.Option(help="Runs side by side; by default as many as the device takes, measured.")] = None,
    max_minutes: Annotated[float | None, typer.Option(help="End cleanly after this time; the next call resumes.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run published cells anew, beside them, and compare.")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; write the pages from the cells that are there.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few tiny cells in a temporary folder, to see that it works.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments with their cells, verdicts and cost.")] = False,
    experiments: Annotated[Path, typer.Option(help="Folder of the experiments.")] = Path("experiments"),
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/reproduce"),
) -> None:
    """Run the grid of a table or figure of the paper; cells that are done are never run again; writes tables, plots and verdicts."""
    from tether.experiments.grid import parse_seeds, read_library

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
        with tempfile.TemporaryDirectory(prefix="tether-smoke-") as folder:
            _smoke(library, names[0], chosen, jobs, Path(folder), console)
    elif no_run:
        _pages(library, names, scale, console)
    elif again:
        _again(library, name, scale, chosen, jobs, max_minutes, runs, console)
    else:
        _reproduce(library, names, scale, chosen, jobs, max_minutes, runs, console)


def _reproduce(
    library: "Library",
    names: Sequence[str],
    scale: str,
    seeds: list[int] | None,
    jobs: int | None,
    max_minutes: float | None,
    runs: Path,
    console: Console,
) -> None:
    from tether.experiments.cells import CellFiles

    cells = list({cell.id: cell for name in names for cell in library.cells(name, scale, seeds)}.values())
    if not cells:
        raise BadInput(f"{', '.join(names)} has no cells at scale {scale}; see `tether reproduce --list`")
    state = run_side_by_side(
        cells, CellFiles(library.folder, scale), runs / scale, console, noun="cells", jobs=jobs, max_minutes=max_minutes
    )
    _pages(library, names, scale, console)
    end(state, console, "cells")


def _again(
    library: "Library",
    name: str,
    scale: str,
    seeds: list[int] | None,
    jobs: int | None,
    max_minutes: float | None,
    runs: Path,
    console: Console,
) -> None:
    """Run the cells of an experiment in a folder of their own, and compare levels and verdicts with the published ones."""
    from tether.experiments.cells import CellFiles
    from tether.experiments.page import estimate_words
    from tether.experiments.results import compare, read_results

    folder = runs / "again"
    state = run_side_by_side(
        library.cells(name, scale, seeds),
        CellFiles(folder, scale),
        folder / scale,
        console,
        noun="cells",
        jobs=jobs,
        max_minutes=max_minutes,
    )
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


def _smoke(library: "Library", name: str, seeds: list[int] | None, jobs: int | None, folder: Path, console: Console) -> None:
    """One environment, two arms, two steps: the same code as a real call, in a folder that is deleted."""
    import dataclasses

    from tether.experiments.cells import CellFiles
    from tether.experiments.page import write_experiment
    from tether.experiments.results import read_results

    small = dataclasses.replace(library.in_small(name), folder=folder)
    cells = small.cells(name, "tiny", seeds)
    files = CellFiles(folder, "tiny")
    state = run_side_by_side(cells, files, folder / "runs", console, noun="cells", jobs=jobs)
    results = read_results(small, name, "tiny", files, seeds)
    written = write_experiment(small, name, [results])
    console.print(
        f"{name}: {len(results.records)} of {len(cells)} cells, {len(written)} files, verdicts: {results.verdict()} (of no meaning)"
    )
    end(state, console, "cells")


def _pages(library: "Library", names: Sequence[str], scale: str, console: Console) -> None:
    """Write the pages of all experiments, which share cells, and print the verdicts of those that were asked for."""
    from tether.experiments.cells import CellFiles
    from tether.experiments.page import finding_words, write_pages
    from tether.experiments.results import read_results

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


def _list(library: "Library", console: Console) -> None:
    from tether.experiments.cells import CellFiles
    from tether.experiments.page import scales_of
    from tether.experiments.results import read_results

    for name in library.shared.order:
        grid = library.grids[name]
        console.print(f"{name}", style="bold", end="")
        console.print(f"  {grid.claim}", highlight=False, markup=False)
        for scale in scales_of(library, name):
            results = read_results(library, name, scale, CellFiles(library.folder, scale))
            left = sum(cell.id not in results.records for cell in results.cells) * library.scale(scale).minutes
            cost = f", about {left:.0f} min of one GPU left" if left else ""
            console.print(
                f"    {scale}: {len(results.records)} of {len(results.cells)} cells{cost}; {results.verdict()}",
                highlight=False,
                markup=False,
            )

    for scale in library.shared.scales:
        every = {cell.id: cell for name in library.grids for cell in library.own_cells(name, scale)}
        done = sum(CellFiles(library.folder, scale).has(cell) for cell in every.values())
        minutes = (len(every) - done) * library.scale(scale).minutes
        console.print(f"all at {scale}: {done} of {len(every)} cells, about {minutes:.0f} min of one GPU left", highlight=False)
