"""Token losses: the clipped objective on each side of both bounds for both signs, where its gradient vanishes, and k3."""

import math

import pytest
import torch

from tether.algorithms.losses import clipped_policy_loss, k3_divergence

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


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1, 0), (2, 1 - math.log(2)), (0.5, math.log(2) - 0.5), (math.e, math.e - 2), (10, 9 - math.log(10)), (0.01, -0.99 + math.log(100))],
)
def test_k3(ratio: float, expected: float) -> None:
    """r - 1 - log r: 0.3069 at 2, 0.1931 at 1/2."""
    new = torch.tensor([math.log(ratio) - 1.5], dtype=torch.float64)
    assert k3_divergence(new, torch.tensor([-1.5], dtype=torch.float64)).tolist() == pytest.approx([expected], abs=1e-14)


def test_k3_is_unbiased() -> None:
    """Sampled p = (.7, .2, .1), new q = (.5, .25, .25): E_p k3 = sum p (q/p - 1 - log q/p) = KL(p || q), exactly, as sum q = sum p."""
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    k3 = k3_divergence(torch.tensor(q, dtype=torch.float64).log(), torch.tensor(p, dtype=torch.float64).log()).tolist()
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert sum(a * value for a, value in zip(p, k3, strict=True)) == pytest.approx(kl, rel=1e-13)


def test_k3_is_never_negative() -> None:
    far = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    assert float(k3_divergence(far, torch.zeros_like(far)).min()) >= 0


def test_k3_is_never_negative_close_to_equal_in_float32() -> None:
    """exp(d) - 1 - d cancels for small d; the true value is d^2 / 2."""
    near = torch.linspace(-1e-3, 1e-3, 2001)
    k3 = k3_divergence(near, torch.zeros_like(near))
    assert float(k3.min()) >= 0
    assert torch.allclose(k3, near**2 / 2, rtol=2e-3, atol=2e-10)
