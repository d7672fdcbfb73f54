"""The library's front door: `tether.train`, `tether.evaluate`, `tether.play`. The command line calls the same functions.

Settings are checked as far as possible before torch is loaded; whatever needs torch is imported inside the functions.
"""

import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.algorithms.filters.scores import find_score
from tether.core.config import Settings, dump_yaml, find_config, load, merge, read_file, validate
from tether.core.errors import BadInput, ConfigError, TetherError
from tether.core.importing import is_import_path
from tether.core.protocols import Engine, Env
from tether.core.types import Group
from tether.envs.factory import env_factory
from tether.envs.registry import check_received, make_env
from tether.models.catalog import check_name
from tether.models.chat_endpoint import is_endpoint
from tether.runs.checkpoints import MODEL, find_checkpoint
from tether.runs.run import Run
from tether.runs.store import CONFIG, RunStore
from tether.runs.trackers import check_tracker
from tether.training.distributed.ranks import Ranks, join_ranks
from tether.training.settings import EnvSettings, EvaluationSettings, RunSettings, ServerSettings

if TYPE_CHECKING:
    from tether.training.callbacks import Callback
    from tether.training.evaluate import Evaluation

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
"""Any run, reduced to what shows within a minute whether it works."""

CPU_PROMPTS = 128
"""Validation prompts by default where a CPU plays them; the paper's 512 elsewhere."""

SECRET_NAME = re.compile(r"(?i)(^|_)(token|secret|password|passwd|api_?key|credentials?)$")
"""Names of options that are never written down, whatever their class says."""

FREE_ON_RESUME = {
    "steps": (),
    "learner": ("micro_tokens", "gradient_checkpointing", "share_prompts", "sharding"),
    "rollout": ("max_rows", "cache_gb", "error_retries", "engine"),
    "server": (),
    "diagnosis": ("every",),
    "trackers": (),
}
"""What may change when a run is resumed, whole sections where no keys are named: how long it is, where it samples, who follows it, and what
decides how much memory it takes but not what it learns."""

COMMANDS = ("vllm_command", "vllm_args")
"""Settings of the section `server` that start a program."""

_LOG = logging.getLogger(__name__)

FORMER_WORDING = {"instructions": "plain", "lenient": False}
"""The values that these options of environments had, in effect, before there were such options: tether 0.1."""

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name first: every version of torch reads it, some ignore the newer one."""


# ------------------------------------------------------------------------------------------------------------------- train


def train(
    env: str | None = None,
    model: str | Mapping[str, Any] | None = None,
    algo: str | None = None,
    filter: str | Mapping[str, Any] | None = None,
    steps: int | None = None,
    out: Path | str | None = None,
    callbacks: Sequence["Callback"] = (),
    *,
    options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    config: Path | str | None = None,
    resume: bool = False,
    smoke: bool = False,
    **settings: Any,
) -> Run:
    """Train an agent: the same run as `tether train`, without the live view and the report. Processes that torchrun started train together.

    Args:
        env: an environment's name; may also come from `config`.
        model: tiny (the default), smollm2, a Hugging Face id or folder, or a .gguf file; or the settings of that section.
        algo: ppo, grpo (the default), dapo or dr_grpo.
        filter: strategy and share to keep, such as "top_p:0.9" (the default unless the algorithm has its own), "top_k:0.5", "auto" or "all";
            or the settings of that section.
        steps: training steps.
        out: run folder; must be new unless `resume`. By default a new folder under runs/.
        callbacks: `tether.Callback` objects that follow the run; of several ranks, rank 0's are called.
        options: options of the environment.
        seed: seed of everything.
        config: a TOML or YAML file of settings, or the name of a config that comes with Tether, such as "sokoban/ppo".
        resume: continue the run in `out` from its last checkpoint.
        smoke: two small steps on `tiny`, to see that it works.
        settings: any other setting by section, such as rollout={"group_size": 8}, or dotted: **{"rollout.group_size": 8}.
    """
    given = merge(named_settings(env, model, algo, filter, steps, seed), {"env": {"options": dict(options)}} if options else {})
    given = merge(given, nested_settings(settings))
    ranks = join_world()
    store, resolved = open_run(out, config, given, resume=resume, smoke=smoke, ranks=ranks)
    run_training(resolved, store, callbacks, resumed=resume, ranks=ranks)
    return Run(store.folder)


def join_world() -> Ranks:
    """The ranks that this process trains with. Several take their GPUs here, so torch's allocator must be configured by then."""
    _grow_allocator_segments()
    return join_ranks()


