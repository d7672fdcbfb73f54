"""The training batch: trajectories as padded tensors, everything aligned token by token.

Padding is on the right and is marked by the lengths and by the loss mask, never by a token id. Shape legend in the package docstring.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """B trajectories. A token takes part in the loss where loss_mask_BT is True."""

    ids_BT: Tensor
    loss_mask_BT: Tensor
    logprobs_BT: Tensor
    """Sampled log-probs; 0 outside the mask."""
    advantages_BT: Tensor
    """0 outside the mask."""
    lengths_B: Tensor
    """Tokens of each row, padding excluded."""

    def __len__(self) -> int:
        return len(self.lengths_B)

    def rows(self, index: Tensor) -> "Batch":
        """Some rows, cut to the longest of them."""
        longest = int(self.lengths_B[index].max())
        cut = {f.name: getattr(self, f.name)[index] for f in fields(self)}
        return Batch(**{name: value[:, :longest] if value.ndim == 2 else value for name, value in cut.items()})

    def minibatches(self, order: Tensor, size: int) -> Iterator["Batch"]:
        """Consecutive rows of an order, `size` at a time; the last one may be smaller."""
        for start in range(0, len(order), size):
            yield self.rows(order[start : start + size])

    def microbatches(self, max_tokens: int) -> Iterator[tuple[Tensor, "Batch"]]:
        """Row indices and rows, longest first, so many at a time that padded tokens stay within the budget (one row at least)."""
        order = self.lengths_B.argsort(descending=True, stable=True)
        start = 0
        while start < len(order):
            count = max(1, max_tokens // int(self.lengths_B[order[start]]))
            index = order[start : start + count]
            yield index, self.rows(index)
            start += count
