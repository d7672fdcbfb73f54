"""`tether eval`: the success rate of a run's last or best checkpoint, or of any model, on the fixed validation prompts."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tether.core.config import merge, parse_overrides, validate
from tether.core.errors import BadInput

if TYPE_CHECKING:
    from tether.training.evaluate import Evaluation
    from tether.training.settings import RunSettings

EXAMPLES = """\b
Examples:
  tether eval runs/my-run
  tether eval runs/my-run --best --samples 8
  tether eval tiny --env frozen_lake --prompts 256
  tether eval smollm2 --env sokoban --prompts 64 --temperature 0 --json
"""

FILE_WIDTH = 240


def evaluate_model(
    target: Annotated[str, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder (its last checkpoint) or a model's name.")],
    env: Annotated[str | None, typer.Option(help="Environment; a run folder knows its own.")] = None,
    prompts: Annotated[int, typer.Option(help="Validation prompts.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.5,
    samples: Annotated[int, typer.Option(help="Episodes per prompt; pass@k needs k of them.", min=1)] = 1,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its last.")] = False,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as rollout.max_tokens=100.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure success on fixed validation prompts, with its 95% interval and pass@k."""
    from tether.envs.registry import make_env
    from tether.models.catalog import check_name
    from tether.training.settings import RunSettings

    base = _run_settings(target, best)
    if env is not None:
        base = {**base, "env": {"name": env}, "also": []}
    if "env" not in base:
        raise BadInput(f"which environment should '{target}' play? add --env, see `tether envs`")
    overrides = {"evaluation": {"prompts": prompts, "temperature": temperature, "samples": samples}}
    settings = validate(RunSettings, merge(merge(base, overrides), parse_overrides(set_ or [])))
    for chosen in settings.environments():
        make_env(chosen.name, **chosen.options)
    check_name(settings.model.name)
    result = _play(settings, quiet=as_json)
    if not as_json:
        _show(result, settings)
        return
    apart = {"environments": result.environments} if result.mixed else {}
    about = {"env": _names(settings), "model": settings.model.name, "samples": settings.evaluation.samples}
    typer.echo(json.dumps({**about, **result.metrics, **apart}))


def _run_settings(target: str, best: bool) -> dict[str, Any]:
    """Settings of a run folder with its last or best checkpoint as the model; of a model, just its name."""
    folder = Path(target)
    if not (folder / "run.json").is_file():
        if best:
            raise BadInput(f"--best is for run folders, and '{target}' is none; leave it out")
        return {"model": {"name": target}}
    from tether.runs.store import RunStore

    store = RunStore.open(folder)
    checkpoints = sorted(store.checkpoints.glob("best" if best else "step_*"))
    if not checkpoints and best:
        raise BadInput(f"run '{target}' has no best checkpoint: it has not been evaluated yet; leave out --best for its last one")
    if not checkpoints:
        raise BadInput(f"run '{target}' has no checkpoint yet; let it train on, or evaluate its model by name")
    return {**store.config(), "model": {"name": str(checkpoints[-1] / "model")}}


def _play(settings: "RunSettings", quiet: bool) -> "Evaluation":
    from tether.models.chat import ChatFormat
    from tether.models.load import load_model
    from tether.rollout.engines.native import NativeEngine
    from tether.training.evaluate import env_specs, evaluate
    from tether.training.memory import memory_boundary
    from tether.training.parts import episode_rules

    loaded = load_model(settings.model.name, device=settings.model.device)
    rollout, rules = settings.rollout, episode_rules(settings, loaded.model)
    engine = NativeEngine(
        loaded.model, loaded.tokenizer, max_rows=rollout.max_rows, max_context=rules.max_context, cache_gb=rollout.cache_gb
    )
    num_prompts, samples = settings.evaluation.prompts, settings.evaluation.samples
    remedy = f"lower rollout.max_rows (now {rollout.max_rows}) by --set"
    with memory_boundary("evaluation", remedy), Progress(console=Console(stderr=True, quiet=quiet), transient=True) as bars:
        task = bars.add_task("playing", total=num_prompts * samples)
        return evaluate(
            env_specs(settings.environments()),
            engine,
            ChatFormat(loaded.tokenizer),
            num_prompts,
            settings.evaluation_sampling(),
            rules,
            on_finished=lambda: bars.advance(task),
            samples=samples,
        )


def _names(settings: "RunSettings") -> str:
    return " + ".join(chosen.name for chosen in settings.environments())


def _show(result: "Evaluation", settings: "RunSettings") -> None:
    """The rate in a line; below it a table with a row for each environment."""
    metrics, evaluation = result.metrics, settings.evaluation
    samples = "" if evaluation.samples == 1 else f", {evaluation.samples} samples each"
    console = Console()
    if not console.is_terminal:  # a file or a pipe has no margin: no cell is folded
        console.width = FILE_WIDTH
    console.print(
        f"{settings.model.name} on {_names(settings)}: success [bold]{metrics['success']:.1%}[/] "
        f"(95% interval {metrics['success_low']:.1%} to {metrics['success_high']:.1%}, "
        f"{evaluation.prompts} prompts, temperature {evaluation.temperature:g}{samples})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(result.environments))


def _table(environments: dict[str, dict[str, float]]) -> Table:
    ks = [name.removeprefix("pass_at_") for name in next(iter(environments.values())) if name.startswith("pass_at_")]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("environment")
    for heading in ("prompts", "success", "95% interval", *(f"pass@{k}" for k in ks[1:]), "reward", "turns", "well formed"):
        table.add_column(heading, justify="right")
    table.add_column("own numbers")
    for env, metrics in environments.items():
        own = {key.removeprefix(f"env/{env}/"): value for key, value in metrics.items() if key.startswith("env/")}
        table.add_row(
            env,
            f"{metrics['prompts']:.0f}",
            f"{metrics['success']:.1%}",
            f"{metrics['success_low']:.1%} to {metrics['success_high']:.1%}",
            *(f"{metrics[f'pass_at_{k}']:.1%}" for k in ks[1:]),
            f"{metrics['reward_mean']:.3f}",
            f"{metrics['turns']:.1f}",
            f"{metrics['format_valid']:.1%}",
            ", ".join(f"{key} {value:.3g}" for key, value in own.items()),
        )
    return table
