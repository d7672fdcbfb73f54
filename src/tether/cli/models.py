"""`tether models`: what is at hand, and how to get what is not."""

import json
from typing import Annotated

import typer

from tether.cli.console import SafeConsole, plain_table
from tether.cli.options import complete_model
from tether.core.errors import UnknownName, did_you_mean

EXAMPLES = """\b
Examples:
  tether models
  tether models get smollm2
"""

app = typer.Typer(help="List the embedded models, or fetch one.", rich_markup_mode=None, invoke_without_command=True, epilog=EXAMPLES)


@app.callback()
def models(
    context: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print the list as a JSON array.")] = False
) -> None:
    """List the embedded models, or fetch one."""
    if context.invoked_subcommand is not None:
        return
    from tether.models.catalog import EMBEDDED, is_at_hand

    if as_json:
        typer.echo(json.dumps([{"name": name, "at_hand": is_at_hand(name), "about": about} for name, about in EMBEDDED.items()], indent=1))
        return
    table = plain_table("name", "at hand", "what it is")
    for name, about in EMBEDDED.items():
        table.add_row(name, "yes" if is_at_hand(name) else "no", about)
    console = SafeConsole()
    console.print(table)
    console.say("\nA Hugging Face id, a model folder or a .gguf file works wherever a model is asked for.")


@app.command(epilog=EXAMPLES)
def get(name: Annotated[str, typer.Argument(help="smollm2", autocompletion=complete_model)]) -> None:
    """Fetch an embedded model and convert it once."""
    from tether.models.catalog import EMBEDDED, SHIPPED, fetch_smollm2, shipped_folder

    if name not in EMBEDDED:
        raise UnknownName(f"unknown embedded model '{name}': {did_you_mean(name, EMBEDDED)}")
    console = SafeConsole()
    with console.status(f"fetching {name}"):
        folder = shipped_folder(name) if name in SHIPPED else fetch_smollm2()
    console.say(f"{name} is ready: {folder}")
