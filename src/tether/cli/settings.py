"""`tether settings`: every setting of a run with its default and its meaning."""

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from tether.cli.console import plain_table, show_table
from tether.cli.options import complete_setting
from tether.core.errors import UnknownName, did_you_mean

EXAMPLES = """\b
Examples:
  tether settings
  tether settings rollout
  tether settings learner.learning_rate
  tether settings filter --json
"""


def settings(
    prefix: Annotated[
        str | None, typer.Argument(help="A section or the beginning of a key; without it, all.", autocompletion=complete_setting)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List every setting of a run, for --set and config files: key, default, what it may be, and what it means."""
    from tether.core.config import known_keys
    from tether.core.setting_docs import setting_docs
    from tether.training.settings import RunSettings

    wanted = prefix or ""
    found = [doc for doc in setting_docs(RunSettings) if doc.key.startswith(wanted)]
    if not found:
        inside = [key for key in known_keys(RunSettings) if wanted.rpartition(".")[2] in key]
        raise UnknownName(f"no setting begins with '{wanted}': {did_you_mean(wanted, inside or known_keys(RunSettings))}")
    if as_json:
        typer.echo(json.dumps([asdict(doc) for doc in found], indent=1))
        return
    table = plain_table(header_style="bold")
    table.add_column("key", no_wrap=True)
    table.add_column("default", overflow="fold", max_width=24)
    table.add_column("allowed", overflow="fold", max_width=36)
    table.add_column("meaning", overflow="fold")
    for doc in found:
        table.add_row(doc.key, Text(doc.default), Text(doc.allowed), Text(doc.meaning))
    show_table(table)
    if prefix is None:
        typer.echo("\nOptions of an environment (env.options): `tether envs NAME`. Use: tether train ENV --set KEY=VALUE")
