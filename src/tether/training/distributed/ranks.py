"""`Ranks`: the processes that train one model together, as the parts of a run see them.

The ranks run one program: the same trainer, settings and seeds, so that every decision is taken on every rank from the same numbers. Only work
is divided: episodes, cross-scores, values of the critic, micro-batches, the optimiser's state. Every rank must reach every exchange, so no rank
may branch on what it alone knows. `share` is the pattern for that: each rank does its part, and what fails on one rank (no memory, Ctrl-C, a
model that diverged) is raised on all of them at the same place.

Here is the world of one, which exchanges nothing and needs no torch. `training.api.join_world` finds out which world the process belongs to.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from tether.core.errors import BadInput
from tether.core.protocols import SingleProcess
from tether.training.distributed.slurm import join_slurm
from tether.training.interrupts import Interrupts

if TYPE_CHECKING:
    from torch import Tensor

Value = TypeVar("Value")


class Ranks(SingleProcess):
    """A world of one."""

    local_rank, local_size = 0, 1
    """The number of this rank on its machine, and how many there are."""

    def __init__(self) -> None:
        self.interrupts = Interrupts()
        """Ctrl-C: all ranks stop at the same place."""

    def subgroup(self) -> "Ranks":
        """The same ranks with an order of exchanges of their own, for a thread that works beside the main one: objects alone. All ranks call it."""
        return self

    def all_gather(self, value: Value) -> list[Value]:
        """The value of every rank, in the order of the ranks."""
        return [value]

    def barrier(self, work: Callable[[], Value]) -> Value:
        """Do the same work on every rank; returns this rank's result. What fails on one rank is raised on every rank."""
        return work()

    def broadcast_object(self, work: Callable[[], Value]) -> Value:
        """What `work` returns on rank 0, on every rank; the others do not call it."""
        return work()

    def reduce(self, tensors: Sequence["Tensor"], owners: Sequence[int]) -> None:
        """Sum each tensor over the ranks, in place on the rank that owns it; on the others its values are lost."""

    def broadcast(self, tensors: Sequence["Tensor"], owners: Sequence[int]) -> None:
        """Give each tensor the values that it has on the rank that owns it, in place."""

    def gather_to_first(self, tensor: "Tensor", owner: int) -> "Tensor":
        """On rank 0 the values of the tensor on the rank that owns it, in host memory where that is another; the tensor itself elsewhere."""
        return tensor

    def exchanging(self, what: str) -> AbstractContextManager[None]:
        """A block whose computation exchanges something itself; a rank that is lost in it is a RankFailure."""
        return nullcontext()

    def close(self) -> None:
        """Leave the other ranks, at the end."""


def launched_rank() -> tuple[int, int]:
    """Rank and number of ranks of this process, as its launcher put them into the environment; (0, 1) where there was none."""
    join_slurm()
    found = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    if found["WORLD_SIZE"] is None:
        return 0, 1
    try:
        rank, size = int(found["RANK"] or ""), int(found["WORLD_SIZE"])
    except ValueError:
        rank, size = -1, 0
    if not 0 <= rank < size:
        raise BadInput(
            f"the environment holds RANK={found['RANK']} and WORLD_SIZE={found['WORLD_SIZE']}; start with torchrun, or unset both"
        )
    return rank, size


def balanced(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Which rank takes each item, so that the ranks' totals are about equal: the largest first, each to the rank that has least.

    >>> balanced([5, 1, 4, 3, 3], 2)
    [0, 1, 1, 1, 0]
    """
    totals, owners = [0] * num_ranks, [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        owners[item] = totals.index(min(totals))
        totals[owners[item]] += sizes[item]
    return owners
