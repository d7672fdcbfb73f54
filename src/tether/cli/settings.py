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
  tether settings learning rate
  tether settings save every
  tether settings filter --json
"""


def settings(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORD]...", help="A section, the beginning of a key, or what you would call it.", autocompletion=complete_setting
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """List every setting of a run, for --set and config files: key, default, what it may be, and what it means."""
    from tether.core.config import known_keys
    from tether.core.setting_docs import setting_docs
    from tether.training.settings import RunSettings
    from tether.training.synonyms import WORDS, spelled

    wanted, docs = " ".join(words or []), list(setting_docs(RunSettings))
    found = [doc for doc in docs if doc.key.startswith(wanted)]
    if wanted and (not found or spelled(wanted) in WORDS):
        meant = WORDS.get(spelled(wanted), ())
        meant_docs = [doc for key in meant for doc in docs if doc.key == key or key.startswith(f"{doc.key}.")]
        parts = spelled(wanted).split("_")
        told = [doc for doc in docs if all(part in f"{doc.key} {doc.meaning}".lower() for part in parts)]
        found = list({doc.key: doc for doc in (*meant_docs, *found, *told)}.values())
    if not found:
        raise UnknownName(f"no setting is called or explained as '{wanted}': {did_you_mean(wanted, [*known_keys(RunSettings), *WORDS], 8)}")
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
    if not words:
        typer.echo("\nOptions of an environment (env.options): `tether envs NAME`. Use: tether train ENV --set KEY=VALUE")
