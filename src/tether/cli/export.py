"""`tether export`: a run's model as a Hugging Face folder, for use outside Tether."""

from pathlib import Path
from typing import Annotated

import typer

from tether.cli.console import SafeConsole
from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.runs.checkpoints import find_checkpoint
from tether.runs.store import RunStore

EXAMPLES = """\b
Examples:
  tether export runs/my-run --out my-agent
  tether export runs/my-run --out my-agent --best --dtype bfloat16
  tether export runs/my-run --out early --step 20
  tether export runs/my-run --out my-agent --push-to-hub me/my-agent
"""

DTYPES = ("float32", "bfloat16")


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write; must be new.")],
    best: Annotated[bool, typer.Option("--best", help="The checkpoint that validated best instead of the last.")] = False,
    step: Annotated[int | None, typer.Option(help="The checkpoint of this step instead of the last.")] = None,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    push_to_hub: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload the folder to this repository of the Hugging Face hub.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face folder that transformers loads, adapters merged, with a model card."""
    if best and step is not None:
        raise BadInput(f"--best and --step {step} ask for two checkpoints; give one of them")
    if dtype not in DTYPES:
        raise UnknownName(f"unknown dtype '{dtype}': {did_you_mean(dtype, DTYPES)}")
    store = RunStore.open(run)
    from tether.training.export import check_repository, export_checkpoint, push

    if push_to_hub is not None:
        check_repository(push_to_hub)

    checkpoint, number = find_checkpoint(store.checkpoints, best=best, step=step)
    console = SafeConsole()
    with console.status(f"exporting step {number}"):
        export_checkpoint(store, checkpoint, number, out, dtype)
    console.say(f"step {number} of {run} in {dtype}: {out}")
    if push_to_hub is not None:
        with console.status(f"uploading to {push_to_hub}"):
            address = push(out, push_to_hub)
        console.say(f"uploaded: {address}")
