"""`tether eval`: the success rate of a run's last checkpoint, or of any model, on the fixed validation prompts."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from tether.core.config import merge, parse_overrides, validate
from tether.core.errors import BadInput

EXAMPLES = """\b
Examples:
  tether eval runs/my-run
  tether eval tiny --env frozen_lake --prompts 256
  tether eval smollm2 --env sokoban --prompts 64 --temperature 0 --json
"""


def evaluate_model(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its last checkpoint) or a model's name.")],
    env: Annotated[str | None, typer.Option(help="Environment; a run folder knows its own.")] = None,
    prompts: Annotated[int, typer.Option(help="Validation prompts.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.5,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as rollout.max_tokens=100.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure success on fixed validation prompts, with its 95% interval."""
    from tether.envs.registry import make_env
    from tether.models.catalog import check_name
    from tether.training.settings import RunSettings

    base = _run_settings(target)
    if env is not None:
        base = {**base, "env": {"name": env}}
    if "env" not in base:
        raise BadInput(f"which environment should '{target}' play? add --env, see `tether envs`")
    overrides = {"evaluation": {"prompts": prompts, "temperature": temperature}}
    settings = validate(RunSettings, merge(merge(base, overrides), parse_overrides(set_ or [])))
    make_env(settings.env.name, **settings.env.options)
    check_name(settings.model.name)
    metrics = _play(settings, quiet=as_json)
    if as_json:
        typer.echo(json.dumps({"env": settings.env.name, "model": settings.model.name, **metrics}))
        return
    low, high = metrics["success_low"], metrics["success_high"]
    Console().print(
        f"{settings.model.name} on {settings.env.name}: success [bold]{metrics['success']:.1%}[/] "
        f"(95% interval {low:.1%} to {high:.1%}, {prompts} prompts, temperature {temperature}); mean reward {metrics['reward_mean']:.3f}, "
        f"{metrics['turns']:.1f} turns, {metrics['format_valid']:.1%} of turns well formed",
        highlight=False,
        soft_wrap=True,
    )


def _run_settings(target: str) -> dict[str, Any]:
    """Settings of a run folder with its last checkpoint as the model; of a model, just its name."""
    folder = Path(target)
    if not (folder / "run.json").is_file():
        return {"model": {"name": target}}
    from tether.runs.store import RunStore

    store = RunStore.open(folder)
    checkpoints = sorted(store.checkpoints.glob("step_*"))
    if not checkpoints:
        raise BadInput(f"run '{target}' has no checkpoint yet; let it train on, or evaluate its model by name")
    return {**store.config(), "model": {"name": str(checkpoints[-1] / "model")}}


def _play(settings: Any, quiet: bool) -> dict[str, float]:
    from tether.models.chat import ChatFormat
    from tether.models.load import load_model
    from tether.rollout.engines.native import NativeEngine
    from tether.training.evaluate import evaluate
    from tether.training.trainer import episode_rules

    loaded = load_model(settings.model.name, device=settings.model.device)
    engine = NativeEngine(loaded.model, loaded.tokenizer, max_rows=settings.rollout.max_rows)
    num_prompts = settings.evaluation.prompts
    with Progress(console=Console(stderr=True, quiet=quiet), transient=True) as bars:
        task = bars.add_task("playing", total=num_prompts)
        result = evaluate(
            settings.env,
            engine,
            ChatFormat(loaded.tokenizer),
            num_prompts,
            settings.evaluation_sampling(),
            episode_rules(settings, loaded.model),
            on_finished=lambda: bars.advance(task),
        )
    return result.metrics
