"""Token losses: the clipped objective on each side of both bounds for both signs, where its gradient vanishes; dual clip; the critic's."""

import math

import pytest
import torch

from tether.algorithms.objective import clipped_policy_loss, clipped_value_loss

# ratio, advantage -> loss = -min(r A, clip(r, 0.8, 1.28) A); gradient with respect to log p = -r A, or 0 where the bound decides
TOKENS = [
    # ratio, A, loss, gradient, clipped low, clipped high
    (0.50, 2.0, -1.00, -1.00, False, False),  # below the lower bound, but the min takes the ratio
    (0.90, 2.0, -1.80, -1.80, False, False),
    (1.00, 2.0, -2.00, -2.00, False, False),
    (1.25, 2.0, -2.50, -2.50, False, False),  # between 1 + low and 1 + high: free
    (1.30, 2.0, -2.56, 0.00, False, True),
    (1.50, 2.0, -2.56, 0.00, False, True),
    (0.50, -1.0, 0.80, 0.00, True, False),
    (0.75, -1.0, 0.80, 0.00, True, False),  # between 1 - high and 1 - low: clipped
    (0.90, -1.0, 0.90, 0.90, False, False),
    (1.00, -1.0, 1.00, 1.00, False, False),
    (1.25, -1.0, 1.25, 1.25, False, False),
    (1.50, -1.0, 1.50, 1.50, False, False),  # above the upper bound, but the min takes the ratio
    (0.50, 0.0, 0.00, 0.00, False, False),
    (1.50, 0.0, 0.00, 0.00, False, False),
]


@pytest.mark.parametrize("offset", [0.0, -3.5])
def test_both_sides_of_both_bounds(offset: float) -> None:
    """Only the ratio counts, not where the log-probs lie."""
    ratio, advantage, loss, gradient, low, high = zip(*TOKENS, strict=True)
    sampled_N = torch.full((len(TOKENS),), offset, dtype=torch.float64)
    logprobs_N = (torch.tensor(ratio, dtype=torch.float64).log() + offset).requires_grad_()
    result = clipped_policy_loss(logprobs_N, sampled_N, torch.tensor(advantage, dtype=torch.float64), clip_low=0.2, clip_high=0.28)
    assert result.loss_N.tolist() == pytest.approx(loss, abs=1e-12)
    assert result.ratio_N.tolist() == pytest.approx(ratio, rel=1e-12)
    assert result.clipped_low_N.tolist() == list(low)
    assert result.clipped_high_N.tolist() == list(high)
    assert not result.ratio_N.requires_grad
    result.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx(gradient, abs=1e-12)


def test_a_step_down_the_gradient_raises_the_probability_of_a_good_token() -> None:
    logprobs_N = torch.zeros(2, requires_grad=True)
    clipped_policy_loss(logprobs_N, torch.zeros(2), torch.tensor([1.0, -1.0]), 0.2, 0.28).loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == [-1, 1]


def test_exactly_at_a_bound_nothing_is_clipped() -> None:
    """exp(0) is exactly 1, so both bounds are put there."""
    result = clipped_policy_loss(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, -1.0]), clip_low=0.0, clip_high=0.0)
    assert result.loss_N.tolist() == [-1, 1]
    assert not result.clipped_low_N.any()
    assert not result.clipped_high_N.any()


def test_the_gradient_is_that_of_a_difference_quotient() -> None:
    """Central differences, away from the kinks."""
    generator = torch.Generator().manual_seed(0)
    sampled_N = -torch.rand(200, generator=generator, dtype=torch.float64) * 3
    logprobs_N = (sampled_N + torch.randn(200, generator=generator, dtype=torch.float64) * 0.5).requires_grad_()
    advantages_N = torch.randn(200, generator=generator, dtype=torch.float64)
    step = 1e-6

    def loss(at: torch.Tensor) -> torch.Tensor:
        return clipped_policy_loss(at, sampled_N, advantages_N, 0.2, 0.28).loss_N

    loss(logprobs_N).sum().backward()
    quotient = (loss(logprobs_N.detach() + step) - loss(logprobs_N.detach() - step)) / (2 * step)
    assert logprobs_N.grad is not None
    assert torch.allclose(logprobs_N.grad, quotient, atol=1e-7)


