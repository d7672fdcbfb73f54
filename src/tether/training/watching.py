"""The trainer's side of diagnosis: what a step's work is, and its gradients taken apart, as numbers for the record."""

from collections.abc import Sequence

import numpy as np
import torch

from tether.algorithms.filters.scores import sample_variance
from tether.core.errors import BadInput
from tether.core.seeding import derive_seed
from tether.core.types import Group
from tether.diagnostics.gradients import BucketGradients, GradientDecomposition, decompose_gradients
from tether.rollout.pack import pack
from tether.training.estimate import AdvantageEstimator
from tether.training.gather import SampledBatch
from tether.training.learner import Learner
from tether.training.settings import RunSettings

LEARNING_PASSES = 3
"""A forward pass, and a backward pass of twice its cost."""


def step_work(gathered: SampledBatch, epochs: int) -> int:
    """What a step computes, in tokens through the model: once in the rollout, three times for what is trained on."""
    return _tokens(gathered.groups) + LEARNING_PASSES * epochs * _tokens(gathered.chosen)


def gradient_metrics(
    step: int, groups: Sequence[Group], learner: Learner, estimator: AdvantageEstimator, settings: RunSettings
) -> dict[str, float]:
    """The "gradients/" metrics of these groups, on the policy that sampled them; nothing is trained."""
    chosen = settings.diagnosis.gradients
    algorithm = estimator.algorithm
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    batch = pack(trajectories, learner.policy.module.device)
    if not len(batch):
        raise BadInput(f"none of {len(trajectories)} episodes holds a response; look at their errors")
    batch, _ = estimator.complete(batch)
    present = {int(group) for group in torch.unique(batch.groups_B)}
    found = decompose_gradients(
        learner.policy,
        batch,
        algorithm,
        {group.index: sample_variance(np.array(group.rewards)) for group in groups if group.index in present},
        temperature=settings.rollout.temperature,
        micro_tokens=settings.learner.micro_tokens,
        max_tokens=settings.rollout.max_tokens,
        parameters=chosen.parameters,
        num_buckets=chosen.buckets,
        with_bound=chosen.bound,
        seed=derive_seed("gradients", settings.seed, step),
    )
    return flattened(found)


def flattened(found: GradientDecomposition) -> dict[str, float]:
    """A decomposition as metrics; what could not be measured is left out."""
    values: dict[str, float] = {"failed": 0}
    for number, row in enumerate(found.buckets, start=1):
        values.update({f"{name}_{number}": value for name, value in _of_bucket(row).items() if value is not None and np.isfinite(value)})
    bounds = [row.bound for row in found.buckets if row.bound is not None]
    return {**values, "bound_broken": sum(not bound.holds for bound in bounds)} if bounds else values


def _of_bucket(row: BucketGradients) -> dict[str, float | None]:
    return {
        "rv_mean": row.bucket.rv_mean,
        "task_norm": row.task_norm,
        "kl_norm": row.kl_norm,
        "entropy_norm": row.entropy_norm,
        "regulariser_norm": row.regulariser_norm,
        "dominance": row.dominance,
        "task_cosine": row.with_batch.task,
        "kl_cosine": row.with_batch.kl,
        "entropy_cosine": row.with_batch.entropy,
        "task_with_regulariser": row.task_with_regulariser,
        "snr": row.snr,
        "bound_used": row.bound.tightness if row.bound else None,
    }


def _tokens(groups: Sequence[Group]) -> int:
    return sum(len(segment.token_ids) for group in groups for trajectory in group.trajectories for segment in trajectory.sequences)
