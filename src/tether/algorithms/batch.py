"""The training batch: prompts and responses as padded rows, every field aligned token by token.

A row is a sequence of tokens that the model reads in one forward pass. With full history a trajectory is one row; where the context is
rebuilt between turns it is several rows, in order. Rows of a trajectory are adjacent, so the sampled tokens of the batch, read row by row,
are the sampled tokens of trajectory after trajectory: `episodes` aligns them for advantage estimators, `spread` puts the result back.

Padding is on the right and is marked by the lengths and by the loss mask, never by a token id. Shape legend in the package docstring.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Episodes:
    """The sampled tokens of R trajectories, one trajectory a row, context left out: the input of an advantage estimator."""

    rewards_RT: Tensor
    """float64; what was paid for a turn stands at its last token."""
    mask_RT: Tensor
    turn_ends_RT: Tensor
    """True at the last token of each turn."""
    groups_R: Tensor
    """The group of each trajectory."""
    values_RT: Tensor | None = None
    """What a critic expects from each token on, float64."""
    final_values_R: Tensor | None = None
    """What it expects after the last token of a trajectory that was cut before its end, float64; 0 where nothing follows. None: 0 for all."""


@dataclass(frozen=True, slots=True)
class Estimates:
    """The output of an advantage estimator; zero outside the mask."""

    advantages_RT: Tensor
    returns_RT: Tensor | None = None
    """What a critic should have expected; None where there is none to teach."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B rows of R trajectories. A token takes part in the loss where loss_mask_BT is True; every other [B, T] field is 0 elsewhere."""

    ids_BT: Tensor
    loss_mask_BT: Tensor
    behavior_logprobs_BT: Tensor
    """What the sampler returned."""
    rewards_BT: Tensor
    """float64; reward and penalties of a turn, at its last token."""
    turn_ends_BT: Tensor
    lengths_B: Tensor
    """Tokens of each row, padding excluded."""
    trajectory_index_B: Tensor
    """The trajectory each row belongs to: 0, 1, ... in ascending order."""
    groups_B: Tensor
    """The group of that trajectory."""
    old_logprobs_BT: Tensor | None = None
    """Log-probs of the policy before the update. An engine on the learner's own weights returns the same numbers, up to rounding."""
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None
    """What the critic is taught."""
    values_BT: Tensor | None = None
    """What the critic expected before the update."""
    reference_BT: Tensor | None = None
    """Log-probs under the reference model."""
    truncated_B: Tensor | None = None
    """True in the last row of a trajectory that was cut before its end: its environment would have gone on. None: no trajectory was."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    @property
    def old_BT(self) -> Tensor:
        """Log-probs that the ratio is taken against: `old_logprobs_BT`, or the sampler's where nothing else was computed."""
        return self.behavior_logprobs_BT if self.old_logprobs_BT is None else self.old_logprobs_BT

    @property
    def num_trajectories(self) -> int:
        return int(self.trajectory_index_B[-1]) + 1 if len(self) else 0

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device."""
        moved = {name: value.to(device) for field in fields(self) if (value := getattr(self, name := field.name)) is not None}
        return replace(self, **moved)

    def rows(self, index: Tensor) -> "Batch":
        """Some rows, cut to the longest of them; trajectories keep their numbers."""
        longest = int(self.lengths_B[index].max()) if len(index) else 0
        cut: dict[str, Tensor | None] = {}
        for field in fields(self):
            value: Tensor | None = getattr(self, field.name)
            if value is not None:
                value = value[index]
                value = value[:, :longest] if value.ndim == 2 else value
            cut[field.name] = value
        return Batch(**cut)  # type: ignore[arg-type]  # the fields that are never None come from fields that are never None

    def trajectories(self, chosen: Tensor) -> "Batch":
        """The rows of some trajectories, renumbered from 0 in the batch's own order."""
        part = self.rows(torch.isin(self.trajectory_index_B, chosen).nonzero()[:, 0])
        return replace(part, trajectory_index_B=torch.unique_consecutive(part.trajectory_index_B, return_inverse=True)[1])

    def minibatches(self, order: Tensor, size: int) -> Iterator["Batch"]:
        """Consecutive trajectories of an order, `size` at a time; the last one may be smaller."""
        for start in range(0, len(order), size):
            yield self.trajectories(order[start : start + size])

    def episodes(self, values_BT: Tensor | None = None, final_values_B: Tensor | None = None) -> Episodes:
        """The sampled tokens, trajectory by trajectory; `final_values_B` is 0 in all rows but the last of a truncated trajectory."""
        mask_BT = self.loss_mask_BT
        counts_R = torch.zeros(self.num_trajectories, dtype=torch.long, device=mask_BT.device)
        counts_R.index_add_(0, self.trajectory_index_B, mask_BT.sum(dim=1))
        mask_RT = torch.arange(int(counts_R.max()) if len(self) else 0, device=mask_BT.device) < counts_R[:, None]
        firsts_R = torch.searchsorted(self.trajectory_index_B, torch.arange(self.num_trajectories, device=mask_BT.device))
        values_RT = None if values_BT is None else self.aligned(values_BT.double(), mask_RT)
        rewards_RT, turn_ends_RT = self.aligned(self.rewards_BT, mask_RT), self.aligned(self.turn_ends_BT, mask_RT)
        final_values_R = None
        if final_values_B is not None:
            zeros_R = torch.zeros(self.num_trajectories, dtype=torch.float64, device=mask_BT.device)
            final_values_R = zeros_R.index_add_(0, self.trajectory_index_B, final_values_B.double())
        return Episodes(rewards_RT, mask_RT, turn_ends_RT, self.groups_B[firsts_R], values_RT, final_values_R)

    def aligned(self, field_BT: Tensor, mask_RT: Tensor) -> Tensor:
        """The sampled tokens' part of a field, trajectory by trajectory."""
        zeros_RT = torch.zeros(mask_RT.shape, dtype=field_BT.dtype, device=field_BT.device)
        return zeros_RT.masked_scatter(mask_RT, field_BT[self.loss_mask_BT])

    def spread(self, field_RT: Tensor, episodes: Episodes) -> Tensor:
        """A field of `episodes` back in the place of its tokens, in float32."""
        zeros_BT = torch.zeros(self.ids_BT.shape, device=self.ids_BT.device)
        return zeros_BT.masked_scatter(self.loss_mask_BT, field_RT[episodes.mask_RT].float())
