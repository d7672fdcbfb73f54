"""Packing: trajectories become the rows of a Batch. Ids, masks, log-probs and rewards are copied from the trajectories, never re-derived.

Every token sequence that sampled anything that is trained is a row. The reward of a turn stands at its last token. Turns without such tokens
have no reward here.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from tether.algorithms.batch import Batch
from tether.core.enums import TRUNCATED
from tether.core.types import Trajectory


def pack(trajectories: Sequence[Trajectory], device: torch.device | str = "cpu") -> Batch:
    """A batch of all that these trajectories sampled, without advantages; the rows of a trajectory stand together and in order."""
    sampled = [trajectory for trajectory in trajectories if trajectory.has_trained]
    rows = [(index, sequence) for index, trajectory in enumerate(sampled) for sequence in trajectory.sequences if any(sequence.loss_mask)]
    lengths = [len(sequence.token_ids) for _, sequence in rows]
    shape = (len(rows), max(lengths, default=0))
    ids_BT = torch.zeros(shape, dtype=torch.long)
    mask_BT, turn_ends_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    behavior_BT, rewards_BT = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    for b, (_, sequence) in enumerate(rows):
        size = lengths[b]
        ids_BT[b, :size] = torch.tensor(sequence.token_ids)
        mask_BT[b, :size] = torch.tensor(sequence.loss_mask)
        behavior_BT[b, :size] = torch.tensor(sequence.sampled_logprobs)
        earned = {
            end: turn.earned for end, turn in zip(sequence.turn_ends, sequence.turns, strict=True) if turn.response_ids and turn.trained
        }
        turn_ends_BT[b, list(earned)] = True
        rewards_BT[b, list(earned)] = torch.tensor(list(earned.values()), dtype=torch.float64)
    indices = [index for index, _ in rows]
    of_rows = [torch.tensor(values, dtype=torch.long) for values in (lengths, indices, [sampled[index].group for index in indices])]
    last_rows = {index: b for b, index in enumerate(indices)}
    truncated = [b == last_rows[index] and sampled[index].stop_reason in TRUNCATED for b, index in enumerate(indices)]
    batch = Batch(*(part.to(device) for part in (ids_BT, mask_BT, behavior_BT, rewards_BT, turn_ends_BT, *of_rows)))
    return replace(batch, truncated_B=torch.tensor(truncated, dtype=torch.bool, device=device))