def open_run(
    out: Path | str | None,
    config: Path | str | None,
    given: Mapping[str, Any],
    *,
    resume: bool,
    smoke: bool,
    ranks: Ranks | None = None,
) -> tuple[RunStore, RunSettings]:
    """The run folder and the resolved settings of a new or a resumed run. Of several ranks the first finds both, and alone writes."""
    ranks, place = ranks or Ranks(), Path(out) if out is not None else None
    settings = ranks.first(lambda: run_settings(out, config, given, resume=resume, smoke=smoke))
    if ranks.size > 1:
        ranks.together(lambda: check_several_ranks(settings, ranks))
    made: list[RunStore] = []
    folder = place if resume and place else ranks.first(lambda: _create(place, settings, made))
    return ranks.together(lambda: made[0] if made else _opened(folder, settings if given else None, writes=ranks.rank == 0)), settings


def _opened(folder: Path, changed: RunSettings | None, *, writes: bool) -> RunStore:
    """The store of a run that is there, locked where this rank writes; `changed` are settings to put on its record."""
    store = RunStore.open(folder, writes=writes)
    store.lock()
    if changed is not None:
        store.replace_config(dump_yaml(changed))
    if writes:
        store.reopen()
    return store


def run_settings(out: Path | str | None, config: Path | str | None, given: Mapping[str, Any], *, resume: bool, smoke: bool) -> RunSettings:
    """The resolved settings of a new or a resumed run."""
    out = Path(out) if out is not None else None
    if not resume:
        file = find_config(config) if config is not None else None
        return _fewer_prompts_on_cpu(resolve_settings(file, given, SMOKE if smoke else {}), file, given)
    if smoke:
        raise ConfigError("--smoke starts a run of its own; leave it out with --resume")
    return _reopen(out, config, given)


def _fewer_prompts_on_cpu(settings: RunSettings, file: Path | None, given: Mapping[str, Any]) -> RunSettings:
    """The settings with fewer validation prompts where a CPU would play the default number of them: that takes longer than some steps."""
    asked = merge(read_file(file) if file is not None else {}, given).get("evaluation") or {}
    default = EvaluationSettings.model_fields["prompts"].default
    if "prompts" in asked or settings.evaluation.prompts != default or not _on_cpu(settings):
        return settings
    return settings.model_copy(update={"evaluation": settings.evaluation.model_copy(update={"prompts": CPU_PROMPTS})})


def _on_cpu(settings: RunSettings) -> bool:
    from tether.models.hardware import default_device

    return (settings.model.device or default_device()) == "cpu"


def check_several_ranks(settings: RunSettings, ranks: Ranks) -> None:
    """Refuse a device that several ranks cannot have, and what they cannot divide."""
    from tether.models.hardware import default_device, num_gpus
    from tether.training.memory import trains_adapters

    if settings.learner.sharding == "fsdp" and trains_adapters(settings):
        raise BadInput(
            "learner.sharding is fsdp, and the run trains adapters (lora.rank): they are small, and the frozen weights are needed whole; "
            "give learner.sharding=zero1"
        )

    name = settings.model.device or default_device()
    if name not in ("cpu", "cuda"):
        raise BadInput(
            f"model.device is '{name}', and each of {ranks.size} ranks takes a GPU of its own; give cuda or cpu, or leave it out"
        )
    if name == "cuda" and ranks.local_rank >= num_gpus():
        raise BadInput(
            f"rank {ranks.rank} is the {ranks.local_rank + 1}. on its machine, which has {num_gpus()} GPUs; "
            "start one rank a GPU, or try it on the CPU: --set model.device=cpu"
        )


