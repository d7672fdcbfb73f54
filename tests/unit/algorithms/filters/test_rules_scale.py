"""The loss scale: literal factors, one meaning for every aggregation, and names that are checked."""

import pytest
import torch

from tether.algorithms.filters.select import LOSS_SCALES, loss_scale
from tether.algorithms.objective import AGGREGATIONS


@pytest.mark.parametrize(
    ("name", "ratio", "factor"),
    [("kept_ratio", 0.25, 0.25), ("sqrt", 0.25, 0.5), ("none", 0.25, 1), ("kept_ratio", 1, 1), ("sqrt", 1, 1), ("none", 1, 1)],
)
def test_factors(name: str, ratio: float, factor: float) -> None:
    assert loss_scale(name, ratio) == factor


@pytest.mark.parametrize("name", sorted(LOSS_SCALES))
@pytest.mark.parametrize("rule", sorted(AGGREGATIONS))
def test_one_meaning_for_every_aggregation(rule: str, name: str) -> None:
    """Two of eight groups are kept: loss and gradient are 1/4, 1/2 or 1 of what the kept tokens give unscaled, and with kept_ratio
    they are, for equal lengths, what all eight groups give whose dropped ones have advantage zero."""
    factor = {"kept_ratio": 0.25, "sqrt": 0.5, "none": 1.0}[name]
    mask_BT = torch.ones(8, 3, dtype=torch.bool)
    kept = torch.tensor([1, 6])

    def loss_and_gradient(rows: torch.Tensor, advantages_B: torch.Tensor, scale: float) -> tuple[float, list[float]]:
        table_BT = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3).requires_grad_()
        weights_BT = AGGREGATIONS[rule](mask_BT[rows], rows, 7.0).double()
        loss = scale * (weights_BT * table_BT[rows] ** 3 * advantages_B[rows, None]).sum()
        (gradient,) = torch.autograd.grad(loss, table_BT)
        return float(loss.detach()), gradient.flatten().tolist()

    advantages_B = torch.zeros(8, dtype=torch.float64).index_fill_(0, kept, 1.5)
    plain = loss_and_gradient(kept, advantages_B, 1.0)
    scaled = loss_and_gradient(kept, advantages_B, loss_scale(name, len(kept) / 8))
    assert scaled[0] == pytest.approx(factor * plain[0], rel=1e-12)
    assert scaled[1] == pytest.approx([factor * value for value in plain[1]], rel=1e-12)
    if name == "kept_ratio":
        everything = loss_and_gradient(torch.arange(8), advantages_B, 1.0)
        assert scaled[0] == pytest.approx(everything[0], rel=1e-6)
        assert scaled[1] == pytest.approx(everything[1], rel=1e-6, abs=1e-12)


def test_unknown_name() -> None:
    with pytest.raises(ValueError, match=r"unknown loss scale 'squrt': did you mean 'sqrt'\?"):
        loss_scale("squrt", 0.5)
