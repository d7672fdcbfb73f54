"""The parts of a run, built from its settings: policy, critic, reference, learner, sampler, scorer, monitor, in the one order that works.

Whether they fit into memory is planned before anything is loaded. Weights that are trained are loaded in float32; the learner keeps fp32
master weights and gives the model a rounded copy where it computes in bfloat16. A resumed run takes its policy from the checkpoint; critic
and reference are made as at the start and then restored, or never change. Learner, engine, scorer, reference and critic share one `Policy`.

Where ranks divide the weights and servers sample, no model of the run is whole on a rank's device: all are loaded by `_divided`.
"""

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from tether.algorithms.presets import Algorithm
from tether.core.errors import BadInput
from tether.core.protocols import Engine
from tether.diagnostics.monitor import NO_MEMORY, Monitor
from tether.diagnostics.scorer import SharedScorer, build_scorer
from tether.diagnostics.settings import POLICY
from tether.envs.registry import make_env
from tether.models.catalog import images_refused
from tether.models.chat import ChatFormat
from tether.models.critic import Critic, load_critic
from tether.models.hardware import check_device, default_device
from tether.models.load import DTYPES, LoadedModel, load_model
from tether.models.lora import add_lora, is_lora
from tether.models.policy import Policy
from tether.models.reference import Reference, reference_for
from tether.rollout.engines.registry import engine_entry, make_engine
from tether.rollout.engines.server import ServerOptions
from tether.rollout.engines.vllm_server import VllmOptions
from tether.rollout.episode import EpisodeRules
from tether.rollout.gateway.agents import find_agent
from tether.rollout.gateway.player import AgentPlayer, AgentRules
from tether.rollout.prompt_memory import PromptMemory
from tether.rollout.sampler import AGENT, EnvSpec, Sampler
from tether.training.callbacks import Callback
from tether.training.checkpoint import load_checkpoint
from tether.training.disk import DiskPlan, plan_disk
from tether.training.distributed.ranks import Ranks
from tether.training.distributed.topology import joined_placement
from tether.training.estimate import AdvantageEstimator
from tether.training.learner import Learner
from tether.training.memory import GIB, MemoryPlan, plan_memory, trains_adapters
from tether.training.settings import AgentSettings, EnvSettings, RunSettings, ServerSettings, TrainedModel
from tether.training.throughput import StartTimer


class Built(NamedTuple):
    """What `build` returns, in the order in which it is made."""

    policy: Policy
    algorithm: Algorithm
    estimator: AdvantageEstimator
    learner: Learner
    sampler: Sampler
    monitor: Monitor
    plan: MemoryPlan | None
    """What the run takes of the device; None where it could not be counted."""
    disk: DiskPlan | None
    """What it takes on disk; None where it could not be counted, and on ranks that write nothing."""


def build(
    settings: RunSettings,
    checkpoint: Path | None,
    callbacks: Callback | None = None,
    timer: StartTimer | None = None,
    folder: Path | None = None,
    ranks: Ranks | None = None,
    sampling_ranks: Ranks | None = None,
) -> Built:
    """The parts of a run as it starts, or with the policy of a checkpoint; `timer` measures how long they take, `folder` is the run's, `ranks`
    share the work; `sampling_ranks` share episodes, where that happens beside an update."""
    timer, ranks = timer or StartTimer(), ranks or Ranks()
    check_engine_of_ranks(settings, ranks)
    algorithm = settings.algorithm
    with timer.part("memory_plan"):
        plan = plan_memory(settings, ranks)  # before anything is loaded
        disk = plan_disk(settings, folder) if folder is not None and ranks.rank == 0 else None
    divide = partial(_divided, settings, ranks) if settings.divides_weights(ranks.size) else None
    with timer.part("model"):
        if divide is not None:
            policy = divide(settings.model.name, checkpoint=checkpoint)
        else:
            policy = load_policy(settings, settings.rollout.max_context, checkpoint)
        check_eyes(settings, policy)
    with timer.part("learner"):
        learner, critic = _learner(settings, policy, algorithm, ranks, divide)
    frozen = None if divide is None else partial(divide, is_trained=False)
    with timer.part("reference"):
        reference = _reference(settings, policy, algorithm, frozen)  # after the learner, which decides what the policy computes in
    estimator = AdvantageEstimator(
        algorithm,
        critic,
        reference,
        temperature=settings.rollout.temperature,
        micro_tokens=settings.learner.micro_tokens,
        policy=policy,
        ranks=ranks,
        update_batch=settings.learner.update_batch if settings.learner.epochs == 1 else 0,
    )
    with timer.part("engine"):
        sampler = build_sampler(settings, policy, callbacks or Callback(), plan, folder, sampling_ranks or ranks)
    check_engine_trains(sampler.engine)
    with timer.part("kernels"):
        learner.warm_up()
    with timer.part("scorer"):
        monitor = _monitor(settings, policy, ranks, frozen)
    return Built(policy, algorithm, estimator, learner, sampler, monitor, plan, disk)


