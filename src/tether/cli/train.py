"""`tether train`: resolve every setting, train with a live view, write the report."""

import json
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.text import Text

from tether.cli.console import SafeConsole, surviving_console
from tether.cli.options import AlgorithmName, Device, ModelName, complete_config, complete_env, complete_filter, complete_override
from tether.core.config import merge
from tether.core.errors import BadInput
from tether.runs.checkpoints import BEST, MODEL, best_checkpoint, newest_checkpoint, step_of
from tether.runs.remote import local_folder
from tether.runs.store import RunStore

EXAMPLES = """\b
Examples:
  tether train frozen_lake --steps 20 --set rollout.group_size=8
  tether train sokoban --model smollm2 --filter top_p:0.9 --out runs/sokoban
  tether train --config sokoban/ppo --smoke
  tether train sokoban --also frozen_lake=0.5 --algo dapo
  tether train frozen_lake --track tensorboard --track wandb
  tether train sokoban --model smollm2 --engine http://127.0.0.1:8000
  tether train --resume --out runs/sokoban
  tether train sokoban --out s3://bucket/runs/sokoban
  tether train --agent my_module:my_agent --tasks tasks.jsonl --model smollm2
  tether train sokoban --gpus 8 --restarts 5 --out runs/sokoban
  tether train sokoban --ray head:6379 --topology topology.yaml --out /shared/run
"""


