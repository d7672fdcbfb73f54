"""Packing: kept trajectories and their advantages become a Batch. Ids, masks and log-probs are copied from the trajectories, never re-derived."""

from collections.abc import Sequence

import torch

from tether.algorithms.batch import Batch
from tether.core.types import Trajectory


def pack(trajectories: Sequence[Trajectory], advantages: Sequence[float], device: torch.device | str = "cpu") -> Batch:
    """A batch with one row per trajectory that sampled anything; a trajectory's advantage goes to each of its sampled tokens."""
    rows = [(t, a) for t, a in zip(trajectories, advantages, strict=True) if t.num_sampled]
    lengths = [len(trajectory.token_ids) for trajectory, _ in rows]
    shape = (len(rows), max(lengths, default=0))
    ids = torch.zeros(shape, dtype=torch.long)
    mask = torch.zeros(shape, dtype=torch.bool)
    logprobs, advantage = torch.zeros(shape), torch.zeros(shape)
    for b, (trajectory, value) in enumerate(rows):
        size = lengths[b]
        ids[b, :size] = torch.tensor(trajectory.token_ids)
        mask[b, :size] = torch.tensor(trajectory.loss_mask)
        logprobs[b, :size] = torch.tensor(trajectory.sampled_logprobs)
        advantage[b, :size] = mask[b, :size] * value
    parts = (ids, mask, logprobs, advantage, torch.tensor(lengths, dtype=torch.long))
    return Batch(*(part.to(device) for part in parts))
