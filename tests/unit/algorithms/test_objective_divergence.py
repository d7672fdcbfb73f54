"""k1, k2 and k3: literal values, values from verl 0.9.1, their bias and sign, and precision where the two models are close."""

import math

import pytest
import torch

from tether.algorithms.objective import DIVERGENCES, k1, k2, k3


def double(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("ratio", [1, 2, 0.5, math.e, 10, 0.01])
def test_by_hand(ratio: float) -> None:
    """ratio = p_reference / p_policy; k3 = r - 1 - log r is 0.3069 at 2 and 0.1931 at 1/2."""
    policy, reference = double(-1.5), double(math.log(ratio) - 1.5)
    assert k1(policy, reference).tolist() == pytest.approx([-math.log(ratio)], abs=1e-14)
    assert k2(policy, reference).tolist() == pytest.approx([math.log(ratio) ** 2 / 2], abs=1e-14)
    assert k3(policy, reference).tolist() == pytest.approx([ratio - 1 - math.log(ratio)], abs=1e-14)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("k1", [0.4, -0.5, 0.0, 1.8, 0.1, -0.7]),
        ("k2", [0.08, 0.125, 0.0, 1.62, 0.005, 0.245]),
        ("k3", [0.070320046, 0.148721271, 0.0, 0.965298888, 0.004837418, 0.313752707]),
    ],
)
def test_values_of_verl(name: str, expected: list[float]) -> None:
    """kl_penalty, verl 0.9.1."""
    policy, reference = double(-0.6, -2.5, -0.5, -1.2, -1.4, -0.9), double(-1.0, -2.0, -0.5, -3.0, -1.5, -0.2)
    assert DIVERGENCES[name](policy, reference).tolist() == pytest.approx(expected, abs=1e-9)


def test_k1_and_k3_are_unbiased() -> None:
    """Policy p = (.7, .2, .1), reference q = (.5, .25, .25): the mean under p is KL(p || q), exactly, as both sum to 1."""
    p, q = [0.7, 0.2, 0.1], [0.5, 0.25, 0.25]
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    assert kl == pytest.approx(0.099272, abs=1e-6)
    for estimate in (k1, k3):
        values = estimate(double(*p).log(), double(*q).log()).tolist()
        assert sum(a * value for a, value in zip(p, values, strict=True)) == pytest.approx(kl, rel=1e-13)


def test_the_gradient_of_k2_is_unbiased_and_that_of_k1_is_nothing() -> None:
    """d KL / d logit = p (log p/q - KL); the mean of a token's gradient is the sum of p * d k(token) / d logits, p held fixed."""
    logits, reference = double(0.3, -0.2, 0.5).requires_grad_(), double(0.5, 0.25, 0.25).log()
    p = logits.softmax(0).detach()
    kl = (p * (p.log() - reference)).sum()
    exact = (p * (p.log() - reference - kl)).tolist()
    for estimate, expected in ((k2, exact), (k1, [0.0] * 3)):
        (gradient,) = torch.autograd.grad((p * estimate(logits.log_softmax(0), reference)).sum(), logits)
        assert gradient.tolist() == pytest.approx(expected, abs=1e-14)


def test_k2_and_k3_are_never_negative() -> None:
    far = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    for estimate in (k2, k3):
        assert float(estimate(far, torch.zeros_like(far)).min()) >= 0


def test_k3_keeps_its_digits_close_to_equal_in_float32() -> None:
    """exp(d) - 1 - d cancels for small d; the true value is d^2 / 2."""
    near = torch.linspace(-1e-3, 1e-3, 2001)
    estimates = k3(near, torch.zeros_like(near))
    assert float(estimates.min()) >= 0
    assert torch.allclose(estimates, near**2 / 2, rtol=2e-3, atol=2e-10)


def test_by_name() -> None:
    assert {"k1": k1, "k2": k2, "k3": k3} == DIVERGENCES
