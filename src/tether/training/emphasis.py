"""Which of the chosen trajectories count, and how much: soft reweighting by reward variance, and the trajectory-level filter.

Both come after the advantages, which every trajectory has from its whole group, and change none of their baselines.
"""

import dataclasses

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.members import extreme_members
from tether.algorithms.filters.reweight import variance_weights
from tether.algorithms.filters.scores import sample_variance
from tether.training.gather import SampledBatch
from tether.training.settings import FilterSettings


def reweight_batch(batch: Batch, gathered: SampledBatch, chosen: FilterSettings) -> Batch:
    """The batch of the chosen groups, with advantages, as the filter's settings want it weighed and thinned out."""
    if chosen.reweight:
        weights = variance_weights({group.index: sample_variance(np.array(group.rewards)) for group in gathered.chosen})
        weights_B = torch.tensor([weights[int(group)] for group in batch.groups_B], device=batch.ids_BT.device)
        assert batch.advantages_BT is not None
        batch = dataclasses.replace(batch, advantages_BT=batch.advantages_BT * weights_B[:, None])
    if chosen.members is not None:
        extreme = {(g.index, g.trajectories[m].member) for g in gathered.chosen for m in extreme_members(g.rewards, chosen.members)}
        speaking = [t for group in gathered.chosen for t in group.trajectories if t.num_sampled]
        kept = [owner for owner, t in enumerate(speaking) if (t.group, t.member) in extreme]
        batch = batch.trajectories(torch.tensor(kept, device=batch.ids_BT.device))
    return batch
