"""Fewer reasonings at the same estimand: a random subset of a step's rows, each with all its columns.

Information and retrieval are means over rows (reasonings), and what a row contributes depends on no other row: only on the prompts, which
all stay. So the mean over a subset in which every row is equally likely is unbiased for the mean over all rows. Rows are drawn
systematically, at equal distances from a random start along the prompts, in random order inside and among them: each prompt keeps its
share to within one reasoning. `sampling_error` says how far the subset's mean may be from that of all.

Leaving out prompts would change the estimand.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput


def sample_reasonings(source: Sequence[Hashable], count: int, rng: np.random.Generator) -> tuple[int, ...]:
    """`count` of the rows, ascending, every one with probability count / N; all of them where there are no more.

    Args:
        source: the prompt of each of the N rows.
        count: how many to draw.
        rng: the source of the draw.
    """
    if count < 1:
        raise BadInput(f"count must be at least 1, got {count}; draw at least one")
    if count >= len(source):
        return tuple(range(len(source)))
    rank_of = {prompt: rank for rank, prompt in enumerate(dict.fromkeys(source))}
    rank = rng.permutation(len(rank_of))[[rank_of[prompt] for prompt in source]]
    shuffled = rng.permutation(len(source))
    order = shuffled[np.argsort(rank[shuffled], kind="stable")]  # prompts in random order, rows in random order inside each
    return tuple(sorted(systematic(order, count, int(rng.integers(len(source))))))


def systematic(order: npt.NDArray[np.int64], count: int, start: int) -> list[int]:
    """`count` elements at equal distances along `order`, whole numbers throughout: over the N possible starts each comes `count` times.

    >>> systematic(np.array([4, 0, 1, 3, 2]), count=2, start=3)
    [0, 2]
    """
    return [int(order[(step * len(order) + start) // count]) for step in range(count)]


def sampling_error(values: Sequence[float] | npt.NDArray[np.float64], population: int) -> float:
    """Standard error of the mean of `values` about the mean of the `population` they were drawn from.

    sqrt((1 - n / N) s^2 / n), s^2 with n - 1: its square is unbiased under simple random sampling (Cochran, Sampling Techniques, theorem
    2.4). `sample_reasonings` also spreads its rows over the prompts, which makes the true error smaller where prompts differ. It is
    zero when all are drawn: it does not hold the error by which the population itself varies from run to run.
    """
    drawn = np.asarray(values, dtype=np.float64)
    if drawn.ndim != 1 or not np.isfinite(drawn).all():
        raise BadInput(
            f"values must be one finite number per drawn row; got shape {drawn.shape} with {int((~np.isfinite(drawn)).sum())} not finite"
        )
    if not 1 <= len(drawn) <= population:
        raise BadInput(f"{len(drawn)} values cannot be drawn from a population of {population}; give one value per drawn row")
    if len(drawn) == population:
        return 0.0
    if len(drawn) == 1:
        raise BadInput("one value says nothing about how values vary; draw at least 2")
    return math.sqrt((1 - len(drawn) / population) * float(drawn.var(ddof=1)) / len(drawn))