def _divided(settings: RunSettings, ranks: Ranks, name: str, *, is_trained: bool = True, checkpoint: Path | None = None) -> Policy:
    """A model of which each rank holds a part, by name or from a checkpoint."""
    from tether.training.distributed.fsdp import divided_policy

    computed_in = compute_dtype(settings)

    def load() -> LoadedModel:
        if checkpoint is not None:
            return load_checkpoint(checkpoint, "cpu")
        return load_model(name, device="cpu", dtype=None if is_trained else computed_in)

    return divided_policy(
        load,
        torch.device(check_device(settings.model.device or default_device())),
        DTYPES[computed_in],
        ranks,
        max_positions=settings.rollout.max_context,
        is_trained=is_trained,
    )


def _learner(
    settings: RunSettings, policy: Policy, algorithm: Algorithm, ranks: Ranks, divide: Callable[[str], Policy] | None
) -> tuple[Learner, Critic | None]:
    critic = _critic(settings, policy, divide) if algorithm.has_critic else None
    learner = Learner(
        policy,
        algorithm,
        settings.learner,
        temperature=settings.rollout.temperature,
        max_tokens=settings.rollout.max_tokens,
        critic=critic,
        critic_settings=settings.critic,
        dtype=None if is_lora(policy.module) else DTYPES[compute_dtype(settings)],
        ranks=ranks,
        records=not settings.rollout.max_staleness,  # else another thread samples meanwhile
    )
    return learner, critic


def _reference(settings: RunSettings, policy: Policy, algorithm: Algorithm, divide: Callable[[str], Policy] | None) -> Reference | None:
    if not algorithm.has_reference:
        return None
    start = settings.model.name
    return reference_for(policy, settings.algorithm.reference or (None if is_lora(policy.module) else start), divide, start_model=start)


def build_sampler(
    settings: RunSettings,
    policy: Policy,
    callbacks: Callback,
    plan: MemoryPlan | None = None,
    folder: Path | None = None,
    ranks: Ranks | None = None,
) -> Sampler:
    """What plays the episodes of training and evaluation; `folder`: of the run."""
    assert policy.tokenizer is not None  # loaded with the model
    rules = episode_rules(settings, policy)
    cache_gb = settings.rollout.cache_gb
    if cache_gb is None and plan is not None:  # not from what is free now: the optimiser takes its memory with the first update
        cache_gb = plan.cache / GIB

    def engine(max_rows: int) -> Engine:
        return make_engine(
            settings.rollout.engine,
            policy,
            max_rows=max_rows,
            max_context=rules.max_context,
            cache_gb=cache_gb,
            speculative_tokens=settings.rollout.speculative_tokens,
            precision=settings.rollout.precision,
            keeps_slots=settings.agent.is_given,
            server=server_options(settings.server, folder),
            ranks=ranks,
        )

    sampler = Sampler(
        env_specs(settings.environments(), agent_player(settings.agent)),
        engine,
        ChatFormat(policy.tokenizer, policy.end_of_turn_ids, policy.vision),
        rules,
        max_rows=settings.rollout.max_rows,
        device=policy.device,
        error_retries=settings.rollout.error_retries,
        on_stage=callbacks.on_stage_begin,
        on_finished=callbacks.on_stage_progress,
        ranks=ranks,
    )
    callbacks.on_sampling_ready(lambda: sampler.engine.statistics)  # the engine itself may be replaced by a smaller one
    return sampler


