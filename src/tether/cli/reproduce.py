"""`tether reproduce`: run the grid of a table or figure of the paper, resume it, write its results and verdicts.

The experiments are an application of Tether that lies in its repository, experiments/harness; this verb finds it there and calls it.
"""

import importlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from tether.cli.options import Jobs
from tether.core.errors import BadInput

EXAMPLES = """\b
Examples:
  tether reproduce --list
  tether reproduce table_4 --smoke
  tether reproduce table_4 --jobs 12
  tether reproduce all --max-minutes 25
  tether reproduce figure_5_14 --scale qwen-1.5b --seeds 0
  tether reproduce table_6 --again --seeds 3-5
  tether reproduce all --plan
"""

_HARNESS = Path("experiments") / "harness" / "command.py"


def reproduce(
    name: Annotated[str | None, typer.Argument(help="An experiment, see --list, or all.")] = None,
    scale: Annotated[str, typer.Option(help="tiny, qwen-1.5b or, for models that see, tiny-vl.")] = "tiny",
    seeds: Annotated[str | None, typer.Option(help="Other seeds than the grid's, such as 3-5 or 0,2.")] = None,
    jobs: Jobs = None,
    max_minutes: Annotated[float | None, typer.Option(help="End cleanly after this time; the next call resumes.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Run published cells anew, beside them, and compare.")] = False,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing; write the pages from the cells that are there.")] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Run nothing; how many seeds each open claim needs, and their cost.")] = False,
    smoke: Annotated[bool, typer.Option("--smoke", help="A few tiny cells in a temporary folder, to see that it works.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments with their cells, verdicts and cost.")] = False,
    experiments: Annotated[
        Path | None, typer.Option(help="Folder of the experiments. [default: experiments, here or in the clone]", show_default=False)
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder for the runs.")] = Path("runs/reproduce"),
) -> None:
    """Run the grid of a table or figure of the paper; cells that are done are never run again; writes tables, plots and verdicts."""
    root = next((root for root in (Path.cwd(), Path(__file__).parents[3]) if (root / _HARNESS).is_file()), None)
    if root is None:
        raise BadInput(
            "the experiments are not part of the installed package; clone Tether's repository and run `tether reproduce` in its folder"
        )
    if (folder := str(root / _HARNESS.parts[0])) not in sys.path:
        sys.path.insert(0, folder)
    importlib.import_module("harness.command").reproduce(
        name, experiments or root / _HARNESS.parts[0], runs, scale=scale, seeds=seeds, jobs=jobs, max_minutes=max_minutes, again=again, no_run=no_run,
        smoke=smoke, list_=list_, plan_=plan,
    )  # fmt: skip