def run_training(
    settings: RunSettings,
    store: RunStore,
    callbacks: Sequence["Callback"],
    *,
    resumed: bool,
    ranks: Ranks | None = None,
    ready: Callable[[Any], None] = lambda trainer: None,
) -> None:
    """Build the trainer and run it; `ready` is called with the trainer once its model is loaded. Rank 0 calls `callbacks`."""
    _grow_allocator_segments()
    begin = time.perf_counter()
    from tether.training.loop import Trainer
    from tether.training.throughput import StartTimer
    from tether.training.tracking import Tracking

    start, ranks = StartTimer(imports=time.perf_counter() - begin), ranks or Ranks()
    if settings.trackers and ranks.rank == 0:
        callbacks = [*callbacks, Tracking(settings.trackers, _without_secrets(settings), store, callbacks)]
    try:
        with ranks.interrupts.listening():
            try:
                trainer = Trainer(settings, store, callbacks if ranks.rank == 0 else (), start, ranks)
            except TetherError:
                if not resumed and store.writes:
                    store.discard()
                raise
            ready(trainer)
            trainer.run()
    finally:
        store.close()


# ---------------------------------------------------------------------------------------------------------------- evaluate


def evaluate(
    model_or_run: Path | str,
    env: str | None = None,
    prompts: int | None = None,
    *,
    temperature: float = 0.5,
    samples: int = 1,
    best: bool = False,
    options: Mapping[str, Any] | None = None,
    callbacks: Sequence["Callback"] = (),
    out: Path | str | None = None,
    concurrency: int = 8,
    api_key_env: str | None = None,
    price: tuple[float, float] | None = None,
    body: Mapping[str, Any] | None = None,
    **settings: Any,
) -> "Evaluation":
    """Success on fixed prompts, with its 95% interval and pass@k.

    Args:
        model_or_run: a run folder (its newest checkpoint), anything `load_model` takes, or a model behind an OpenAI-compatible chat endpoint,
            as http://HOST:PORT#NAME.
        env: the environment; a run folder knows its own.
        prompts: how many; None plays every row of a data file once, and 512 validation prompts elsewhere.
        temperature: of sampling; 0 is greedy.
        samples: episodes per prompt; pass@k needs k of them.
        best: the run's best checkpoint instead of its newest.
        options: options of the environment; `split` is validation unless it is given here.
        callbacks: follow the progress (`on_stage_begin`, `on_stage_progress`).
        out: a folder for the record, its page and the conversations with an endpoint; the same call continues what was interrupted.
        concurrency: conversations with an endpoint at the same time.
        api_key_env: the variable that holds the key of an endpoint.
        price: of a million tokens of prompts and of completions, for the cost.
        body: further fields of every request to an endpoint; None leaves out one that would be sent.
        settings: any other setting, as in `train`.
    """
    given = merge({"evaluation": {"prompts": prompts, "temperature": temperature, "samples": samples}}, nested_settings(settings))
    if options:
        given = merge(given, {"env": {"options": dict(options)}})
    resolved = evaluation_settings(str(model_or_run), env, best, given)
    from tether.training.evaluation_run import run_evaluation
    from tether.training.remote_evaluation import EndpointOptions

    endpoint = EndpointOptions(concurrency, api_key_env, body or {})
    place = None if out is None else Path(out)
    return run_evaluation(resolved, str(model_or_run), callbacks, endpoint=endpoint, price=price, out=place)


def evaluation_settings(target: str, env: str | None, best: bool, given: Mapping[str, Any]) -> RunSettings:
    """The settings of an evaluation: those of the run folder if `target` is one, with what was given on top; names are checked."""
    named = merge(given, {"env": {"name": env}} if env is not None else {})
    base = _target_settings(target, best, named, own_env=env is None)
    if env is not None:
        base = {**base, "env": {"name": env}, "also": []}
    if "env" not in base and "/" in target and not Path(target).exists():
        raise BadInput(f"run folder '{target}' does not exist; check the path, or, where it is a model, add --env")
    if "env" not in base:
        raise BadInput(f"which environment should '{target}' play? add --env, see `tether envs`")
    settings = validate(RunSettings, merge(base, given))
    for chosen in settings.environments():
        make_env(chosen.name, **chosen.options)
    if not is_endpoint(settings.model.name):
        check_name(settings.model.name)
    return settings


def _target_settings(target: str, best: bool, given: Mapping[str, Any], own_env: bool) -> dict[str, Any]:
    """Settings of a run folder with its newest or best checkpoint as the model; of a model, just its name. `own_env`: the run's environment
    is played. `given` is what the user named."""
    folder = Path(target)
    if is_endpoint(target) or not (folder / "run.json").is_file():
        if best:
            raise BadInput(f"--best is for run folders, and '{target}' is not one; leave it out")
        return {"model": {"name": target}}
    store = RunStore.open(folder)
    config = _stored_config(store, given) if own_env else store.config()
    server = {key: value for key, value in (config.get("server") or {}).items() if key not in COMMANDS}  # a file starts no program
    model = {**config.get("model", {}), "name": str(find_checkpoint(store.checkpoints, best=best)[0] / MODEL)}
    for chosen in (config["env"], *config.get("also", [])):
        chosen.get("options", {}).pop("split", None)  # what the run was trained on is not what it is tested on
    return {
        **config,
        "model": model,
        "server": server,
        "rollout": {**config.get("rollout", {}), "engine": "native"},
    }  # its servers hold other weights by now


