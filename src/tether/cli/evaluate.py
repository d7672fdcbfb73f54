"""`tether eval`: success on the fixed validation prompts, of runs, of models, and of models behind chat endpoints, one or several."""

import itertools
import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tether.cli.console import SafeConsole, plain_table, show_table
from tether.cli.options import Device, complete_env
from tether.core.config import merge
from tether.core.errors import BadInput, ConfigError

if TYPE_CHECKING:
    from tether.training.evaluate import Evaluation
    from tether.training.evaluation_run import EndpointOptions
    from tether.training.settings import RunSettings

EXAMPLES = """\b
Examples:
  tether eval runs/my-run
  tether eval runs/my-run --best --samples 8
  tether eval tiny --env frozen_lake --prompts 256
  tether eval tiny runs/my-run --env frozen_lake
  tether eval smollm2 --data questions.jsonl
  tether eval smollm2 --env sokoban --prompts 64 --temperature 0 --json
  tether eval http://localhost:8000#my-model --env sokoban --concurrency 16 --out results
  tether eval runs/a runs/b smollm2 --env frozen_lake --out results
"""


def evaluate_model(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="MODEL...", help="Run folders (their last checkpoints), models by name, or http://HOST:PORT#NAME."),
    ],
    env: Annotated[str | None, typer.Option(help="Environment; a run folder knows its own.", autocompletion=complete_env)] = None,
    agent: Annotated[str | None, typer.Option(help="Your own program in the place of an environment, as in `tether train`.")] = None,
    agent_command: Annotated[str | None, typer.Option(help="Or a command that is started for every episode.")] = None,
    tasks: Annotated[str | None, typer.Option(help="The file of the agent's tasks.")] = None,
    prompts: Annotated[int | None, typer.Option(help="Prompts; by default every row of a data file, 512 elsewhere.", min=1)] = None,
    temperature: Annotated[float, typer.Option(help="Sampling temperature; 0 is greedy.", min=0.0)] = 0.5,
    samples: Annotated[int, typer.Option(help="Episodes per prompt; pass@k needs k of them.", min=1)] = 1,
    max_tokens: Annotated[int | None, typer.Option(help="Budget of one response; 400 unless a run has its own.", min=1)] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Data of the environment; alone, questions that qa plays.")] = None,
    best: Annotated[bool, typer.Option("--best", help="The run's best checkpoint instead of its last.")] = False,
    engine: Annotated[str | None, typer.Option(help="What samples: native, vllm, or the address of a server.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for the results, their pages, and what an endpoint said.")] = None,
    concurrency: Annotated[int, typer.Option(help="Conversations with an endpoint at a time.", min=1)] = 8,
    api_key_env: Annotated[str | None, typer.Option(metavar="NAME", help="The variable that holds the endpoint's key.")] = None,
    price: Annotated[
        list[str] | None, typer.Option(metavar="IN/OUT", help="Price of a million tokens; one for all endpoints, or each.")
    ] = None,
    body: Annotated[str | None, typer.Option(metavar="JSON", help="Further fields of every request; null leaves one out.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting, such as rollout.max_tokens=100.")] = None,
    device: Device = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object.")] = False,
) -> None:
    """Measure success on fixed validation prompts, with its 95% interval and pass@k; several models are compared on the same instances."""
    from tether.training.resolve import chosen, comparison_settings, overrides

    program = {"agent.target": agent, "agent.command": agent_command, "agent.tasks": tasks}
    options = {"rollout.engine": engine, "rollout.max_tokens": max_tokens, "model.device": device, "env.options.data": data, **program}
    played = {"evaluation": {"prompts": prompts, "temperature": temperature, "samples": samples}}
    given = merge(played | chosen(options), overrides(set_, temperature="evaluation.temperature", prompts="evaluation.prompts"))
    if len(set(targets)) < len(targets):
        raise BadInput(f"a model is given twice among {', '.join(targets)}; give each once")
    prices, fields = _prices(price or [], targets), _fields(body)
    settings = comparison_settings(targets, env, best, given)  # all are checked before the first is played

    from tether.training.evaluation_run import EndpointOptions

    endpoint = EndpointOptions(concurrency, api_key_env, fields)
    console = SafeConsole(stderr=True, quiet=as_json)
    results = []
    for target, own, cost in zip(targets, settings, prices, strict=True):
        result = _play(target, own, endpoint, cost, out, console)
        results.append(result)
        if not as_json:
            _show(result, own, target)
    if as_json:
        _echo_json(results, settings)
    elif len(results) > 1:
        _show_together(results)


