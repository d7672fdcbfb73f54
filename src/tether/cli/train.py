"""`tether train`: settle every setting, then train with a live view, then write the report."""

import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tether.core.config import Settings, dump_yaml, load, merge, parse_overrides
from tether.core.errors import BadInput, ConfigError, TetherError
from tether.core.protocols import Env
from tether.runs.store import RunStore

SMOKE: dict[str, Any] = {
    "model": {"name": "tiny"},
    "rollout": {"num_groups": 2, "group_size": 4, "max_tokens": 64, "max_context": 1024, "max_rows": 64},
    "learner": {"learning_rate": None, "update_batch": 4},
    "critic": {"model": None, "learning_rate": None},
    "algorithm": {"reference": None},
    "evaluation": {"prompts": 4, "samples": 1},
    "diagnosis": {"every": 1},
    "steps": 2,
}
"""Any run, made so small that it shows in a minute whether it works."""
FREE_ON_RESUME = {
    "steps": (),
    "learner": ("micro_tokens", "gradient_checkpointing", "share_prompts"),
    "rollout": ("max_rows", "cache_gb"),
    "diagnosis": ("every",),
}
"""What may change when a run goes on: how long it is, and what decides how much memory it takes but not what it learns."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name first: every version of torch heeds it, some pass over the newer one."""

EXAMPLES = """\b
Examples:
  tether train frozen_lake --steps 20 --set rollout.group_size=8
  tether train sokoban --model smollm2 --filter top_p:0.9 --out runs/sokoban
  tether train --config configs/sokoban/ppo.yaml --smoke
  tether train sokoban --also frozen_lake=0.5 --algo dapo
  tether train --resume --out runs/sokoban
"""


def train(
    env: Annotated[str | None, typer.Argument(help="Environment, see `tether envs`; may also come from --config.")] = None,
    model: Annotated[str | None, typer.Option(help="tiny, smollm2, a Hugging Face id or folder, or a .gguf file.")] = None,
    also: Annotated[
        list[str] | None, typer.Option("--also", metavar="ENV[=WEIGHT]", help="A further environment of the same run; its weight is 1.")
    ] = None,
    algo: Annotated[str | None, typer.Option(help="ppo, grpo, dapo or dr_grpo.")] = None,
    filter_: Annotated[
        str | None, typer.Option("--filter", help="Strategy and share to keep, such as top_p:0.9, top_k:0.5, auto or all.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything.")] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; must be new unless --resume.")] = None,
    config: Annotated[Path | None, typer.Option(help="A TOML or YAML file of settings.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as rollout.group_size=8.")] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="Two small steps on `tiny`, to see that it works.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --out from its last checkpoint.")] = False,
) -> None:
    """Train an agent; shows success, reward variance, kept ratio and information live, and writes a report at the end."""
    flags = _flags(env, model, algo, filter_, steps, seed, set_ or [])
    if also:
        flags["also"] = [_weighted(text) for text in also]
    if resume:
        if smoke:
            raise ConfigError("--smoke begins a run of its own; leave it out with --resume")
        store, settings = _reopen(out, config, flags)
    else:
        settings = _settle(config, flags, SMOKE if smoke else {})
        store = _create(out, settings)
    _run(settings, store, resume)


def _flags(
    env: str | None, model: str | None, algo: str | None, filter_: str | None, steps: int | None, seed: int | None, pairs: list[str]
) -> dict[str, Any]:
    """The command line as nested settings; --set lies on top."""
    nested: dict[str, Any] = {}
    for section, name in (("env", env), ("model", model), ("algorithm", algo)):
        if name is not None:
            nested[section] = {"name": name}
    if filter_ is not None:
        nested["filter"] = _filter(filter_)
    nested.update({key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None})
    return merge(nested, parse_overrides(pairs))


def _weighted(text: str) -> dict[str, Any]:
    """`ENV` or `ENV=WEIGHT`; an address may hold an equals sign itself, so only a number after the last one is a weight."""
    name, equals, weight = text.rpartition("=")
    if not equals or "://" in weight:
        return {"name": text}
    try:
        return {"name": name, "weight": float(weight)}
    except ValueError:
        raise BadInput(f"--also got '{text}'; write it as ENV or ENV=WEIGHT, for example frozen_lake=0.5") from None


def _filter(text: str) -> dict[str, Any]:
    strategy, colon, keep = text.partition(":")
    if not colon:
        return {"strategy": strategy}
    try:
        return {"strategy": strategy, "keep": float(keep)}
    except ValueError:
        raise BadInput(f"--filter got '{text}'; write it as strategy:share, for example top_p:0.9") from None


def _settle(config: Path | None, flags: dict[str, Any], smoke: dict[str, Any]) -> Any:
    """All settings, checked as far as that goes without torch: names, ranges, the environment's own options, the model's name."""
    from tether.envs.registry import make_env
    from tether.models.catalog import check_name
    from tether.training.settings import RunSettings

    if config is None and "env" not in flags:
        raise BadInput("no environment given; name one, as in `tether train frozen_lake`, or give --config FILE")
    settings = load(RunSettings, config, merge(smoke, flags))
    check_name(settings.model.name)
    return _changed(settings, lambda chosen: _all_options(chosen, make_env(chosen.name, **chosen.options)))