# -------------------------------------------------------------------------------------------------------------------- play


def play(
    env: str,
    model_or_engine: str | Engine,
    prompts: int = 8,
    group_size: int = 16,
    seed: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    temperature: float = 1.0,
    step: int = 1,
    **settings: Any,
) -> list[Group]:
    """Play episodes without training: the groups that a training step would sample.

    Args:
        env: the environment.
        model_or_engine: anything `load_model` takes, or an engine, such as a `ScriptedEngine`.
        prompts: groups to play.
        group_size: episodes of each.
        seed: of the run; with `step` it fixes prompts, environments and token draws.
        options: options of the environment.
        tokenizer: of an engine that does not carry one.
        temperature: of sampling.
        step: which step of the run to play.
        settings: any other setting, as in `train`.
    """
    from tether.models.chat import ChatFormat
    from tether.models.load import load_model
    from tether.models.policy import Policy
    from tether.rollout.engines.base import make_engine
    from tether.rollout.sampler import EnvPool, play_plan, training_plan
    from tether.training.build import compute_dtype, env_specs, episode_rules, server_options

    given: dict[str, Any] = {
        "env": {"name": env, "options": dict(options or {})},
        "rollout": {"num_groups": prompts, "group_size": group_size, "temperature": temperature},
        "filter": {"strategy": "all"},  # nothing is filtered here, so a group of one is allowed
        "seed": seed,
    }
    given = merge(given, nested_settings(settings))
    name = model_or_engine if isinstance(model_or_engine, str) else "engine"  # defaults may depend on the model; an engine's is not known
    resolved = validate(RunSettings, merge({"model": {"name": name}}, given))
    if isinstance(model_or_engine, str):
        check_name(model_or_engine)
        loaded = load_model(model_or_engine, device=resolved.model.device, dtype=compute_dtype(resolved))
        policy = Policy(loaded.model, loaded.tokenizer, max_positions=resolved.rollout.max_context)
        rules, chat = episode_rules(resolved, policy), ChatFormat(loaded.tokenizer, policy.end_of_turn_ids)
        server = server_options(resolved.server)
        rows = resolved.rollout.max_rows
        engine = make_engine(resolved.rollout.engine, policy, max_rows=rows, max_context=rules.max_context, server=server)
    else:
        engine, tokenizer = model_or_engine, tokenizer or getattr(model_or_engine, "tokenizer", None)
        if tokenizer is None:
            raise BadInput("the engine carries no tokenizer; give tokenizer=")
        rules, chat = episode_rules(resolved, None), ChatFormat(tokenizer)
    with EnvPool(env_specs(resolved.environments())) as pool:
        plan = training_plan(resolved.seed, step, resolved.rollout.num_groups, resolved.rollout.group_size, weights=pool.weights)
        retries = resolved.rollout.error_retries
        return play_plan(pool, plan, engine, chat, resolved.sampling(), rules, error_retries=retries)


# ---------------------------------------------------------------------------------------------------------------- settings


def named_settings(
    env: str | None,
    model: str | Mapping[str, Any] | None,
    algo: str | None,
    filter: str | Mapping[str, Any] | None,
    steps: int | None,
    seed: int | None,
) -> dict[str, Any]:
    """The arguments that have a name of their own, as nested settings."""
    nested: dict[str, Any] = {}
    for section, name in (("env", env), ("model", model), ("algorithm", algo)):
        if name is not None:
            nested[section] = dict(name) if isinstance(name, Mapping) else {"name": name}
    if filter is not None:
        nested["filter"] = dict(filter) if isinstance(filter, Mapping) else filter_settings(filter)
    nested.update({key: value for key, value in (("steps", steps), ("seed", seed)) if value is not None})
    return nested