def _prices(given: list[str], targets: list[str]) -> list[tuple[float, float] | None]:
    """The price of each model: none, the same for all endpoints, or one for each of them in order."""
    read = []
    for text in given:
        try:
            prompt, completion = map(float, text.split("/"))
        except ValueError:
            raise BadInput(
                f"--price got '{text}'; write the prices of a million tokens of prompts and completions, such as 0.15/0.60"
            ) from None
        read.append((prompt, completion))
    endpoints = [target for target in targets if "://" in target]
    if len(read) > 1 and len(read) != len(endpoints):
        raise BadInput(f"--price is given {len(read)} times for {len(endpoints)} endpoints; give it once, or once for each in their order")
    each = iter(read * len(endpoints) if len(read) == 1 else read)
    return [next(each, None) if "://" in target else None for target in targets]


def _fields(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f'--body is not JSON ({error}); write an object such as \'{{"reasoning_effort": "low"}}\'') from error
    if not isinstance(fields, dict):
        raise ConfigError(f"--body is a {type(fields).__name__}; write a JSON object of fields")
    return fields


def _play(
    target: str,
    settings: "RunSettings",
    endpoint: "EndpointOptions",
    price: tuple[float, float] | None,
    out: Path | None,
    console: SafeConsole,
) -> "Evaluation":
    from tether.cli.live import Heartbeat, TokensColumn, stage_words
    from tether.training.callbacks import Callback
    from tether.training.evaluation_run import run_evaluation

    class Bar(Callback):
        """A progress bar over the episodes, with the time left."""

        def on_sampling_ready(self, statistics: Any) -> None:
            tokens.statistics = statistics

        def on_stage_begin(self, name: str, total: int) -> None:
            tokens.begin(name)
            bars.reset(task, total=total)

        def on_stage_progress(self) -> None:
            bars.advance(task)

    try:
        columns = (*Progress.get_default_columns(), tokens := TokensColumn())
        with ExitStack() as shown:
            bars = shown.enter_context(Progress(*columns, console=console, transient=True, disable=not console.is_terminal))
            task = bars.add_task(f"playing {target}", total=None)
            if not console.is_terminal:
                shown.enter_context(Heartbeat(console, lambda: stage_words(bars.tasks[0], tokens)).beating())
            return run_evaluation(settings, target, [Bar()], endpoint=endpoint, price=price, out=out)
    except KeyboardInterrupt:
        if "://" in target:
            kept = f"what ended is kept in {out}; the same command continues" if out else "nothing is kept without --out"
            console.say(f"stopped; {kept}")
        raise


def _names(settings: "RunSettings") -> str:
    return " + ".join(chosen.name for chosen in settings.environments())


def _show(result: "Evaluation", settings: "RunSettings", target: str) -> None:
    """The rate in a line; below it a table with a row for each environment, and what else is worth knowing."""
    from tether.runs.pages import spent

    metrics, evaluation, console = result.metrics, settings.evaluation, SafeConsole()
    some = "" if metrics["instances"] == metrics["prompts"] else f" of {metrics['instances']:.0f} different instances"
    samples = "" if evaluation.samples == 1 else f", {evaluation.samples} samples each"
    interval = f"(95% interval {metrics['success_low']:.1%} to {metrics['success_high']:.1%}, "
    played = f"{metrics['prompts']:.0f} prompts{some}, temperature {evaluation.temperature:g}{samples})"
    head = f"{settings.model.name} on {_names(settings)}: success "
    console.print(Text.assemble(head, (f"{metrics['success']:.1%}", "bold"), f" {interval}{played}"), soft_wrap=True)
    show_table(_table(result.environments))
    lines = [spent(result.record)] if "://" in target else []
    lines += result.notes
    if failed := result.record["failed"]:
        lines.append(f"conversations that failed and are in no number: {len(failed)}, the first: {failed[0]['reason']}")
    if cut := result.record["cut_responses"]:
        most = f"{settings.rollout.max_tokens} tokens; --max-tokens gives more"
        lines.append(f"{cut} of {result.tokens['responses']} responses were cut at {most}")
    if result.files is not None:
        lines.append(f"page: {result.files}.html")
    for line in lines:
        console.say(line)


