"""`tether envs`: what can be played, and with which options."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tether.envs.registry import ENVIRONMENTS, make_env

EXAMPLES = """\b
Examples:
  tether envs
  tether envs sokoban
"""


def envs(name: Annotated[str | None, typer.Argument(help="Show this environment's rules, options and an example.")] = None) -> None:
    """List the environments, or show one."""
    console = Console()
    if name is not None:
        _show(console, name)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("name", "turns", "task"):
        table.add_column(title)
    for each in ENVIRONMENTS.names():
        env = make_env(each)
        table.add_row(each, str(env.max_turns), env.instructions.split(". ")[0].split("; ")[0])
    console.print(table)
    console.print("\n`tether envs NAME` shows the rules and the options; `tether play NAME` lets you play.", highlight=False)


def _show(console: Console, name: str) -> None:
    env = make_env(name)
    console.print(env.instructions, highlight=False, markup=False)
    console.print(f"\nExample (seed 0):\n{env.reset(0).text}\n", highlight=False, markup=False)
    table = Table(title="options", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "default", "type"):
        table.add_column(title)
    options: Any = ENVIRONMENTS.get(name).Options
    for key, field in options.model_fields.items():
        default = "required" if field.is_required() else str(field.default)
        table.add_row(key, default, str(getattr(field.annotation, "__name__", field.annotation)).replace("typing.", ""))
    console.print(table)
