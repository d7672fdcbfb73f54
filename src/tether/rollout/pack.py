"""Packing: trajectories become the rows of a Batch. Ids, masks, log-probs and rewards are copied from the trajectories, never re-derived.

Every segment that sampled anything is a row. What a turn earned stands at its last token; a turn without a token has no place in a
batch, and neither has what it earned.
"""

from collections.abc import Sequence

import torch

from tether.algorithms.batch import Batch
from tether.core.types import TokenSequence, Trajectory


def pack(trajectories: Sequence[Trajectory], device: torch.device | str = "cpu") -> Batch:
    """A batch of all that these trajectories sampled, without advantages; the rows of a trajectory stand together and in order."""
    speaking = [trajectory for trajectory in trajectories if trajectory.num_sampled]
    rows = [(owner, segment) for owner, trajectory in enumerate(speaking) for segment in trajectory.sequences if any(segment.loss_mask)]
    lengths = [len(segment.token_ids) for _, segment in rows]
    shape = (len(rows), max(lengths, default=0))
    ids_BT = torch.zeros(shape, dtype=torch.long)
    mask_BT, turn_ends_BT = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    logprobs_BT, rewards_BT = torch.zeros(shape), torch.zeros(shape, dtype=torch.float64)
    for b, (_, segment) in enumerate(rows):
        size = lengths[b]
        ids_BT[b, :size] = torch.tensor(segment.token_ids)
        mask_BT[b, :size] = torch.tensor(segment.loss_mask)
        logprobs_BT[b, :size] = torch.tensor(segment.sampled_logprobs)
        ends, earned = _earnings(segment)
        turn_ends_BT[b, ends] = True
        rewards_BT[b, ends] = torch.tensor(earned, dtype=torch.float64)
    owners = [owner for owner, _ in rows]
    of_rows = [torch.tensor(values, dtype=torch.long) for values in (lengths, owners, [speaking[owner].group for owner in owners])]
    return Batch(*(part.to(device) for part in (ids_BT, mask_BT, logprobs_BT, rewards_BT, turn_ends_BT, *of_rows)))


def _earnings(segment: TokenSequence) -> tuple[list[int], list[float]]:
    """Where the turns that sampled anything end, and what they earned."""
    ends = [(end, turn.earned) for end, turn in zip(segment.turn_ends, segment.turns, strict=True) if turn.response_ids]
    return [end for end, _ in ends], [earned for _, earned in ends]
