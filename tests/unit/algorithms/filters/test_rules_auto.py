"""When `auto` filters: known ratios, the mean over recent batches, and batches without any variance."""

import pytest

from tether.algorithms.filters.select import auto_strategy, select_groups


def _batch(*groups: list[float]) -> tuple[list[float], list[int]]:
    return [reward for group in groups for reward in group], [index for index, group in enumerate(groups) for _ in group]


EVEN = _batch([1, 0], [1, 0], [0, 1])  # variances 0.5, 0.5, 0.5: ratio 0
UNEVEN = _batch([1, 0], [1, 1], [0, 0], [0, 0])  # variances 0.5, 0, 0, 0: mean 0.125, std 0.2165, ratio 1.732
FLAT = _batch([1, 1], [0, 0])


@pytest.mark.parametrize(
    ("batch", "earlier", "threshold", "strategy"),
    [
        (EVEN, [], 0.75, "all"),
        (UNEVEN, [], 0.75, "top_p"),
        (UNEVEN, [0.0, 0.0], 0.5, "top_p"),  # the mean of 0, 0 and 1.732 is 0.577
        (UNEVEN, [0.0, 0.0], 0.6, "all"),
        (EVEN, [1.5], 0.75, "top_p"),  # at the threshold: the mean is 0.75
        (FLAT, [], 0.75, "top_p"),
        (FLAT, [0.0, 0.0], 0.75, "top_p"),
    ],
)
def test_the_strategy_follows_the_ratio(
    batch: tuple[list[float], list[int]], earlier: list[float], threshold: float, strategy: str
) -> None:
    unfiltered = select_groups(*batch, strategy="all")
    assert auto_strategy(unfiltered, earlier, threshold) == strategy


def test_the_ratio_of_the_uneven_batch() -> None:
    assert select_groups(*UNEVEN, strategy="all").rv_ratio == pytest.approx(3**0.5)
