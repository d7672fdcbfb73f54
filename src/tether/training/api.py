"""The library's front door: `tether.train`, `tether.evaluate`, `tether.play`. The command line calls the same functions.

Settings are checked as far as possible before torch is loaded; whatever needs torch is imported inside the functions.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tether.core.child import SHARES_CARD_VARIABLE, this_attempt
from tether.core.config import cache_folder, dump_yaml, merge, validate
from tether.core.errors import BadInput, StorageError, TetherError
from tether.core.protocols import Engine
from tether.core.types import Group
from tether.models.catalog import check_name
from tether.rollout.gateway.agents import named_agent
from tether.runs.mirror import Mirror
from tether.runs.remote import address_of, fetched, local_folder
from tether.runs.store import ABOUT, Run, RunStore
from tether.training.distributed.ranks import Ranks, launched_rank
from tether.training.resolve import KNOWN, evaluation_settings, named_settings, nested_settings, run_settings, without_secrets
from tether.training.settings import RunSettings
from tether.training.synonyms import own_names

if TYPE_CHECKING:
    from tether.training.callbacks import Callback
    from tether.training.evaluate import Evaluation
    from tether.training.loop import Trainer


ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""The older name first: every version of torch reads it, some ignore the newer one."""


FETCH_SECONDS = 600.0
"""How long ranks of a machine wait until one of them has fetched the run."""

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
    agent: Any = None,
    tasks: Path | str | Sequence[Mapping[str, Any]] | None = None,
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
        out: run folder, or an address of object storage such as s3://bucket/run; must be new unless `resume`. By default a new folder under runs/.
        callbacks: `tether.Callback` objects that follow the run; of several ranks, rank 0's are called.
        agent: your own program in the place of an environment: an async function (task, llm) that returns its reward, or module:function.
        tasks: its tasks: a file, or rows.
        options: options of the environment.
        seed: seed of everything.
        config: a TOML or YAML file of settings, or the name of a config that comes with Tether, such as "sokoban/ppo".
        resume: continue the run in `out` from its last checkpoint.
        smoke: two small steps on `tiny`, to see that it works.
        settings: any other setting by section, such as rollout={"group_size": 8}, or dotted: **{"rollout.group_size": 8}.
    """
    given = merge(named_settings(env, model, algo, filter, steps, seed), {"env": {"options": dict(options)}} if options else {})
    given = merge(merge(given, agent_section(agent, tasks)), own_names(nested_settings(settings), KNOWN))
    ranks = join_world()
    store, resolved = open_run(out, config, given, resume=resume, smoke=smoke, ranks=ranks)
    run_training(resolved, store, callbacks, resumed=not store.is_new, changed=resume and bool(given), ranks=ranks)
    return Run(store.folder)


def agent_section(agent: Any, tasks: Path | str | Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
    """The section of settings of an agent: of a function, of its name, or the section itself."""
    if agent is None and tasks is None:
        return {}
    section = dict(agent) if isinstance(agent, Mapping) else {}
    if agent is not None and not isinstance(agent, Mapping):
        section["target"] = agent if isinstance(agent, str) else named_agent(agent)
    if isinstance(tasks, Sequence) and not isinstance(tasks, str):
        tasks = _tasks_file(tasks)
    return {"agent": {**section, **({"tasks": str(tasks)} if tasks is not None else {})}}


def _tasks_file(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Tasks that were given as rows, as a file that a resumed run finds again."""
    content = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in rows).encode()
    path = cache_folder("tasks") / f"{hashlib.sha256(content).hexdigest()[:16]}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def join_world() -> Ranks:
    """The ranks that this process trains with. Several take their GPUs here, so torch's allocator must be configured by then; for one rank
    torch is not loaded."""
    grow_allocator_segments()
    if launched_rank()[1] == 1:
        return Ranks()
    from tether.training.distributed.process_group import ProcessGroup

    return ProcessGroup()


def open_run(
    out: Path | str | None,
    config: Path | str | None,
    given: Mapping[str, Any],
    *,
    resume: bool,
    smoke: bool,
    ranks: Ranks | None = None,
) -> tuple[RunStore, RunSettings]:
    """The run folder and the resolved settings of a new or a resumed run. Of several ranks the first finds both, and alone writes.

    A further attempt of the same command continues the run that an earlier one began, without `resume` (`store.is_new` says which it is).
    """
    ranks = ranks or Ranks()
    settings = ranks.broadcast_object(lambda: run_settings(out, config, given, resume=resume, smoke=smoke))
    if ranks.size > 1:
        ranks.barrier(lambda: check_several_ranks(settings, ranks))
    made: list[RunStore] = []

    def begin() -> Path:
        folder = local_folder(out) if resume and out else _begun(out, settings) or _create(out, settings, made)
        if not made:
            made.append(_opened(folder, writes=True))
        if address := address_of(out):
            _mirror(made[0], address, at_once=ranks.size > ranks.local_size)
        return folder

    folder = ranks.broadcast_object(begin)
    return ranks.barrier(lambda: made[0] if made else _followed(folder, out, ranks)), settings