def check_engine_of_ranks(settings: RunSettings, ranks: Ranks) -> None:
    """Refuse what several ranks cannot sample with."""
    engine = settings.rollout.engine
    if ranks.size > 1 and not engine_entry(engine).serves_ranks:
        raise BadInput(
            f"rollout.engine is {engine}, which starts a server beside one learner, and {ranks.size} ranks take a GPU each; start vLLM on GPUs of its "
            "own (docs/serving.md) and give its address as rollout.engine, or place it with --ray"
        )


def check_engine_trains(engine: Engine) -> None:
    """Refuse an engine whose trajectories cannot be trained on."""
    needed = {"logprobs": "returns no log-probs", "weight_sync": "cannot take the policy's new weights"}
    lacking = [words for name, words in needed.items() if not getattr(engine.capabilities, name)]
    if lacking:
        raise BadInput(
            f"engine '{engine.backend}' {' and '.join(lacking)}; train with rollout.engine=native, or through tether serve or vLLM"
        )


def server_options(settings: ServerSettings, folder: Path | None = None) -> ServerOptions:
    """How the engine uses servers; `folder`: of the run, for the output of a server that it starts."""
    placement = joined_placement()
    weights = None if settings.weights_folder is None else Path(settings.weights_folder).expanduser()
    vllm = VllmOptions(settings.vllm_command, tuple(settings.vllm_args), settings.vllm_start_timeout, folder)
    find = None if placement is None else placement.engines
    return ServerOptions(settings.timeout, settings.patience, settings.tolerance, weights, vllm, find)


def agent_player(settings: AgentSettings) -> AgentPlayer | None:
    """What plays the tasks of an agent's program, where the run has one."""
    if not settings.is_given:
        return None
    return AgentPlayer(find_agent(settings.target, settings.command, settings.env), agent_rules(settings))


def agent_rules(settings: AgentSettings) -> AgentRules:
    """How agents are run."""
    return AgentRules(
        settings.timeout,
        settings.concurrency,
        settings.max_calls,
        settings.max_tokens,
        exact=settings.history == "exact",
        tool_format=settings.tool_format,
        workers=_num_agent_workers() if settings.workers is None else settings.workers,
        train_calls=settings.train_calls,
    )


def _num_agent_workers() -> int:
    """None on a CPU, where sampling takes all cores and most of the time."""
    return min(8, max(1, (os.cpu_count() or 1) - 2)) if torch.cuda.is_available() else 0


def env_specs(environments: Sequence[EnvSettings], player: AgentPlayer | None = None) -> list[EnvSpec]:
    """The environments of a run; those that Ray has placed are played by their workers. `player`: of an agent, whose tasks they are."""
    placement = joined_placement()

    def workers(name: str) -> Callable[[], list[str]] | None:
        return partial(placement.workers, name) if placement is not None and placement.is_placed(name) else None

    return [EnvSpec(env.name, env.options, env.step_timeout, env.weight, workers(env.name), player) for env in environments]


def build_prompt_memory(settings: RunSettings) -> PromptMemory | None:
    """What remembers the prompts of a run, where it is to; refused before a model is loaded where there is nothing to remember."""
    chosen = settings.rollout.prompt_memory
    if not chosen.candidates:
        return None
    envs = {
        AGENT if settings.agent.is_given else EnvSpec(env.name).label: make_env(env.name, **env.options) for env in settings.environments()
    }
    return PromptMemory(chosen, settings.seed, envs)


def compute_dtype(settings: TrainedModel) -> str:
    """The precision that the model computes in."""
    on_gpu = torch.device(settings.model.device or default_device()).type == "cuda"
    return settings.model.dtype or ("bfloat16" if on_gpu else "float32")


