"""`tether warmstart`: make the embedded model again, from nothing."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from tether.core.config import parse_overrides, validate
from tether.core.errors import BadInput

EXAMPLES = """\b
Examples:
  tether warmstart --out my-tiny
  tether warmstart --out quick --set steps=50 --set episodes=500
  tether eval my-tiny --env frozen_lake --prompts 256
"""


def warmstart(
    out: Annotated[Path, typer.Option(help="Folder for the new model; must not exist yet.")],
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the GPU if there is one.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the recipe, such as steps=500.")
    ] = None,
) -> None:
    """Train the small embedded model from scratch, to imitate a fallible solver of the grid environments."""
    if out.exists():
        raise BadInput(f"folder '{out}' exists; choose another --out")
    overrides = parse_overrides(set_ or [])
    console = Console()
    with console.status("loading torch"):
        from tether.models.hardware import default_device
        from tether.training.warmstart.recipe import WarmstartSettings
        from tether.training.warmstart.recipe import warmstart as make

    settings = validate(WarmstartSettings, overrides, what="warmstart setting")
    columns = TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def progress(stage: str, done: int, total: int, remark: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, description=f"{stage} {remark}".strip())

        make(settings, out, device or default_device(), progress)
    console.print(f"model: {out}; try: tether eval {out} --env frozen_lake --prompts 256", highlight=False, soft_wrap=True)
