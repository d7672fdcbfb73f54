"""`tether report`: one self-contained HTML page about one run or several."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tether.runs.store import RunStore

EXAMPLES = """\b
Examples:
  tether report runs/my-run
  tether report runs/filtered runs/unfiltered --out comparison.html
"""


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN [RUN ...]", help="Run folders.")],
    out: Annotated[Path | None, typer.Option(help="The file to write; by default report.html in the (first) run folder.")] = None,
) -> None:
    """Write a report with curves, the regime plane and sample trajectories."""
    from tether.runs.report import write_report

    stores = [RunStore.open(run) for run in runs]
    path = write_report(stores, out or runs[0] / "report.html")
    Console().print(f"report: {path}", highlight=False, soft_wrap=True)
