"""`tether envs`: lists the environments, shows one with its options, checks environments, and says what they make of a data file."""

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from tether.cli.console import SafeConsole, plain_table
from tether.cli.options import complete_env
from tether.core.enums import Split
from tether.core.errors import BadInput, TetherError, environment_boundary
from tether.core.protocols import few_shot_of
from tether.core.setting_docs import setting_docs
from tether.envs.adapters.catalog import ADAPTERS
from tether.envs.checker import CheckReport, CheckResult
from tether.envs.checker.checks import CHECKS, NUM_EPISODES, run_checks
from tether.envs.checker.data import DataReport, check_data, data_environments
from tether.envs.dataset import Fields
from tether.envs.registry import ENVIRONMENTS, EnvFactory, env_factory, make_env

EXAMPLES = """\b
Examples:
  tether envs
  tether envs sokoban
  tether envs --check sokoban
  tether envs --check reasoning_gym:leg_counting
  tether envs --check my_module:MyEnv --episodes 50
  tether envs --check --data test.jsonl
  tether envs --check --env metamathqa --data test.parquet --fields question=Question,answer=Answer
"""


def envs(
    name: Annotated[
        str | None, typer.Argument(help="Show this environment's rules, options and an example.", autocompletion=complete_env)
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check this environment, or all of them.")] = False,
    episodes: Annotated[int, typer.Option(help="With --check: how many episodes of unusual answers to play.", min=1)] = NUM_EPISODES,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --check: read this data file instead, and say which rows are loaded, refused, and why."),
    ] = None,
    env: Annotated[str | None, typer.Option(metavar="NAME", help="The environment, as the argument; without it each one is tried.")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COLUMN", help="With --data: columns under other names, as question=Question,answer=Answer."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list, or the environment with its options, as JSON.")] = False,
) -> None:
    """List the environments, show one, or check them or a data file (exit code 1 if a check fails or a row is refused)."""
    console = SafeConsole(highlight=False)
    if name is not None and env is not None and name != env:
        raise BadInput(f"got the environments '{name}' and '{env}'; name one of them")
    name = name or env
    if as_json and check:
        raise BadInput("--json prints the list or one environment; leave out --check")
    if as_json:
        typer.echo(json.dumps([_described(known) for known in ENVIRONMENTS.names()] if name is None else _described(name), indent=1))
        return
    if data is not None:
        if not check:
            raise BadInput("--data says which file to check; add --check")
        _check_data(console, name, data, _fields(fields or []))
    elif fields:
        raise BadInput("--fields names columns of a data file; add --data FILE")
    elif check:
        _check(console, ENVIRONMENTS.names() if name is None else [name], episodes, go_on=name is None)
    elif name is not None:
        _show(console, name)
    else:
        _list(console)


def _described(name: str) -> dict[str, Any]:
    """An environment for --json; one that cannot be used says why."""
    try:
        plan = env_factory(name)
        env = plan.make()
        with environment_boundary(name):
            about = {"name": name, "turns": env.max_turns, "instructions": env.instructions, "few_shot": few_shot_of(env)}
            about["pictures"] = getattr(env, "pictures", "")
    except TetherError as error:
        return {"name": name, "error": str(error)}
    options = [] if plan.options is None else [asdict(doc) for doc in setting_docs(plan.options)]
    return {**about, "options": options}


def _list(console: Console) -> None:
    table = plain_table("name", "turns", "task", "pictures")
    for name in ENVIRONMENTS.names():
        try:
            env = make_env(name)
            with environment_boundary(name):
                table.add_row(
                    name, str(env.max_turns), Text(re.split(r"[.;]\s", env.instructions)[0]), "yes" if getattr(env, "pictures", "") else ""
                )
        except TetherError as error:  # a broken plug-in must not hide the others
            table.add_row(name, "-", Text(f"cannot be used: {error}", style="red"))
    console.print(table)
    for clash in ENVIRONMENTS.clashes():
        console.print(Text(clash, style="red"))
    others = plain_table("name", "task", "package", title="environments of other packages", title_justify="left")
    for adapter in ADAPTERS.values():
        others.add_row(
            Text(adapter.form), adapter.task, Text(f"{adapter.distribution} {adapter.version}" if adapter.version else adapter.install)
        )
    console.print()
    console.print(others)
    console.print("\n`tether envs NAME` shows the rules and the options; `tether play NAME` lets you play.")


