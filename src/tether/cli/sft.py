"""`tether sft`: fine-tune a model on demonstrations, with a progress bar and the time left."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from tether.cli.console import SafeConsole
from tether.cli.options import Device, complete_model
from tether.core.config import known_keys, merge, parse_overrides

if TYPE_CHECKING:
    from tether.training.sft.api import Progress as Report

EXAMPLES = """\b
Examples:
  tether sft frozen_lake --model smollm2 --out models/lake --episodes 200
  tether sft frozen_lake,sokoban,countdown --model Qwen/Qwen2.5-Coder-1.5B-Instruct --out models/warm
  tether sft conversations.jsonl --model smollm2 --out models/talk --lora
  tether sft runs/first --model runs/first/checkpoints/best/model --out models/better --set trajectories.max_per_prompt=4
"""


def sft(
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE...", help="Environments whose expert plays, a .jsonl file of conversations, or a run folder."),
    ],
    out: Annotated[Path, typer.Option(help="Folder for the new model; must not exist yet.")],
    model: Annotated[
        str, typer.Option(help="tiny, smollm2, a Hugging Face id or folder, or a .gguf file.", autocompletion=complete_model)
    ] = "tiny",
    lora: Annotated[bool, typer.Option("--lora", help="Train adapters instead of all weights.")] = False,
    steps: Annotated[int | None, typer.Option(help="Optimiser updates; by default as many as the epochs take.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the demonstrations.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Episodes that the experts play.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as learner.learning_rate=1e-5.")
    ] = None,
    device: Device = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only what was learned and the next command.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the record, sft.json, as one JSON object; all else to stderr.")] = False,
) -> None:
    """Fine-tune a model on demonstrations (supervised warm start), stopping by held-out loss."""
    from tether.training.resolve import chosen
    from tether.training.sft.api import named_settings, resolve, run_sft
    from tether.training.sft.settings import SftSettings
    from tether.training.synonyms import own_names

    given = merge(
        named_settings(model, lora, steps, epochs, episodes, seed),
        own_names(parse_overrides(set_ or []), frozenset(known_keys(SftSettings))),
    )
    settings, found = resolve(source, out, merge(given, chosen({"model.device": device})))
    console = SafeConsole(stderr=as_json)
    weights = f"adapters of rank {settings.lora.rank}" if settings.lora.rank else "all weights"
    what = (", ".join(found.names), "bold")
    console.print(Text.assemble(what, f" -> {settings.model.name}, {weights}, seed {settings.seed} -> {out}"))
    try:
        with progress_bars(Console(quiet=True) if quiet or as_json else console) as report:
            result = run_sft(found, settings, out, report)
    except KeyboardInterrupt:
        console.say(_what_is_kept(out))
        sys.exit(130)
    if as_json:
        typer.echo(json.dumps(result.record))
    console.say(summary(result.record))
    env, *others = result.environments or ("ENV",)
    also = "".join(f" --also {name}" for name in others)
    console.say(f"model: {out}; next: tether train {env}{also} --model {out}")


@contextmanager
def progress_bars(console: Console) -> Iterator["Report"]:
    """A bar for every stage, with the time left; where there is no terminal, a line now and then."""
    columns = TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def report(stage: str, done: int, total: int, remark: str) -> None:
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total)
            bars.update(tasks[stage], completed=done, description=f"{stage} {remark}".strip())
            if not console.is_terminal and done and (done == total or done % max(1, total // 10) == 0):
                console.print(f"{stage} {done}/{total} {remark}".rstrip(), highlight=False, soft_wrap=True)

        yield report


def summary(record: dict[str, Any]) -> str:
    """What was learned, in a line."""
    held_out = {int(step): loss for step, loss in record["held_out_losses"].items()}
    best = record["best_step"]
    words = [
        f"{record['demonstrations']} demonstrations, {record['steps']} steps ({record['ended']}), {record['tokens']:,} response tokens"
    ]
    if record["left_out"]:
        words.append(f"{record['left_out']} demonstrations were too long and left out")
    if held_out:
        words.append(f"held-out loss {held_out[0]:.3f} -> {held_out[best]:.3f} (step {best}, whose weights are kept)")
    if held_out and not best:
        words.append("it never fell: these are the weights the model started with; lower learner.learning_rate")
    return "; ".join(words)


def _what_is_kept(out: Path) -> str:
    """After Ctrl-C."""
    record = out / "sft.json"
    if not record.is_file():
        return "stopped before the first update; nothing is kept"
    facts = json.loads(record.read_text(encoding="utf-8"))
    return f"stopped after step {facts['steps']}; the weights of step {facts['best_step']} are kept in {out}"