def nested_settings(given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section or by dotted name, as a nested dictionary."""
    nested: dict[str, Any] = {}
    for key, value in given.items():
        value = value.model_dump(exclude_unset=True) if isinstance(value, Settings) else value
        for section in reversed(key.split(".")):
            value = {section: value}
        nested = merge(nested, value)
    return nested


def filter_settings(text: str) -> dict[str, Any]:
    """`strategy` or `strategy:share`."""
    strategy, colon, keep = text.partition(":")
    if not colon:
        return {"strategy": strategy}
    try:
        return {"strategy": strategy, "keep": float(keep)}
    except ValueError:
        raise BadInput(f"--filter got '{text}'; write it as strategy:share, for example top_p:0.9") from None


def resolve_settings(config: Path | None, given: Mapping[str, Any], base: Mapping[str, Any]) -> RunSettings:
    """All settings, checked as far as that goes without torch: names, ranges, the environment's own options, the model's name."""
    if config is None and "env" not in given:
        raise BadInput("no environment given; name one, as in `tether train frozen_lake`, or give --config FILE")
    settings = load(RunSettings, config, merge(base, given))
    if config is not None:
        _check_received(settings, given, f"settings file '{config}'")
    check_name(settings.model.name)
    find_score(settings.filter.score)  # a function of the user's is imported here, so that its mistakes are told before anything runs
    for name in settings.trackers:
        check_tracker(name)
    return _with_options(settings, lambda chosen: _all_options(chosen, make_env(chosen.name, **chosen.options)))


def _check_received(settings: RunSettings, given: Mapping[str, Any], where: str) -> None:
    """Refuse environments that a file names and that would run code of the current folder; those in `given` the user named."""
    named = _named_environments(given)
    for chosen in (*settings.environments(), *([settings.evaluation.env] if settings.evaluation.env is not None else [])):
        if chosen.name not in named:
            check_received(chosen.name, where)


def _named_environments(settings: Mapping[str, Any]) -> set[str]:
    """The names of environments in nested settings, which need not be valid."""
    evaluation = settings.get("evaluation")
    places = [settings.get("env"), evaluation.get("env") if isinstance(evaluation, Mapping) else None]
    places += list(settings["also"]) if isinstance(settings.get("also"), list) else []
    return {str(place["name"]) for place in places if isinstance(place, Mapping) and "name" in place}


def _with_options(settings: RunSettings, options: Callable[[EnvSettings], dict[str, Any]]) -> RunSettings:
    """The settings with other options for each of their environments."""
    env, *also = (chosen.model_copy(update={"options": options(chosen)}) for chosen in settings.environments())
    return settings.model_copy(update={"env": env, "also": also})


def _all_options(chosen: EnvSettings, env: Env) -> dict[str, Any]:
    """Every option of the environment, so that the run's record states the defaults it was made with."""
    options = getattr(env, "options", None)
    if not isinstance(options, Settings):
        return dict(chosen.options)
    return options.model_dump(mode="json", exclude={"split"} - chosen.options.keys())


def _create(out: Path | None, settings: RunSettings, made: list[RunStore]) -> Path:
    """A new run folder; its store, which holds the lock, is put into `made`."""
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
    made.append(RunStore.create(folder, dump_yaml(_without_secrets(settings)), about))
    return folder


def _without_secrets(settings: RunSettings) -> RunSettings:
    """The settings as they may be written down: an option that must not be shown (a token) is left out, and comes from TETHER_TOKEN."""

    def shown(chosen: EnvSettings) -> dict[str, Any]:
        known = env_factory(chosen.name).options
        secret = set() if known is None else {name for name, field in known.model_fields.items() if not field.repr}
        return {key: value for key, value in chosen.options.items() if key not in secret and not SECRET_NAME.search(key)}

    cleared = _with_options(settings, shown)
    if (other := settings.evaluation.env) is None:
        return cleared
    evaluation = settings.evaluation.model_copy(update={"env": other.model_copy(update={"options": shown(other)})})
    return cleared.model_copy(update={"evaluation": evaluation})


def _reopen(out: Path | None, config: Path | str | None, given: Mapping[str, Any]) -> RunSettings:
    """The settings of the run in `out`; the number of steps may be raised, and memory may be saved."""
    if out is None:
        raise BadInput("--resume needs to know which run; add --out FOLDER")
    store = RunStore.open(out)
    named, given = given, _without_own_names(given, store.config())
    fixed = [section for section, value in given.items() if section not in FREE_ON_RESUME or not _is_free(section, value)]
    if config is not None or fixed:
        free = ", ".join(
            f"{section}.{key}" for section, keys in FREE_ON_RESUME.items() for key in keys or "*" if section not in ("steps", "trackers")
        )
        raise ConfigError(
            f"--resume continues with the run's own settings; only --steps, --track, and --set of {free}, may be given with it"
        )
    stored = _stored_config(store, named)
    _check_commands(stored, given, store.folder)
    before = validate(RunSettings, stored)
    settings = validate(RunSettings, merge(stored, given)) if given else before
    find_score(settings.filter.score)
    for name in settings.trackers:
        check_tracker(name)
    if settings.steps < before.steps:
        raise BadInput(
            f"the run has {before.steps} steps and cannot be cut to {settings.steps}; give at least {before.steps}, or no --steps"
        )
    return settings


def _without_own_names(given: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    """What was given with --resume, less the names of the run's own environments: naming them allows their import, and changes nothing."""
    if not _named_environments({key: given[key] for key in ("env", "also") if key in given}) <= _named_environments(stored):
        return dict(given)
    names_only = {key for key in ("env", "also") if all(set(place) <= {"name"} for place in _places(given.get(key)))}
    return {key: value for key, value in given.items() if key not in names_only}


def _places(value: Any) -> list[Any]:
    found = value if isinstance(value, list) else [value] if value is not None else []
    return found if all(isinstance(place, Mapping) for place in found) else [{"": None}]


def _check_commands(stored: Mapping[str, Any], given: Mapping[str, Any], folder: Path) -> None:
    """Refuse to start a program because a run folder says so: it may have come from somebody else."""
    if (merge(stored, given).get("rollout") or {}).get("engine") != "vllm":
        return
    defaults, server = ServerSettings(), stored.get("server") or {}
    for name in COMMANDS:
        if server.get(name, getattr(defaults, name)) != getattr(defaults, name) and name not in (given.get("server") or {}):
            raise BadInput(
                f"'{folder / CONFIG}' has server.{name}={server[name]!r}, and starts a program with it; if that is what you want, say so: "
                f"add --set server.{name}={json.dumps(server[name])}"
            )


def _stored_config(store: RunStore, given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a run as it was made: one of tether 0.1 goes on with the wording and the strict reading of that version. Environments that
    would run code of the current folder are refused, unless `given` names them.

    A run's record states every option of its environments, so an option that is missing there is younger than the run.
    """
    config = store.config()
    if "invalid_steps" not in (config.get("early_stop") or {}):  # a rule that the run's version did not have
        config = merge(config, {"early_stop": {"invalid_steps": 0}})
    for name in sorted(_named_environments(config) - _named_environments(given)):
        check_received(name, f"'{store.folder / CONFIG}'")
    environments = [config.get("env"), *config.get("also", [])]
    rewards = [(env.get("options") or {}).get("reward") for env in environments if isinstance(env, dict)]
    for what, function in (("score", (config.get("filter") or {}).get("score")), *(("reward", reward) for reward in rewards)):
        if isinstance(function, str) and is_import_path(function):
            check_received(function, f"'{store.folder / CONFIG}'", what)
    younger = [_keep_former_wording(env) for env in environments if isinstance(env, dict) and "name" in env]
    if any(younger):
        _LOG.warning(
            "this run was made by tether %s: it keeps the instructions of that version (instructions=plain, lenient=false)", store.version
        )
    return config


def _keep_former_wording(env: dict[str, Any]) -> bool:
    """Put the former values of options that the record does not have into an environment's options; whether there were any."""
    known = env_factory(env["name"]).options
    options = env.get("options") or {}
    missing = {
        key: value for key, value in FORMER_WORDING.items() if known is not None and key in known.model_fields and key not in options
    }
    env["options"] = {**options, **missing}
    return bool(missing)


def _is_free(section: str, value: Any) -> bool:
    keys = FREE_ON_RESUME[section]
    return not keys or (isinstance(value, dict) and set(value) <= set(keys))


def _grow_allocator_segments() -> None:
    """Let torch's CUDA allocator grow its segments instead of taking new ones, unless the user has configured it: rollout and update need
    blocks of different sizes, and gaps between fixed segments are lost to both. torch reads this when it first uses the device."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


__all__ = ["evaluate", "play", "train"]