def _begun(out: Path | str | None, settings: RunSettings) -> Path | None:
    """The run folder that an earlier attempt of this command began; None where there is none."""
    number = this_attempt().number
    if number == 1:
        return None
    if out is None:
        raise BadInput(f"this is attempt {number} of a command that does not say which run to continue; give it --out FOLDER")
    folder = fetched(out, to_write=True)
    if not os.path.lexists(folder / ABOUT):
        return None
    if RunStore.open(folder).config_text() != dump_yaml(without_secrets(settings)):
        raise BadInput(
            f"this is a further attempt of a command whose settings are no longer those of the run in '{out}': a file that it names has changed; "
            "continue that run with --resume, or choose another --out"
        )
    return folder


def _opened(folder: Path, *, writes: bool) -> RunStore:
    """The store of a run that is there, locked where this rank writes."""
    store = RunStore.open(folder, writes=writes)
    store.lock()
    return store


def _mirror(store: RunStore, address: str, *, at_once: bool) -> None:
    """Have a run uploaded while it is written; `at_once`: other machines fetch what there is of it."""
    try:
        store.mirror = Mirror(store.folder, address)
        if at_once:
            store.mirror.upload()
    except StorageError as error:
        (store.discard if store.is_new and store.mirror is None else store.close)()
        if this_attempt().number > 1:
            raise
        raise BadInput(f"{error}; check the address, the credentials and the network") from error


def _followed(folder: Path, out: Path | str | None, ranks: Ranks) -> RunStore:
    """The store of a rank that does not write. A machine without the folder fetches it from the address, once."""
    if address_of(out) and ranks.local_rank == 0:
        fetched(out or folder)
    end = time.monotonic() + FETCH_SECONDS
    while address_of(out) and not (folder / ABOUT).is_file() and time.monotonic() < end:
        time.sleep(0.2)
    return _opened(folder, writes=False)


def check_several_ranks(settings: RunSettings, ranks: Ranks) -> None:
    """Refuse a device that several ranks cannot have, and what they cannot divide."""
    from tether.models.hardware import default_device, num_gpus
    from tether.training.memory import trains_adapters

    if settings.learner.sharding == "fsdp" and trains_adapters(settings):
        raise BadInput(
            "learner.sharding is fsdp, and the run trains adapters (lora.rank): they are small, and the frozen weights are needed whole; "
            "give learner.sharding=zero1"
        )
    if settings.divides_weights(ranks.size) and settings.diagnosis.gradients.every:
        raise BadInput(
            "diagnosis.gradients.every is set, which differentiates the whole model, and with learner.sharding=fsdp and servers that sample no rank "
            "has it; give diagnosis.gradients.every=0, or learner.sharding=zero1"
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
    changed: bool = False,
    ranks: Ranks | None = None,
    ready: Callable[[Any], None] = lambda trainer: None,
) -> None:
    """Build the trainer and run it; `ready` is called with the trainer once its model is loaded. Rank 0 calls `callbacks`.

    `changed` says that a resumed run goes on with other settings than those on its record, which they then replace.
    """
    grow_allocator_segments()
    begin = time.perf_counter()
    from tether.models.hardware import sleep_while_waiting
    from tether.training.callbacks import Tracking
    from tether.training.loop import Trainer
    from tether.training.throughput import StartTimer

    if os.environ.get(SHARES_CARD_VARIABLE):
        sleep_while_waiting()
    start, ranks = StartTimer(imports=time.perf_counter() - begin), ranks or Ranks()
    if settings.trackers and ranks.rank == 0:
        callbacks = [*callbacks, Tracking(settings.trackers, without_secrets(settings), store, callbacks)]
    with ranks.interrupts.listening(), closing(store):  # what is uploaded after a stop has its grace time, too
        try:
            trainer = Trainer(settings, store, callbacks if ranks.rank == 0 else (), start, ranks)
        except TetherError:
            if not resumed and store.writes:
                store.discard()
            raise
        if resumed and store.writes:  # not before: a run that was refused stays as it was
            if changed:
                store.replace_config(dump_yaml(settings))
            store.reopen()
        if this_attempt().number > 1:
            _say_attempt(trainer)
        ready(trainer)
        trainer.run()