# -------------------------------------------------------------------------------------------------------------- dual clip


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "bounded"),
    [
        (5.0, -1.0, 3.0, 0.0, True),
        (3.5, -2.0, 6.0, 0.0, True),
        (2.5, -1.0, 2.5, 2.5, False),  # below the bound the ratio decides
        (0.5, -1.0, 0.8, 0.0, False),  # the lower clip decides, the bound is far
        (5.0, 1.0, -1.28, 0.0, False),  # good tokens are not the bound's matter
        (5.0, 0.0, 0.0, 0.0, False),
    ],
)
def test_dual_clip(ratio: float, advantage: float, loss: float, gradient: float, bounded: bool) -> None:
    logprobs_N = torch.tensor([math.log(ratio) - 1], dtype=torch.float64, requires_grad=True)
    sampled_N, advantages_N = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    result = clipped_policy_loss(logprobs_N, sampled_N, advantages_N, 0.2, 0.28, dual_clip=3.0)
    assert result.loss_N.tolist() == pytest.approx([loss], abs=1e-12)
    assert result.clipped_dual_N.tolist() == [bounded]
    result.loss_N.sum().backward()
    assert logprobs_N.grad is not None
    assert logprobs_N.grad.tolist() == pytest.approx([gradient], abs=1e-12)


def test_without_dual_clip_nothing_is_bounded() -> None:
    result = clipped_policy_loss(torch.tensor([9.0]), torch.tensor([0.0]), torch.tensor([-1.0]), 0.2, 0.28)
    assert result.loss_N.tolist() == pytest.approx([math.exp(9)], rel=1e-5)
    assert result.clipped_dual_N.tolist() == [False]


SAMPLED = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5], dtype=torch.float64)
NEW = torch.tensor([-0.6, -2.5, -0.5, -1.2, -1.4], dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -0.5, 2.0, -1.5, -0.7], dtype=torch.float64)


@pytest.mark.parametrize(("dual_clip", "mean"), [(3.0, 0.478723929), (None, 1.393618168)])
def test_values_of_verl(dual_clip: float | None, mean: float) -> None:
    """compute_policy_loss, verl 0.9.1, token-mean; two of five tokens are clipped, one is bounded."""
    result = clipped_policy_loss(NEW, SAMPLED, ADVANTAGES, 0.2, 0.28, dual_clip)
    assert float(result.loss_N.mean()) == pytest.approx(mean, abs=1e-9)
    assert int((result.clipped_low_N | result.clipped_high_N).sum()) == 2
    assert result.clipped_dual_N.tolist() == [False, False, False, dual_clip is not None, False]


# ------------------------------------------------------------------------------------------------------------- value loss


@pytest.mark.parametrize(
    ("value", "before", "target", "loss", "gradient", "clipped"),
    [
        (1.2, 1.0, 2.0, 0.32, -0.8, False),  # within the clip
        (1.8, 1.0, 2.0, 0.245, 0.0, True),  # moved 0.8 towards the target, only 0.3 count: (1.3 - 2)^2 / 2
        (0.2, 1.0, 2.0, 1.62, -1.8, False),  # moved away: the larger loss is its own
        (-1.0, 0.0, -3.0, 3.645, 0.0, True),  # (-0.3 + 3)^2 / 2
        (3.0, 1.0, 2.0, 0.5, 1.0, False),  # past the target by more than the clipped one falls short
    ],
)
def test_value_loss(value: float, before: float, target: float, loss: float, gradient: float, clipped: bool) -> None:
    values_N = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    before_N, returns_N = torch.tensor([before], dtype=torch.float64), torch.tensor([target], dtype=torch.float64)
    result = clipped_value_loss(values_N, before_N, returns_N, clip=0.3)
    assert result.loss_N.tolist() == pytest.approx([loss], abs=1e-12)
    assert result.clipped_N.tolist() == [clipped]
    result.loss_N.sum().backward()
    assert values_N.grad is not None
    assert values_N.grad.tolist() == pytest.approx([gradient], abs=1e-12)


def test_value_loss_of_verl() -> None:
    """compute_value_loss, verl 0.9.1, token-mean."""
    result = clipped_value_loss(NEW, SAMPLED, ADVANTAGES, clip=0.3)
    assert float(result.loss_N.mean()) == pytest.approx(1.507, abs=1e-9)
    assert int(result.clipped_N.sum()) == 2
