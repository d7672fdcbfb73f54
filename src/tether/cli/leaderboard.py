"""`tether leaderboard`: all saved results of a folder as one page and one table."""

from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = """\b
Examples:
  tether leaderboard results
  tether leaderboard results --out results/index.html
  tether leaderboard results > LEADERBOARD.md
"""


def leaderboard(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder that `tether eval --out` wrote to.")],
    out: Annotated[Path | None, typer.Option(help="The page; DIR/leaderboard.html by default.")] = None,
) -> None:
    """Rank the results of each task, with intervals, and say which differences are beyond chance.

    Results of the same environment, options, data and number of prompts are ranked against each other; others stand apart. The table is
    Markdown; the page is HTML.
    """
    from tether.runs.evaluation_page import markdown, write_leaderboard
    from tether.runs.evaluations import boards, read_results

    found = boards(read_results(folder))
    page = write_leaderboard(found, out or folder / "leaderboard.html")
    typer.echo(markdown(found))
    typer.echo(f"page: {page}", err=True)