def _changed(settings: Any, options: Callable[[Any], dict[str, Any]]) -> Any:
    """The settings with other options for each of their environments."""
    env, *also = (chosen.model_copy(update={"options": options(chosen)}) for chosen in settings.environments())
    return settings.model_copy(update={"env": env, "also": also})


def _all_options(chosen: Any, env: Env) -> dict[str, Any]:
    """Every option of the environment, so that the run's record tells the defaults it was made with."""
    options = getattr(env, "options", None)
    if not isinstance(options, Settings):
        return dict(chosen.options)
    return options.model_dump(mode="json", exclude={"split"} - chosen.options.keys())


def _create(out: Path | None, settings: Any) -> RunStore:
    names = [chosen.name.partition("://")[2] or chosen.name for chosen in settings.environments()]
    played = "+".join(re.sub(r"\W+", "_", name) for name in names)
    folder = out or Path("runs") / f"{played}-{settings.algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    about = {
        "env": "+".join(chosen.name for chosen in settings.environments()),
        "model": settings.model.name,
        "algorithm": settings.algorithm.name,
        "seed": settings.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    return RunStore.create(folder, dump_yaml(_without_secrets(settings)), about)


def _without_secrets(settings: Any) -> Any:
    """The settings as they may be written down: an option that is not to be shown (a token) stays out, and comes from TETHER_TOKEN."""
    from tether.envs.factory import env_factory

    def shown(chosen: Any) -> dict[str, Any]:
        known = env_factory(chosen.name).options
        secret = {"token"} if known is None else {name for name, field in known.model_fields.items() if not field.repr}
        return {key: value for key, value in chosen.options.items() if key not in secret}

    return _changed(settings, shown)


def _reopen(out: Path | None, config: Path | None, flags: dict[str, Any]) -> tuple[RunStore, Any]:
    """The run in `out` with its own settings; the number of steps may be raised, and memory may be saved."""
    from tether.training.settings import RunSettings

    if out is None:
        raise BadInput("--resume needs to know which run; add --out FOLDER")
    fixed = [section for section, value in flags.items() if section not in FREE_ON_RESUME or not _is_free(section, value)]
    if config is not None or fixed:
        free = ", ".join(f"{section}.{key}" for section, keys in FREE_ON_RESUME.items() for key in keys)
        raise ConfigError(f"--resume goes on with the run's own settings; only --steps, and --set of {free}, may be given with it")
    store = RunStore.open(out)
    before = load(RunSettings, out / "config.yaml")
    settings = load(RunSettings, out / "config.yaml", flags)
    if settings.steps < before.steps:
        raise BadInput(
            f"the run has {before.steps} steps and cannot be cut to {settings.steps}; give at least {before.steps}, or no --steps"
        )
    if settings != before:
        store.replace_config(dump_yaml(settings))
    return store, settings


def _is_free(section: str, value: Any) -> bool:
    keys = FREE_ON_RESUME[section]
    return not keys or (isinstance(value, dict) and set(value) <= set(keys))


def _let_segments_grow() -> None:
    """Have torch's allocator on a card grow its segments instead of taking new ones, unless the user has set it up: rollout and update
    want blocks of other sizes, and what lies between fixed segments is lost to both. torch reads this when it first uses the card."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def _run(settings: Any, store: RunStore, resumed: bool) -> None:
    from tether.cli.live import LiveView

    _let_segments_grow()
    console = Console()
    played = " + ".join(chosen.name for chosen in settings.environments())
    console.print(f"[bold]{played}[/] with {settings.model.name}, {settings.algorithm.name}, filter {settings.filter.strategy}", end="")
    share = "" if settings.filter.strategy in ("all", "band") else f" {settings.filter.keep}"
    console.print(f"{share}, {settings.steps} steps, seed {settings.seed} -> {store.folder}", highlight=False)
    with console.status("loading the model"):
        from tether.training.trainer import Trainer

        try:
            trainer = Trainer(settings, store, LiveView(console, settings.steps))
        except TetherError:
            if not resumed:
                shutil.rmtree(store.folder)  # made a moment ago, holds nothing
            raise
    try:
        trainer.run()
    except KeyboardInterrupt:
        console.print(
            f"stopped after step {trainer.step}; the last checkpoint is {_last_checkpoint(store)}. "
            f"Go on with: tether train --resume --out {store.folder}",
            soft_wrap=True,
        )
        sys.exit(130)
    _finish(console, store)


def _last_checkpoint(store: RunStore) -> str:
    names = sorted(path.name for path in store.checkpoints.glob("step_*"))
    return names[-1] if names else "none: the run would begin anew"


def _finish(console: Console, store: RunStore) -> None:
    """The report, and the verdict in words."""
    from tether.cli.report import full_report
    from tether.runs.verdict import verdict

    path = full_report([store], store.folder / "report.html")
    console.print()
    for sentence in verdict(store.steps()):
        console.print(sentence, highlight=False, markup=False)
    console.print(f"\nreport: {path}", highlight=False, soft_wrap=True)
