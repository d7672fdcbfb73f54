"""Log-probs and entropies part by part are those of the full logits, and so are their gradients, whatever the parts."""

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tether.models.fast import linear_logprobs as module
from tether.models.fast.linear_logprobs import linear_logprobs

N, D, V = 11, 6, 13
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]
F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


def _inputs(dtype: torch.dtype, with_bias: bool = True) -> Inputs:
    source = torch.Generator().manual_seed(0)
    features, weight, bias = (torch.randn(*shape, generator=source, dtype=F64) for shape in ((N, D), (V, D), (V,)))
    targets = torch.randint(0, V, (N,), generator=source)
    parts = [tensor.to(dtype).requires_grad_() for tensor in (features, weight, bias)]
    return parts[0], targets, parts[1], parts[2] if with_bias else None


def _plain(features: Tensor, targets: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax(nn.functional.linear(features, weight, bias) / temperature, dim=-1)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1)


def _loss(logprobs: Tensor, entropy: Tensor, which: str) -> Tensor:
    """Uneven weights, and curved in the log-probs."""
    weights = torch.arange(1, len(logprobs) + 1, dtype=logprobs.dtype) / 7
    terms = {"logprobs": (weights * logprobs.exp()).sum(), "entropy": (weights.flip(0) * entropy).sum()}
    return terms["logprobs"] + terms["entropy"] if which == "both" else terms[which]


def _gradients(function: Callable[..., Any], inputs: Inputs, temperature: float, which: str) -> list[Tensor]:
    logprobs, entropy = function(*inputs, temperature=temperature)
    return list(
        torch.autograd.grad(_loss(logprobs, entropy, which), [tensor for n, tensor in enumerate(inputs) if n != 1 and tensor is not None])
    )


@pytest.fixture(params=[1, 4, N, 1000], ids=lambda rows: f"{rows} rows")
def rows(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setitem(module.LOGIT_BYTES, "cpu", 4 * V * request.param)
    return int(request.param)


@pytest.mark.parametrize("which", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize(("temperature", "with_bias"), [(1.0, True), (0.7, False), (1.3, True)])
def test_it_is_the_full_softmax(rows: int, which: str, temperature: float, with_bias: bool) -> None:
    inputs = _inputs(F64, with_bias)
    got, want = linear_logprobs(*inputs, temperature=temperature), _plain(*inputs, temperature)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        _gradients(linear_logprobs, inputs, temperature, which), _gradients(_plain, inputs, temperature, which), rtol=1e-11, atol=1e-12
    )


def test_numerical_gradients() -> None:
    features, targets, weight, bias = _inputs(F64)
    assert bias is not None

    def both(*changed: Tensor) -> Tensor:
        logprobs, entropy = linear_logprobs(changed[0], targets, changed[1], changed[2], temperature=0.8)
        return torch.cat([logprobs, entropy])

    assert torch.autograd.gradcheck(both, (features, weight, bias))


def test_weights_tied_to_what_makes_the_features(rows: int) -> None:
    """Two uses of one tensor: their gradients add up."""
    _, targets, weight, _ = _inputs(F64)
    found = []
    for function in (linear_logprobs, _plain):
        logprobs, entropy = function(weight[targets].tanh(), targets, weight, None, temperature=0.9)
        found.append(torch.autograd.grad(_loss(logprobs, entropy, "both"), weight)[0])
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-12)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_half_precision_in_numbers_of_float32(rows: int) -> None:
    half, exact = _inputs(BF16), _inputs(F32)
    got = linear_logprobs(*half, temperature=0.7)
    assert got[0].dtype == got[1].dtype == F32
    torch.testing.assert_close(got, linear_logprobs(*exact, temperature=0.7), rtol=0.05, atol=0.05)
    for found, want in zip(_gradients(linear_logprobs, half, 0.7, "both"), _gradients(_plain, exact, 0.7, "both"), strict=True):
        assert found.dtype == BF16
        assert float((found.float() - want).norm() / want.norm()) < 0.03