def episode_rules(settings: RunSettings, policy: Policy | None) -> EpisodeRules:
    """The budgets of an episode, within what the model can hold; `policy` is None for an engine without a model."""
    rollout = settings.rollout
    max_context = rollout.max_context if policy is None else min(rollout.max_context, policy.max_positions)
    if rollout.max_tokens >= max_context:
        raise BadInput(
            f"rollout.max_tokens is {rollout.max_tokens} but a conversation holds only {max_context} tokens; lower rollout.max_tokens"
        )
    return EpisodeRules(
        max_context=max_context,
        max_tokens=rollout.max_tokens,
        format_penalty=rollout.format_penalty,
        context=rollout.context,
        last_k=rollout.last_k,
        overlong_buffer=round(rollout.overlong_share * rollout.max_tokens),
        overlong_factor=rollout.overlong_penalty,
    )


def check_eyes(settings: RunSettings, policy: Policy) -> None:
    """Refuse environments that show images to a model that reads text only, and what a model with eyes cannot have."""
    played = [*settings.environments(), *([settings.evaluation.env] if settings.evaluation.env is not None else [])]
    shown = [env.name for env in played if policy.vision is None and getattr(make_env(env.name, **env.options), "shows_images", False)]
    if shown:
        raise images_refused(shown[0], settings.model.name)
    if policy.vision is not None and settings.learner.sharding == "fsdp":
        raise BadInput(
            "learner.sharding is fsdp, which does not divide a vision tower; give learner.sharding=zero1, or train adapters (lora.rank)"
        )


def load_policy(settings: TrainedModel, max_context: int, checkpoint: Path | None = None) -> Policy:
    """The model that is trained, in float32, or frozen in what it computes in with adapters to train; or that of a checkpoint. A vision tower that
    is not trained is in what it computes in, too."""
    # Frozen weights are read as they compute: in float32 they would need more memory than the whole run.
    dtype = compute_dtype(settings) if trains_adapters(settings) else None
    if checkpoint is not None:
        model, tokenizer = load_checkpoint(checkpoint, settings.model.device, dtype)
    else:
        model, tokenizer = load_model(settings.model.name, device=settings.model.device, dtype=dtype)
        if settings.lora.rank:
            add_lora(model, settings.lora.rank, settings.lora.alpha, settings.lora.targets, settings.seed, vision=settings.trains_vision)
    policy = Policy(model, tokenizer, max_positions=max_context)
    if policy.vision is not None and not settings.trains_vision:
        for part in policy.vision.tower:
            part.requires_grad_(False).to(DTYPES[compute_dtype(settings)])
    return policy


def _critic(settings: RunSettings, policy: Policy, divide: Callable[[str], Policy] | None) -> Critic:
    if settings.critic.shared:
        return Critic(policy, shared=True)
    return load_critic(settings.critic.model or settings.model.name, policy=policy, device=settings.model.device, divide=divide)


def _monitor(settings: RunSettings, policy: Policy, ranks: Ranks, divide: Callable[[str], Policy] | None) -> Monitor:
    """Diagnosis of the run. The scorer is the policy's own where nothing is measured, so that no further model is loaded."""
    chosen = settings.diagnosis
    scorer = build_scorer(chosen.scorer if chosen.every else POLICY, policy, settings.model.name, divide=divide)
    if ranks.size > 1:
        scorer = SharedScorer(scorer, ranks, NO_MEMORY)
    rules = settings.alarms.rules
    if rules.max_tokens is None:
        rules = rules.model_copy(update={"max_tokens": settings.rollout.max_tokens})
    rules = rules.model_copy(update={"staleness": max(rules.staleness, settings.rollout.max_staleness)})  # what was asked for is no alarm
    return Monitor(
        scorer,
        every=chosen.every,
        scopes=chosen.scopes,
        budget=chosen.budget,
        contexts=chosen.contexts,
        probe_prompts=chosen.probe_prompts,
        probe_samples=chosen.probe_samples,
        seed=settings.seed,
        rules=rules,
    )