def _show(console: Console, name: str) -> None:
    plan = env_factory(name)
    env = plan.make()
    with environment_boundary(name):
        instructions, few_shot, first = env.instructions, few_shot_of(env), env.reset(0).text
    console.print(instructions, markup=False)
    if few_shot:
        console.print("\nExamples as turns, before the first observation (few_shot):", markup=False)
    for shown, reply in few_shot:
        console.print(f"{shown}\n{reply}", markup=False)
    console.print(f"\nA first observation (seed 0):\n{first}\n", markup=False)
    if getattr(env, "pictures", ""):
        console.print(f"Pictures: {env.pictures}; see them with `tether play {name} --images`.\n", markup=False, soft_wrap=True)  # type: ignore[attr-defined]
    if plan.options is None:
        return
    table = plain_table(title="options", title_justify="left")
    for title in ("name", "default", "allowed", "meaning"):
        table.add_column(title, overflow="fold")
    for doc in setting_docs(plan.options):
        table.add_row(doc.key, Text(doc.default), Text(doc.allowed), Text(doc.meaning))
    console.print(table)


def _check(console: Console, names: list[str], episodes: int, go_on: bool) -> None:
    """`go_on`: an environment that cannot be found is a row of the table; otherwise it is an error of the user."""
    found: dict[str, EnvFactory | TetherError] = {}
    for name in names:
        try:
            found[name] = env_factory(name)
        except TetherError as error:
            if not go_on:
                raise
            found[name] = error
    reports = []
    with Progress(console=SafeConsole(stderr=True), transient=True) as bars:
        task = bars.add_task("checking", total=len(names) * len(CHECKS))
        for name, plan in found.items():

            def announce(check: str, name: str = name) -> None:
                bars.update(task, advance=1, description=f"{name}: {check}")

            if isinstance(plan, EnvFactory):
                reports.append(run_checks(plan, episodes, announce))
            else:
                reports.append(CheckReport(name, (CheckResult(CHECKS[0].name, (str(plan),)),)))
    # One row for each environment and check, and one for each violation of a failed check.
    table = plain_table()
    for title in ("environment", "check", "result"):
        table.add_column(title, no_wrap=True)
    table.add_column("reason", overflow="fold")
    for report in reports:
        for result in report.results:
            for violation in result.violations:
                table.add_row(report.env, result.check, Text("FAIL", style="bold red"), Text(violation))
            if not result.violations:
                table.add_row(report.env, result.check, Text("-" if result.skipped else "ok", style="green"), Text(result.skipped))
    console.print(table)
    failed = [report.env for report in reports if not report.ok]
    if failed:
        console.print(Text(f"\n{', '.join(failed)}: failed", style="red"))
        raise typer.Exit(1)
    console.print(f"\n{len(reports)} environment{'' if len(reports) == 1 else 's'}, all pass")


def _fields(words: list[str]) -> Fields:
    """The columns of `question=Question,answer=Answer`, which may also be given one by one."""
    pairs = [pair.partition("=") for word in words for pair in word.split(",")]
    for key, equals, column in pairs:
        if not (key.strip() and equals and column.strip()):
            raise BadInput(f"--fields got '{key}{equals}{column}'; write it as NAME=COLUMN, such as question=Question")
    return tuple((key.strip(), column.strip()) for key, _, column in pairs)


def _check_data(console: Console, name: str | None, data: str, fields: Fields) -> None:
    """One environment's report; or, where none is named, that of the environment that loads most rows, after a line about each."""
    report = _best_report(console, data, fields) if name is None else check_data(name, data, fields)
    for line in _data_lines(report):
        console.print(line, markup=False, soft_wrap=True)
    if not report.ok:
        raise typer.Exit(1)


def _best_report(console: Console, data: str, fields: Fields) -> DataReport:
    reports: list[DataReport] = []
    for name in data_environments():
        try:
            reports.append(check_data(name, data, fields))
        except TetherError as error:  # a file that this environment cannot open may be another one's
            console.print(f"{name}: {error}", markup=False, soft_wrap=True)
        else:
            console.print(f"{name}: {reports[-1].loaded:,} rows loaded, {reports[-1].num_refused:,} refused", markup=False)
    if not reports:
        raise BadInput(f"no environment reads '{data}'; name the one you mean with --env")
    console.print()
    return max(reports, key=lambda report: report.loaded)


def _data_lines(report: DataReport) -> Iterator[str]:
    """A report in lines."""
    splits = ", ".join(f"{split} {report.splits[split]:,}" for split in (Split.TRAIN, Split.VALIDATION, Split.TEST))
    yield f"{report.env}, {report.source}"
    yield f"  loaded {report.loaded:,} rows" + (f" (split=all; by hash: {splits})" if report.loaded else "")
    yield from (f"    {example}" for example in report.examples)
    for title, kinds, remedy in (
        ("refused", report.refused, "fix them, or leave them out with bad_rows=skip"),
        ("left out", report.left_out, "always left out"),
    ):
        if kinds:
            yield f"  {title} {sum(rows.count for rows in kinds.values()):,} rows: {remedy}"
            for rows in sorted(kinds.values(), key=lambda rows: -rows.count):
                yield f"    {rows.count:,} x {rows.reason}"
                yield f"      {', '.join(rows.places)}{', ...' if rows.count > len(rows.places) else ''}"
    if report.unread:
        yield f"  columns that are not read: {', '.join(report.unread)}"