def test_the_weights_gradient_is_rounded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 tokens that each add 1 to a sum that bfloat16 cannot count beyond 256 of: two words, all features alike."""
    monkeypatch.setitem(module.LOGIT_BYTES, "cpu", 4 * 2)
    features = torch.ones(600, 1, dtype=BF16)
    weight = torch.zeros(2, 1, dtype=BF16, requires_grad=True)
    logprobs, _ = linear_logprobs(features, torch.zeros(600, dtype=torch.long), weight)
    (2 * logprobs.sum()).backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == [600.0, -600.0]


def test_huge_logits() -> None:
    """Their exponentials overflow; log p and entropy do not."""
    features, targets = torch.tensor([[1.0], [1.0]]), torch.tensor([0, 1])
    weight = torch.tensor([[3000.0], [3000.0], [-3000.0]], requires_grad=True)
    logprobs, entropy = linear_logprobs(features, targets, weight)
    assert logprobs.tolist() == entropy.neg().tolist() == pytest.approx([-0.6931472] * 2)
    (logprobs + entropy).sum().backward()
    assert weight.grad is not None and weight.grad.flatten().tolist() == pytest.approx([0.0, 0.0, 0.0], abs=1e-4)


def test_only_what_needs_a_gradient_gets_one() -> None:
    features, targets, weight, bias = _inputs(F32)
    linear_logprobs(features.detach(), targets, weight, bias)[0].sum().backward()
    assert weight.grad is not None and bias is not None and bias.grad is not None and features.grad is None
    weight.grad = None
    linear_logprobs(features, targets, weight.detach())[0].sum().backward()
    assert features.grad is not None and weight.grad is None


def test_nothing_to_do() -> None:
    features, weight = torch.zeros(0, D, requires_grad=True), torch.ones(V, D, requires_grad=True)
    logprobs, entropy = linear_logprobs(features, torch.zeros(0, dtype=torch.long), weight)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert weight.grad is not None and not weight.grad.any()


def test_what_is_kept_for_the_backward_pass_does_not_grow_with_the_vocabulary() -> None:
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    features, weight = torch.randn(64, 4, requires_grad=True), torch.randn(3000, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        linear_logprobs(features, torch.zeros(64, dtype=torch.long), weight)
    assert max(kept) == weight.numel() and sum(kept) - weight.numel() < 64 * 10


INTERPRETED = """
import torch
from tether.models.fast import linear_logprobs as module
from tether.models.fast.kernels import logits as kernels
kernels.BLOCK = 16
for temperature, with_entropy in ((1.0, True), (0.7, True), (1.4, False)):
    source = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 37, generator=source) * 4
    logits[2, 9] = 90.0
    targets = torch.randint(0, 37, (5,), generator=source)
    outer = torch.randn(5, generator=source), torch.randn(5, generator=source) if with_entropy else None
    found, want = torch.empty(3, 5), torch.empty(3, 5)
    kernels.reduce_logits(logits, targets, temperature, tuple(found))
    module._reduce(logits.clone(), targets, temperature, tuple(want))
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
    kept = want[1], want[2]
    found = kernels.logit_gradient(logits, targets, temperature, kept, outer, torch.float32)
    want = module._by_logits(logits.clone(), targets, temperature, kept, outer, torch.float32)
    torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6)
print("agree")
"""


def test_the_kernels_agree_with_plain_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Run by Triton's interpreter, on the CPU: it must be switched on before Triton is imported, so in a process of its own where it was not."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from tether.models.fast.kernels import logits as kernels

        monkeypatch.setattr(kernels, "BLOCK", kernels.BLOCK)  # put back afterwards
        exec(INTERPRETED, {})
        assert capsys.readouterr().out.strip() == "agree"
        return
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", INTERPRETED], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.stdout.strip() == "agree", done.stderr[-2000:]


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_on_a_gpu(dtype: torch.dtype, gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of several blocks, three parts of uneven size, against float64 on the CPU."""
    source = torch.Generator().manual_seed(0)
    features, weight = torch.randn(50, 64, generator=source).to(dtype), (torch.randn(9001, 64, generator=source) / 4).to(dtype)
    targets = torch.randint(0, 9001, (50,), generator=source)
    monkeypatch.setitem(module.LOGIT_BYTES, "cuda", 4 * 9001 * 20)
    found = [features.to(gpu).requires_grad_(), targets.to(gpu), weight.to(gpu).requires_grad_(), None]
    exact = [features.double().requires_grad_(), targets, weight.double().requires_grad_(), None]
    got, want = linear_logprobs(*found, temperature=0.7), _plain(*exact, 0.7)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one.double().cpu(), other, rtol=1e-4, atol=1e-4)
    loss_weights = torch.randn(2, 50, generator=source, dtype=F64)
    by = torch.autograd.grad(sum((r * w.to(r)).sum() for r, w in zip(got, loss_weights, strict=True)), [found[0], found[2]])
    want_by = torch.autograd.grad(sum((r * w).sum() for r, w in zip(want, loss_weights, strict=True)), [exact[0], exact[2]])
    for one, other in zip(by, want_by, strict=True):
        assert float((one.double().cpu() - other).norm() / other.norm()) < (1e-4 if dtype == F32 else 1e-2)