def _say_attempt(trainer: "Trainer") -> None:
    """Put a further attempt on the record of the run, and of its next step."""
    attempt = this_attempt()
    if trainer.store.writes:
        trainer.store.began_again(attempt.number, attempt.cause, trainer.step)
    trainer.notes.append(f"attempt {attempt.number}, from step {trainer.step}; the one before ended: {attempt.cause}")


# ---------------------------------------------------------------------------------------------------------------- evaluate


def evaluate(
    model_or_run: Path | str,
    env: str | None = None,
    prompts: int | None = None,
    *,
    agent: Any = None,
    tasks: Path | str | Sequence[Mapping[str, Any]] | None = None,
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
        agent: your own program in the place of an environment, as in `train`; its validation tasks are played.
        tasks: the file of its tasks.
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
    given = merge(
        {"evaluation": {"prompts": prompts, "temperature": temperature, "samples": samples}}, own_names(nested_settings(settings), KNOWN)
    )
    given = merge(given, agent_section(agent, tasks))
    if options:
        given = merge(given, {"env": {"options": dict(options)}})
    model_or_run = fetched(model_or_run) if address_of(model_or_run) else model_or_run
    resolved = evaluation_settings(str(model_or_run), env, best, given)
    from tether.training.evaluation_run import EndpointOptions, run_evaluation

    endpoint = EndpointOptions(concurrency, api_key_env, body or {})
    out = None if out is None else Path(out)
    return run_evaluation(resolved, str(model_or_run), callbacks, endpoint=endpoint, price=price, out=out)


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
    import torch

    from tether.models.chat import ChatFormat
    from tether.models.load import load_model
    from tether.models.policy import Policy
    from tether.rollout.sampler import Sampler, training_plan
    from tether.training.build import agent_player, build_sampler, compute_dtype, env_specs, episode_rules
    from tether.training.callbacks import Callback

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
        sampler = build_sampler(resolved, policy, Callback())
    else:
        engine, tokenizer = model_or_engine, tokenizer or getattr(model_or_engine, "tokenizer", None)
        if tokenizer is None:
            raise BadInput("the engine carries no tokenizer; give tokenizer=")
        rollout = resolved.rollout
        sampler = Sampler(
            env_specs(resolved.environments(), agent_player(resolved.agent)),
            lambda max_rows: engine,
            ChatFormat(tokenizer),
            episode_rules(resolved, None),
            max_rows=rollout.max_rows,
            device=torch.device("cpu"),
            error_retries=rollout.error_retries,
        )
    with sampler.pool as pool:
        plan = training_plan(resolved.seed, step, resolved.rollout.num_groups, resolved.rollout.group_size, weights=pool.weights)
        return sampler.collect(plan, resolved.sampling())


def _create(out: Path | str | None, settings: RunSettings, made: list[RunStore]) -> Path:
    """A new run folder; its store, which holds the lock, is put into `made`."""
    folder = fetched(out, weights=False, to_write=True) if out else default_folder(settings)
    if (address := address_of(out)) and os.path.lexists(folder / ABOUT):
        raise BadInput(
            f"there is a run at '{address}', or one that was not uploaded in '{folder}'; continue it with --resume, choose another --out, or delete both"
        )
    about = {
        "env": "+".join(chosen.name for chosen in settings.environments()),
        "model": settings.model.name,
        "algorithm": settings.algorithm.name,
        "seed": settings.seed,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    made.append(RunStore.create(folder, dump_yaml(without_secrets(settings)), about))
    return folder


def default_folder(settings: RunSettings) -> Path:
    """The folder of a run that was given none. Example: runs/frozen_lake-grpo-20261118-164500."""
    names = [chosen.name.partition("://")[2] or chosen.name for chosen in settings.environments()]
    played = "+".join(re.sub(r"\W+", "_", name) for name in names)
    return Path("runs") / f"{played}-{settings.algorithm.name}-{time.strftime('%Y%m%d-%H%M%S')}"


def grow_allocator_segments() -> None:
    """Let torch's CUDA allocator grow its segments instead of taking new ones, unless the user has configured it: rollout and update need
    blocks of different sizes, and gaps between fixed segments are lost to both. torch reads this when it first uses the device."""
    if not any(name in os.environ for name in ALLOCATOR_VARIABLES):
        os.environ[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


__all__ = ["evaluate", "play", "train"]
