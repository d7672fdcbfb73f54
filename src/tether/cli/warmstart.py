"""`tether warmstart`: make the embedded model again, from nothing."""

from pathlib import Path
from typing import Annotated, Any

import typer

from tether.cli.console import SafeConsole
from tether.cli.options import Device
from tether.cli.sft import progress_bars
from tether.core.config import parse_overrides, validate
from tether.core.errors import BadInput

EXAMPLES = """\b
Examples:
  tether warmstart --out my-tiny
  tether warmstart --eyes --out my-tiny-vl
  tether warmstart --out quick --set skill.steps=50 --set skill.episodes=500 --set habit.steps=10 --set habit.episodes=100
  tether eval my-tiny --env frozen_lake --prompts 256
"""


def warmstart(
    out: Annotated[Path, typer.Option(help="Folder for the new model; must not exist yet.")],
    eyes: Annotated[bool, typer.Option("--eyes", help="Teach tiny to see: the recipe of tiny-vl.")] = False,
    device: Device = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of the recipe, such as skill.steps=500.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the last line.")] = False,
) -> None:
    """Train the small embedded model from scratch, to imitate a fallible solver of the grid environments; or teach it to see."""
    from tether.training.sft.settings import EyesSettings, WarmstartSettings

    if out.exists():
        raise BadInput(f"folder '{out}' exists; choose another --out")
    kind: Any = EyesSettings if eyes else WarmstartSettings
    settings = validate(kind, parse_overrides(set_ or []), what="warmstart setting")
    console = SafeConsole()
    with console.status("loading torch"):
        from tether.models.hardware import default_device
        from tether.training.sft.eyes import give_eyes
        from tether.training.sft.recipe import warmstart as from_nothing
    with progress_bars(SafeConsole(quiet=True) if quiet else console) as progress:
        (give_eyes if eyes else from_nothing)(settings, out, device or default_device(), progress)
    shown = " --set env.options.observation=image" if eyes else ""
    console.say(f"model: {out}; try: tether eval {out} --env frozen_lake --prompts 256{shown}")
