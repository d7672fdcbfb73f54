"""The parts of a run, built from its settings: policy, critic, reference, learner, in the one order that works.

Whether they fit into memory is counted before anything is loaded. Weights that are trained are loaded in float32; the learner keeps them so
and hands the model a rounded copy where it computes in bfloat16. A run that goes on takes its policy from the checkpoint; critic and
reference are made as at the start and then restored, or never change.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.algorithms.presets import Algorithm, customised
from tether.core.errors import BadInput
from tether.models.critic import Critic, load_critic
from tether.models.hardware import default_device
from tether.models.load import DTYPES, load_model
from tether.models.lora import add_lora, is_lora
from tether.models.policy import Policy, model_positions
from tether.models.reference import reference_for
from tether.rollout.episode import EpisodeRules
from tether.training.checkpoint import load_checkpoint
from tether.training.estimate import AdvantageEstimator
from tether.training.fit import MemoryPlan, plan_memory, trains_adapters
from tether.training.learner import Learner
from tether.training.settings import AlgorithmSettings, RunSettings


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer trains with."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    algorithm: Algorithm
    estimator: AdvantageEstimator
    learner: Learner
    fit: MemoryPlan | None
    """What it takes of the device; None where that could not be told."""


def build(settings: RunSettings, checkpoint: Path | None) -> Parts:
    """The parts of a run as it starts, or with the policy of a checkpoint."""
    algorithm = resolve_algorithm(settings.algorithm)
    fit = plan_memory(settings, algorithm)  # before anything is loaded
    model, tokenizer = _policy(settings, checkpoint)
    policy = Policy(model)
    critic = _critic(settings, policy) if algorithm.has_critic else None
    learner = Learner(
        policy,
        algorithm,
        settings.learner,
        temperature=settings.rollout.temperature,
        max_tokens=settings.rollout.max_tokens,
        critic=critic,
        critic_settings=settings.critic,
        dtype=None if is_lora(model) else DTYPES[_dtype_name(settings)],
    )
    reference = None
    if algorithm.has_reference:  # after the learner, which decides what the policy computes in
        start = settings.algorithm.reference or (None if is_lora(model) else settings.model.name)
        reference = reference_for(policy, start)
    estimator = AdvantageEstimator(
        algorithm, critic, reference, temperature=settings.rollout.temperature, micro_tokens=settings.learner.micro_tokens
    )
    return Parts(model, tokenizer, algorithm, estimator, learner, fit)


def _policy(settings: RunSettings, checkpoint: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    # Frozen weights are read as they compute: in float32 they would need more memory than the whole run.
    dtype = _dtype_name(settings) if trains_adapters(settings) else None
    if checkpoint is not None:
        model, tokenizer = load_checkpoint(checkpoint, settings.model.device, dtype)
    else:
        model, tokenizer = load_model(settings.model.name, device=settings.model.device, dtype=dtype)
        if settings.lora.rank:
            add_lora(model, settings.lora.rank, settings.lora.alpha, settings.lora.targets, settings.seed)
    return model, tokenizer


def _critic(settings: RunSettings, policy: Policy) -> Critic:
    if settings.critic.shared:
        return Critic(policy, shared=True)
    return load_critic(settings.critic.model or settings.model.name, policy=policy, device=settings.model.device)


def _dtype_name(settings: RunSettings) -> str:
    """What the model computes in."""
    on_card = torch.device(settings.model.device or default_device()).type == "cuda"
    return settings.model.dtype or ("bfloat16" if on_card else "float32")


def resolve_algorithm(settings: AlgorithmSettings) -> Algorithm:
    """A preset with the departures that were asked for."""
    return customised(settings.name, settings.model_dump(exclude={"name", "reference"}, exclude_none=True))


def episode_rules(settings: RunSettings, model: PreTrainedModel) -> EpisodeRules:
    """The budgets of an episode, within what the model can hold."""
    rollout = settings.rollout
    max_context = min(rollout.max_context, model_positions(model))
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
