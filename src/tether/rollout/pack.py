"""Packing: trajectories become the rows of a Batch. Ids, masks, log-probs and rewards are copied from the trajectories, never re-derived.

Every token sequence that sampled anything that is trained is a row. The reward of a turn stands at its last token. Turns without such tokens
have no reward here.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.core.enums import TRUNCATED
from tether.core.types import Trajectory


def pack(trajectories: Sequence[Trajectory], device: torch.device | str = "cpu") -> Batch:
    """A batch of all that these trajectories sampled, without advantages; the rows of a trajectory stand together and in order."""
    sampled = [trajectory for trajectory in trajectories if trajectory.has_trained]
    rows = [(index, sequence) for index, trajectory in enumerate(sampled) for sequence in trajectory.sequences if sequence.has_trained]
    lengths = [sequence.num_tokens for _, sequence in rows]
    shape = (len(rows), max(lengths, default=0))
    ids_BT, behavior_BT, rewards_BT = (np.zeros(shape, dtype=kind) for kind in (np.int64, np.float32, np.float64))
    mask_BT, turn_ends_BT = (np.zeros(shape, dtype=bool) for _ in range(2))
    for b, (_, sequence) in enumerate(rows):  # by numpy: torch takes five times as long to make as many small tensors
        size = lengths[b]
        ids_BT[b, :size], mask_BT[b, :size], behavior_BT[b, :size] = sequence.token_ids, sequence.loss_mask, sequence.sampled_logprobs
        for turn, end in zip(sequence.turns, sequence.turn_ends, strict=True):
            if turn.response_ids and turn.trained:
                turn_ends_BT[b, end], rewards_BT[b, end] = True, turn.earned
    indices = [index for index, _ in rows]
    of_rows = [torch.tensor(values, dtype=torch.long) for values in (lengths, indices, [sampled[index].group for index in indices])]
    last_rows = {index: b for b, index in enumerate(indices)}
    truncated = [b == last_rows[index] and sampled[index].stop_reason in TRUNCATED for b, index in enumerate(indices)]
    of_tokens = map(torch.from_numpy, (ids_BT, mask_BT, behavior_BT, rewards_BT, turn_ends_BT))
    batch = Batch(*(part.to(device) for part in (*of_tokens, *of_rows)))
    return replace(batch, truncated_B=torch.tensor(truncated, dtype=torch.bool, device=device))
