"""`tether eval`: the success rate of a run's last or best checkpoint, or of any model, on the fixed validation prompts."""

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table

from tether.cli.terminal import SafeConsole
from tether.core.config import merge, parse_overrides

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
    prompts: Annotated[int | None, typer.Option(help="Prompts; by default every row of a data file, 512 elsewhere.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.5,
    samples: Annotated[int, typer.Option(help="Episodes per prompt; pass@k needs k of them.", min=1)] = 1,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its last.")] = False,
    engine: Annotated[str | None, typer.Option(help="What samples: native, vllm, or the address of a server.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as rollout.max_tokens=100.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure success on fixed validation prompts, with its 95% interval and pass@k."""
    from tether.training.api import evaluation_settings

    overrides: dict[str, Any] = {"evaluation": {"prompts": prompts, "temperature": temperature, "samples": samples}}
    if engine is not None:
        overrides["rollout"] = {"engine": engine}
    settings = evaluation_settings(target, env, best, merge(overrides, parse_overrides(set_ or [])))
    result = _play(settings, quiet=as_json)
    if not as_json:
        _show(result, settings)
        return
    apart = {"environments": result.environments} if result.mixed else {}
    about = {"env": _names(settings), "model": settings.model.name, "samples": settings.evaluation.samples}
    typer.echo(json.dumps({**about, **result.metrics, **apart}))


def _play(settings: "RunSettings", quiet: bool) -> "Evaluation":
    from tether.training.api import run_evaluation
    from tether.training.callbacks import Callback

    class Bar(Callback):
        """A progress bar over the episodes."""

        def on_stage_begin(self, name: str, total: int) -> None:
            bars.reset(task, total=total)

        def on_stage_progress(self) -> None:
            bars.advance(task)

    with Progress(console=SafeConsole(stderr=True, quiet=quiet), transient=True) as bars:
        task = bars.add_task("sampling", total=None)
        return run_evaluation(settings, [Bar()])


def _names(settings: "RunSettings") -> str:
    return " + ".join(chosen.name for chosen in settings.environments())


def _show(result: "Evaluation", settings: "RunSettings") -> None:
    """The rate in a line; below it a table with a row for each environment."""
    metrics, evaluation = result.metrics, settings.evaluation
    samples = "" if evaluation.samples == 1 else f", {evaluation.samples} samples each"
    console = SafeConsole()
    if not console.is_terminal:  # a file or a pipe has no margin: no cell is folded
        console.width = FILE_WIDTH
    console.print(
        f"{settings.model.name} on {_names(settings)}: success [bold]{metrics['success']:.1%}[/] "
        f"(95% interval {metrics['success_low']:.1%} to {metrics['success_high']:.1%}, "
        f"{metrics['prompts']:.0f} prompts{_distinct(metrics)}, temperature {evaluation.temperature:g}{samples})",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_table(result.environments))


def _distinct(metrics: dict[str, float]) -> str:
    """How many different instances there were, where some came twice."""
    return "" if metrics["instances"] == metrics["prompts"] else f" of {metrics['instances']:.0f} different instances"


def _table(environments: dict[str, dict[str, float]]) -> Table:
    measured = {name.removeprefix("pass_at_") for metrics in environments.values() for name in metrics if name.startswith("pass_at_")}
    ks = sorted(measured, key=int)
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
            f"{metrics['success']:.1%}" if "success" in metrics else "-",
            f"{metrics['success_low']:.1%} to {metrics['success_high']:.1%}" if "success" in metrics else "all errored",
            *(f"{metrics[f'pass_at_{k}']:.1%}" if f"pass_at_{k}" in metrics else "-" for k in ks[1:]),
            f"{metrics['reward_mean']:.3f}",
            f"{metrics['turns']:.1f}",
            f"{metrics['format_valid']:.1%}",
            ", ".join(f"{key} {value:.3g}" for key, value in own.items()),
        )
    return table