def _show_together(results: list["Evaluation"]) -> None:
    """All models in one table, best first, and every pair on the same instances."""
    from tether.runs.evaluations import compare, distinct_names, task_key
    from tether.runs.pages import difference_words, pass_names, rate

    records = distinct_names([{**result.record, "file": str(result.files)} if result.files else result.record for result in results])
    records.sort(key=lambda record: -record["metrics"]["success"])
    ks = pass_names(records)
    numbers = ("success", "95% interval", *(f"pass@{k}" for k in ks), "reward", "95% interval", "instances", "failed")
    table = plain_table("model", *numbers, right=numbers, header_style="bold")
    for record in records:
        metrics, ends, reward = record["metrics"], record["intervals"]["success"], record["intervals"]["reward_mean"]
        table.add_row(
            record["model"]["name"],
            rate(metrics["success"]),
            f"{rate(ends[0])} to {rate(ends[1])}",
            *(rate(metrics.get(f"pass_at_{k}")) for k in ks),
            f"{metrics['reward_mean']:.3f}",
            "-" if reward is None else f"{reward[0]:.3f} to {reward[1]:.3f}",
            f"{metrics['instances']:.0f}",
            f"{metrics['errors']:.0f}",
        )
    console = SafeConsole()
    console.print()
    show_table(table)
    console.say("\ndifferences on the same instances, 95% intervals:")
    for first, second in itertools.combinations(records, 2):
        difference = compare(first, second)
        words = f"{first['model']['name']} and {second['model']['name']} played no instance in common"
        console.say(f"  {difference_words(difference) if difference else words}")
    if len({task_key(record) for record in records}) > 1:
        console.say("the models were not asked in the same way: options of the environment differ (see the records)")


def _echo_json(results: list["Evaluation"], settings: list["RunSettings"]) -> None:
    """One object for one model; of several, the list of theirs and the differences of all pairs."""
    from tether.runs.evaluations import compare

    objects = []
    for result, own in zip(results, settings, strict=True):
        about: dict[str, Any] = {"env": _names(own), "model": own.model.name, "samples": own.evaluation.samples}
        apart = {"environments": result.environments} if result.mixed else {}
        objects.append({**about, **result.metrics, **apart, "intervals": result.record["intervals"], "tokens": result.record["tokens"]})
    if len(objects) == 1:
        typer.echo(json.dumps(objects[0]))
        return
    pairs = [compare(a.record, b.record) for a, b in itertools.combinations(results, 2)]
    differences = [
        {
            "first": pair.first,
            "second": pair.second,
            "success": pair.success,
            "success_low": pair.low,
            "success_high": pair.high,
            "reward": pair.reward,
            "reward_interval": pair.reward_interval,
            "instances": pair.num_instances,
        }
        for pair in pairs
        if pair is not None
    ]
    typer.echo(json.dumps({"results": objects, "differences": differences}))


def _table(environments: dict[str, dict[str, float]]) -> Table:
    measured = {name.removeprefix("pass_at_") for metrics in environments.values() for name in metrics if name.startswith("pass_at_")}
    ks = sorted(measured, key=int)
    numbers = ("prompts", "success", "95% interval", *(f"pass@{k}" for k in ks[1:]), "reward", "turns", "well formed")
    table = plain_table("environment", *numbers, "own numbers", right=numbers, header_style="bold")
    for env, metrics in environments.items():
        own = {key.removeprefix(f"env/{env}/"): value for key, value in metrics.items() if key.startswith("env/")}
        table.add_row(
            env,
            f"{metrics['prompts']:.0f}",
            f"{metrics['success']:.1%}" if "success" in metrics else "-",
            f"{metrics['success_low']:.1%} to {metrics['success_high']:.1%}" if "success" in metrics else "all errored",
            *(f"{metrics[f'pass_at_{k}']:.1%}" if f"pass_at_{k}" in metrics else "-" for k in ks[1:]),
            f"{metrics['reward_mean']:.3f}" if "success" in metrics else "-",
            f"{metrics['turns']:.1f}" if "success" in metrics else "-",
            f"{metrics['format_valid']:.1%}" if "success" in metrics else "-",
            ", ".join(f"{key} {value:.3g}" for key, value in own.items()),
        )
    return table