def train(
    context: typer.Context,
    env: Annotated[
        str | None, typer.Argument(help="Environment, see `tether envs`; may also come from --config.", autocompletion=complete_env)
    ] = None,
    model: ModelName = None,
    also: Annotated[
        list[str] | None,
        typer.Option(
            "--also", metavar="ENV[=WEIGHT]", help="A further environment of the same run; its weight is 1.", autocompletion=complete_env
        ),
    ] = None,
    algo: AlgorithmName = None,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter", help="Strategy and share to keep, such as top_p:0.9, top_k:0.5, auto or all.", autocompletion=complete_filter
        ),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Your own program in the place of an environment: an async function, as module:function.")
    ] = None,
    agent_command: Annotated[str | None, typer.Option(help="Or a command that is started for every episode.")] = None,
    tasks: Annotated[str | None, typer.Option(help="The file of the agent's tasks, a JSON object a line.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    data: Annotated[str | None, typer.Option(metavar="FILE", help="Data of the environment; alone, questions that qa plays.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate, learner.learning_rate.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Episodes per prompt.")] = None,
    num_groups: Annotated[int | None, typer.Option(help="Prompts per step.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Budget of one response.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Budget of one conversation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Sampling temperature of training.")] = None,
    kl: Annotated[float | None, typer.Option(help="Weight of the KL term, algorithm.kl_coef.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the batch of a step.")] = None,
    save_every: Annotated[int | None, typer.Option(help="Steps between two checkpoints.")] = None,
    eval_every: Annotated[int | None, typer.Option(help="Steps between two evaluations.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="What samples: native, vllm, or the address of a server (several with commas between).")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Run folder, or an address such as s3://bucket/run; must be new unless --resume.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="A TOML or YAML file of settings, or a config that comes with Tether, such as sokoban/ppo.", autocompletion=complete_config
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting, such as rollout.group_size=8; `tether settings` lists them.",
            autocompletion=complete_override,
        ),
    ] = None,
    device: Device = None,
    track: Annotated[
        list[str] | None, typer.Option("--track", help="A tracker: tensorboard, wandb, trackio or mlflow; may be given again.")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two small steps on `tiny`, to see that it works.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")] = False,
    gpus: Annotated[int | None, typer.Option("--gpus", help="Train on so many GPUs of this machine, one process each.")] = None,
    ray: Annotated[
        str | None,
        typer.Option("--ray", metavar="ADDRESS", help="Train on the Ray cluster at HOST:PORT; local starts one on this machine."),
    ] = None,
    topology: Annotated[
        Path | None, typer.Option("--topology", help="With --ray: a YAML file of learner ranks, engines and environment workers.")
    ] = None,
    restarts: Annotated[int | None, typer.Option(help="Start again up to so often where a rank or the last server dies.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only notes, the verdict and the report's path.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print how the run ended as one JSON object; everything else to stderr.")] = False,
) -> None:
    """Train an agent; shows success, reward variance, kept ratio and information live, and writes a report at the end."""
    from tether.training.api import join_world, open_run, run_training
    from tether.training.resolve import chosen, named_settings, overrides, run_settings

    given = merge(named_settings(env, model, algo, filter_, steps, seed), overrides(set_))
    flags = {
        "rollout.engine": engine, "model.device": device, "env.options.data": data, "learner.learning_rate": lr, "algorithm.kl_coef": kl,
        "rollout.group_size": group_size, "rollout.num_groups": num_groups, "rollout.max_tokens": max_tokens, "rollout.max_context": max_context,
        "rollout.temperature": temperature, "learner.epochs": epochs, "checkpoint.every": save_every, "evaluation.every": eval_every,
        "agent.target": agent, "agent.command": agent_command, "agent.tasks": tasks,
    }  # fmt: skip
    given = merge(given, chosen(flags))
    if also:
        given["also"] = [_weighted(text) for text in also]
    if track:
        given["trackers"] = track

    def settings_with(more: dict[str, Any]) -> Any:
        return run_settings(out, config, merge(given, more), resume=resume, smoke=smoke)

    if restarts is not None:
        _supervise(restarts, context.obj, out, settings_with)
    if ray is not None or topology is not None:
        _launch_on_ray(ray, topology, gpus, context.obj, out, settings_with)
    if gpus is not None:
        _launch_ranks(gpus, context.obj, settings_with)
    ranks = join_world()
    if ranks.rank:
        logging.basicConfig(format=f"rank {ranks.rank}: %(message)s")
        logging.captureWarnings(True)
    with surviving_console(ranks.interrupts.console_closed):
        store, settings = open_run(out, config, given, resume=resume, smoke=smoke, ranks=ranks)
        if ranks.rank == 0:
            _run(settings, store, resume and bool(given), ranks, SafeConsole(stderr=as_json), quiet=quiet or as_json)
            if as_json:
                typer.echo(json.dumps(_outcome(store)))
        else:
            run_training(settings, store, (), resumed=resume, ranks=ranks)
        ranks.close()


def _supervise(restarts: int, words: list[str], out: Path | None, resolve: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Run the same command as a child that is started again where it dies, and exit as it did."""
    from tether.training.distributed.ranks import launched_rank

    if launched_rank()[1] > 1:
        raise BadInput(
            "--restarts starts the ranks itself; under torchrun leave it out and give torchrun --max-restarts=N (ranks that it starts again "
            "continue by themselves), under srun see examples/cluster/train.sbatch"
        )
    from tether.training.api import default_folder
    from tether.training.supervisor import supervise

    rest = _without(words, "--restarts")
    if out is None:
        out = default_folder(resolve({}))
        rest += ["--out", str(out)]
    console = SafeConsole(stderr=True)
    command = [sys.executable, "-P", "-m", "tether", *rest]  # -P: without the current folder, as the command itself
    sys.exit(supervise(command, restarts, local_folder(out), lambda line: console.say(f"tether: {line}")))


def _launch_ranks(gpus: int, words: list[str], resolve: Callable[[dict[str, Any]], Any]) -> NoReturn:
    """Start a rank a GPU with the same arguments, and exit as they did."""
    from tether.training.distributed.ranks import launched_rank

    if launched_rank()[1] > 1:
        raise BadInput("--gpus starts the ranks itself; leave it out under torchrun")
    from tether.training.distributed.process_group import check_gpus, launch

    check_gpus(gpus, resolve({}).model.device)
    sys.exit(launch(gpus, _without(words, "--gpus")))


def _launch_on_ray(
    address: str | None,
    path: Path | None,
    gpus: int | None,
    words: list[str],
    out: Path | None,
    resolve: Callable[[dict[str, Any]], Any],
) -> NoReturn:
    """Have Ray place the processes of the run, wait for them, and exit as they did."""
    from tether.training.distributed.ranks import launched_rank
    from tether.training.distributed.topology import ENGINE_NAME, check_environments, load_topology

    if address is None or path is None:
        raise BadInput(f"{'--topology' if address is None else '--ray'} is given alone; --ray ADDRESS and --topology FILE belong together")
    if gpus is not None or launched_rank()[1] > 1:
        raise BadInput("--ray starts the ranks itself; leave out --gpus and torchrun, and give their number in the topology")
    topology = load_topology(path)
    rest = _without(words, "--ray", "--topology")
    engine: dict[str, Any] = {"rollout": {"engine": ENGINE_NAME}} if topology.engines.count else {}
    settings = resolve(engine)
    if "--engine" in rest or any(word.startswith("--engine=") for word in rest):
        raise BadInput(
            f"--engine is given beside --ray; with engines in the topology it is {ENGINE_NAME} by itself, without them leave --ray out"
        )
    if not topology.engines.count and settings.rollout.engine == ENGINE_NAME:
        raise BadInput(f"rollout.engine is {ENGINE_NAME}, but the topology has no engines; give engines.count in '{path}'")
    check_environments(topology, [chosen.name for chosen in settings.environments()])
    from tether.training.distributed.ray_run import run_on_ray

    def output(line: str, *, error: bool = False) -> None:
        print(line, file=sys.stderr if error else sys.stdout, flush=True)

    sys.exit(
        run_on_ray(address, topology, settings, [*rest, *(["--engine", ENGINE_NAME] if engine else [])], out and local_folder(out), output)
    )


def _without(words: list[str], *options: str) -> list[str]:
    """The arguments without some options and their values."""
    return [
        word
        for number, word in enumerate(words)
        if word.partition("=")[0] not in options and (number == 0 or words[number - 1] not in options)
    ]


def _weighted(text: str) -> dict[str, Any]:
    """`ENV` or `ENV=WEIGHT`; an address may hold an equals sign itself, so only a number after the last one is a weight."""
    name, equals, weight = text.rpartition("=")
    if not equals or "://" in weight:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise BadInput(f"--also got '{text}'; write it as ENV or ENV=WEIGHT, for example frozen_lake=0.5") from None


def _run(settings: Any, store: RunStore, changed: bool, ranks: Any, console: SafeConsole, *, quiet: bool) -> None:
    from tether.training.api import run_training

    resumed, place, mirror = not store.is_new, store.place, store.mirror
    played = " + ".join(chosen.name for chosen in settings.environments())
    console.print(Text(played, "bold"), end="")
    console.print(f" with {settings.model.name}, {settings.algorithm.name}, filter {settings.filter.strategy}", end="")
    share = "" if settings.filter.strategy in ("all", "band") else f" {settings.filter.keep}"
    console.print(f"{share}, {settings.steps} steps, seed {settings.seed}", end="", highlight=False)
    console.print(f"{f', {ranks.size} ranks' if ranks.size > 1 else ''} -> {place}", highlight=False)
    console.print(_validation(settings), highlight=False)
    if resumed:
        console.say(_continues(store, settings.steps))
    status = console.status("loading the model")
    status.start()
    from tether.cli.live import LiveView, Notes, ReportAhead

    last = newest_checkpoint(store.checkpoints) if resumed else None
    view = Notes(console) if quiet else LiveView(console, settings.steps, step_of(last) if last else 0)
    trainers: list[Any] = []
    report = ReportAhead(store)

    def ready(trainer: Any) -> None:
        trainers.append(trainer)
        status.stop()
        if not quiet:
            console.say(_needs(settings, trainer))

    try:
        run_training(settings, store, [view, report], resumed=resumed, changed=changed, ranks=ranks, ready=ready)
    except KeyboardInterrupt:
        last = newest_checkpoint(store.checkpoints)
        SafeConsole(stderr=ranks.interrupts.received == signal.SIGPIPE).print(
            f"{_stop_words(ranks.interrupts.received)} {f'after step {trainers[0].step}' if trainers else 'while the model was loaded'}; "
            f"the last checkpoint is {last.name if last else 'none: a resumed run starts from scratch'}. "
            f"Continue with: tether train --resume --out {place}",
            soft_wrap=True,
        )
        sys.exit(ranks.interrupts.exit_code)
    finally:
        status.stop()
    assert report.write is not None  # no run ends otherwise without an error
    _finish(console, store, report.write)
    if mirror is not None:
        mirror.upload()  # the report


def _validation(settings: Any) -> str:
    """When the run validates, and on how many prompts."""
    from tether.training.resolve import cpu_prompts, on_cpu

    prompts, every = settings.evaluation.prompts, settings.evaluation.every
    if prompts == 0:
        return "no validation (evaluation.prompts=0)"
    few = on_cpu(settings) and prompts == cpu_prompts(settings.model.name)
    on = "every row of the data file, or 512 prompts" if prompts is None else f"{prompts} prompts{', as this is a CPU,' * few}"
    change = "--set evaluation.prompts=512 for the paper's, 0 for none" if few else "--set evaluation.prompts=0 for none"
    return f"validation on {on} at the start{f', every {every} steps' * bool(every)} and at the end; {change}"


def _needs(settings: Any, trainer: Any) -> str:
    """What the run takes, beside what is there, and what comes first."""
    rollout, evaluation = settings.rollout, settings.evaluation
    memory = (
        f"memory {trainer.plan.total / 1e9:.1f} GB of {trainer.plan.available / 1e9:.1f} GB"
        if trainer.plan is not None
        else "memory: not counted"
    )
    disk = f"disk {trainer.disk.words()}" if trainer.disk is not None else "disk: not counted"
    validated = f"{evaluation.samples * (evaluation.prompts or 512)} validation episodes, then "
    validated = "" if trainer.step or evaluation.prompts == 0 else validated
    episodes = f"{rollout.num_groups * rollout.group_size} episodes with up to {rollout.max_tokens} tokens a response"
    return f"needs: {memory}; {disk}; the first step plays {validated}{episodes}"


def _stop_words(number: int | None) -> str:
    """How a run was told to stop."""
    if number == signal.SIGPIPE:
        return "nobody reads the output any more: stopped"
    return "stopped" if number in (None, signal.SIGINT) else f"stopped by {signal.Signals(number).name}"


def _continues(store: RunStore, steps: int) -> str:
    """Where a resumed run continues."""
    checkpoint = newest_checkpoint(store.checkpoints)
    if checkpoint is None:
        best = f"; {_best_words(store)}" if best_checkpoint(store.checkpoints) else ""
        return f"resuming: there is no checkpoint yet, so the run starts from scratch{best}"
    step = step_of(checkpoint)
    lost = max((record.step for record in store.steps()), default=step) - step
    again = f"; steps {step + 1} to {step + lost} are trained again" if lost > 0 else ""
    if step >= steps:
        return f"all {steps} steps are done; --steps with a larger number continues the run"
    return f"resuming after step {step} of {steps}{again}"


def _best_words(store: RunStore) -> str:
    """Where the best weights are, and how to train on from them: there is no optimiser state to resume with."""
    best, model = best_checkpoint(store.checkpoints), store.checkpoints / BEST / MODEL
    assert best is not None
    return f"the best weights, of step {best.step} ({best.success:.1%}), are in {model}: a new run trains on from them with --model {model}"


def _outcome(store: RunStore) -> dict[str, Any]:
    """What --json prints."""
    steps = store.steps()
    validation = {record.step: record.metrics["validation/success"] for record in steps if "validation/success" in record.metrics}
    return {
        "run": str(store.folder),
        "finished": store.finished,
        "step": steps[-1].step if steps else 0,
        "validation_success": validation,
        "metrics": steps[-1].metrics if steps else {},
        "report": str(store.folder / "report.html"),
    }


def _finish(console: SafeConsole, store: RunStore, write_report: Callable[[Path], Path]) -> None:
    """The report, and the verdict in words."""
    from tether.runs.verdict import verdict

    path = write_report(store.folder / "report.html")
    console.print()
    for sentence in verdict(store.steps()):
        console.print(sentence, highlight=False, markup=False)
    if best_checkpoint(store.checkpoints):
        console.say(f"\n{_best_words(store)}")
    console.say(f"\nreport: {path}")
