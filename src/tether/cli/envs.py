"""`tether envs`: what can be played, with which options, and whether it keeps the laws of an environment."""

import re
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from tether.core.errors import TetherError, environment_boundary
from tether.envs.checker import CheckReport, Verdict
from tether.envs.checker.examination import NUM_EPISODES, examine
from tether.envs.checker.laws import LAWS
from tether.envs.factory import EnvFactory, env_factory
from tether.envs.registry import ENVIRONMENTS, make_env

EXAMPLES = """\b
Examples:
  tether envs
  tether envs sokoban
  tether envs --check sokoban
  tether envs --check my_module:MyEnv --episodes 50
"""


def envs(
    name: Annotated[str | None, typer.Argument(help="Show this environment's rules, options and an example.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold the laws against this environment, or against all of them.")] = False,
    episodes: Annotated[int, typer.Option(help="With --check: how many episodes of odd answers to play.", min=1)] = NUM_EPISODES,
) -> None:
    """List the environments, show one, or check that they keep to the contract (exit code 1 if one does not)."""
    console = Console(highlight=False)
    if check:
        _check(console, ENVIRONMENTS.names() if name is None else [name], episodes, go_on=name is None)
    elif name is not None:
        _show(console, name)
    else:
        _list(console)


def _list(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("name", "turns", "task"):
        table.add_column(title)
    for name in ENVIRONMENTS.names():
        try:
            env = make_env(name)
            with environment_boundary(name):
                table.add_row(name, str(env.max_turns), Text(re.split(r"[.;]\s", env.instructions)[0]))
        except TetherError as error:  # a broken plug-in is no reason to hide the others
            table.add_row(name, "-", Text(f"cannot be used: {error}", style="red"))
    console.print(table)
    for clash in ENVIRONMENTS.clashes():
        console.print(Text(clash, style="red"))
    console.print("\n`tether envs NAME` shows the rules and the options; `tether play NAME` lets you play.")


def _show(console: Console, name: str) -> None:
    plan = env_factory(name)
    env = plan.make()
    with environment_boundary(name):
        console.print(env.instructions, markup=False)
        console.print(f"\nExample (seed 0):\n{env.reset(0).text}\n", markup=False)
    if plan.options is None:
        return
    table = Table(title="options", title_justify="left", box=None, pad_edge=False)
    for title in ("name", "default", "type"):
        table.add_column(title)
    for key, field in plan.options.model_fields.items():
        default = "required" if field.is_required() else str(field.default)
        table.add_row(key, default, str(getattr(field.annotation, "__name__", field.annotation)).replace("typing.", ""))
    console.print(table)


def _check(console: Console, names: list[str], episodes: int, go_on: bool) -> None:
    """`go_on`: an environment that cannot even be found is a line of the table; else it is the user's mistake."""
    found = {name: _find(name, go_on) for name in names}
    reports = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("checking", total=len(names) * len(LAWS))
        for name, plan in found.items():
            if isinstance(plan, EnvFactory):
                reports.append(examine(plan, episodes, partial(_announce, bars, task, name)))
            else:
                reports.append(CheckReport(name, (Verdict(LAWS[0].name, (str(plan),)),)))
    console.print(_verdicts(reports))
    broken = [report.env for report in reports if not report.ok]
    if broken:
        console.print(Text(f"\n{', '.join(broken)}: broken", style="red"))
        raise typer.Exit(1)
    console.print(f"\n{len(reports)} environment{'' if len(reports) == 1 else 's'}, all sound")


def _find(name: str, go_on: bool) -> EnvFactory | TetherError:
    try:
        return env_factory(name)
    except TetherError as error:
        if not go_on:
            raise
        return error


def _announce(bars: Progress, task: TaskID, name: str, law: str) -> None:
    bars.update(task, advance=1, description=f"{name}: {law}")


def _verdicts(reports: list[CheckReport]) -> Table:
    """One row for each environment and law, and more where a law is broken more than once."""
    table = Table(box=None, pad_edge=False)
    for title in ("environment", "law", "result"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for report in reports:
        for verdict in report.verdicts:
            if verdict.violations:
                for violation in verdict.violations:
                    table.add_row(report.env, verdict.law, Text("FAIL", style="bold red"), Text(violation))
            else:
                table.add_row(report.env, verdict.law, Text("-" if verdict.skipped else "ok", style="green"), Text(verdict.skipped))
    return table
