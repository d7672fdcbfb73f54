"""`tether leaderboard`: all saved results of a folder as one page and one table."""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.console import SafeConsole

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
    from tether.runs.evaluations import boards, read_results
    from tether.runs.files import as_written
    from tether.runs.pages import markdown, write_leaderboard

    results = read_results(folder)
    with as_written(folder):
        found = boards(results)
        page = write_leaderboard(found, out or folder / "leaderboard.html")
        table = markdown(found)
    SafeConsole().say(table)
    # Beside the table, so that the output is Markdown and nothing else.
    beside = SafeConsole(stderr=True)
    beside.say(f"{_count(len(results), 'result')} of {_count(len(found), 'task')}; page: {page}")
    alone = sum(len(board.results) == 1 for board in found)
    if alone and len(results) > 1:
        beside.say(f"{_count(alone, 'task')} with one result: environment, options, data or number of prompts differ from the others")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
