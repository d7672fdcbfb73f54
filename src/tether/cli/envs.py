"""`tether envs`: lists the environments, shows one with its options, and checks environments."""

import re
from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table
from rich.text import Text

from tether.core.errors import TetherError, environment_boundary
from tether.envs.checker import CheckReport, CheckResult
from tether.envs.checker.checks import CHECKS
from tether.envs.checker.runner import NUM_EPISODES, run_checks
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
    check: Annotated[bool, typer.Option("--check", help="Check this environment, or all of them.")] = False,
    episodes: Annotated[int, typer.Option(help="With --check: how many episodes of unusual answers to play.", min=1)] = NUM_EPISODES,
) -> None:
    """List the environments, show one, or check them (exit code 1 if a check fails)."""
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
        except TetherError as error:  # a broken plug-in must not hide the others
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
    """`go_on`: an environment that cannot be found is a row of the table; otherwise it is an error of the user."""
    found = {name: _find(name, go_on) for name in names}
    reports = []
    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("checking", total=len(names) * len(CHECKS))
        for name, plan in found.items():
            if isinstance(plan, EnvFactory):
                reports.append(run_checks(plan, episodes, partial(_announce, bars, task, name)))
            else:
                reports.append(CheckReport(name, (CheckResult(CHECKS[0].name, (str(plan),)),)))
    console.print(_results(reports))
    failed = [report.env for report in reports if not report.ok]
    if failed:
        console.print(Text(f"\n{', '.join(failed)}: failed", style="red"))
        raise typer.Exit(1)
    console.print(f"\n{len(reports)} environment{'' if len(reports) == 1 else 's'}, all pass")


def _find(name: str, go_on: bool) -> EnvFactory | TetherError:
    try:
        return env_factory(name)
    except TetherError as error:
        if not go_on:
            raise
        return error


def _announce(bars: Progress, task: TaskID, name: str, check: str) -> None:
    bars.update(task, advance=1, description=f"{name}: {check}")


def _results(reports: list[CheckReport]) -> Table:
    """One row for each environment and check, and one for each violation of a failed check."""
    table = Table(box=None, pad_edge=False)
    for title in ("environment", "check", "result"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for report in reports:
        for result in report.results:
            if result.violations:
                for violation in result.violations:
                    table.add_row(report.env, result.check, Text("FAIL", style="bold red"), Text(violation))
            else:
                table.add_row(report.env, result.check, Text("-" if result.skipped else "ok", style="green"), Text(result.skipped))
    return table
