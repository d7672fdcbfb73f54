"""Texts of a flat row see themselves and the prompt they continue, nothing else; gradients are those of the definition."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from tether.models.fast.packed_attention import (
    FUSED,
    PLAIN,
    KernelChoice,
    PackedAttention,
    PackedLengths,
    kernel_disagreement,
    packed_kernel,
)

CPU = torch.device("cpu")
H, K, D = 4, 2, 8
SCALE = 0.3


def _states(tokens: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    source = torch.Generator().manual_seed(tokens)
    query, key, value = (torch.randn(tokens, heads, D, generator=source, dtype=torch.float64).to(dtype) for heads in (H, K, K))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


def _masked(query: Tensor, key: Tensor, value: Tensor, sees_SS: Tensor) -> Tensor:
    """One softmax over the whole row, by the definition and autograd."""
    key, value = (states.repeat_interleave(H // K, dim=1) for states in (key, value))
    scores_HSS = torch.einsum("shd,thd->hst", query, key) * SCALE
    return torch.einsum("hst,thd->shd", scores_HSS.masked_fill(~sees_SS, -torch.inf).softmax(-1), value)


def _sees(lengths: Sequence[int], prompts: Sequence[int] = (), followers: Sequence[int] = ()) -> Tensor:
    """[S, S] who sees whom, written down token by token."""
    total = sum(lengths)
    text = [n for n, length in enumerate(lengths) for _ in range(length)]
    sees = torch.tensor([[text[s] == text[t] and t <= s for t in range(total)] for s in range(total)])
    start, begin = sum(prompts), 0
    for prompt, tokens in zip(prompts, followers, strict=True):
        sees[start : start + tokens, begin : begin + prompt] = True
        start, begin = start + tokens, begin + prompt
    return sees


LAYOUTS = {
    "one text": ([9], [], []),
    "three texts": ([5, 1, 7], [], []),
    "a prompt with three followers": ([6, 2, 1, 4], [6], [7]),
    "two prompts, a text alone": ([3, 5, 2, 2, 4, 1, 8], [3, 5], [4, 5]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("plain", [True, False], ids=["definition", "fused"])
def test_it_is_one_softmax_over_what_is_seen(
    layout: tuple[list[int], list[int], list[int]], plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if plain:
        monkeypatch.setattr("tether.models.fast.packed_attention.packed_kernel", lambda *_: KernelChoice(PLAIN, ""))
    states = _states(sum(layout[0]))
    got = PackedAttention(*layout, scale=SCALE, device=CPU)(0, *states)
    want = _masked(*states, _sees(*layout))
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(5), dtype=got.dtype)
    found = torch.autograd.grad((got * weights).sum(), states)
    expected = torch.autograd.grad((want * weights).sum(), states)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
@pytest.mark.parametrize(("dtype", "slack"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_in_the_precision_of_a_model(dtype: torch.dtype, slack: float) -> None:
    layout = LAYOUTS["two prompts, a text alone"]
    states, exact = _states(sum(layout[0]), dtype), _states(sum(layout[0]))
    got = PackedAttention(*layout, scale=SCALE, device=CPU)(0, *states)
    want = _masked(*exact, _sees(*layout))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=slack, atol=slack)
    found = torch.autograd.grad(got.sum(), states)
    for by, expected in zip(found, torch.autograd.grad(want.sum(), exact), strict=True):
        assert by.dtype == dtype
        torch.testing.assert_close(by.double(), expected, rtol=slack, atol=3 * slack)


def test_a_very_one_sided_merge() -> None:
    """Scores of the prompt thousands above the others': no overflow, and the others get no gradient."""
    query, key, value = _states(6)
    with torch.no_grad():
        query.fill_(10.0)
        key[:3].fill_(100.0)
        key[3:].fill_(-100.0)
    out = PackedAttention([3, 3], [3], [3], scale=1.0, device=CPU)(0, query, key, value)
    torch.testing.assert_close(out[3:], value[:3].mean(0).repeat_interleave(2, 0).expand(3, H, D).detach(), rtol=1e-9, atol=1e-9)
    out[3:].sum().backward()
    assert value.grad is not None and key.grad is not None
    assert not value.grad[3:].any() and bool(value.grad[:3].any()) and bool(key.grad.isfinite().all())


def test_the_fused_kernel_is_taken_where_it_is_right() -> None:
    assert packed_kernel("cpu", torch.float32, 64) == (FUSED["cpu"], "")
    assert packed_kernel("meta", torch.float32, 64) == (PLAIN, "torch has no flash kernel for device type 'meta'")


class _Wrong:
    """The definition with one thing done wrong."""

    def __init__(self, what: str) -> None:
        self.what = what

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, texts: tuple[PackedLengths, PackedLengths], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        if self.what == "changed schema":
            raise RuntimeError("aten::_flash_attention_forward() is missing value for argument 'seqused_k'")
        if self.what == "vanished operator":
            return cast(Any, torch.ops.aten._no_such_flash_attention(query))
        if self.what == "other results":
            _, _ = (query,)
        out, sums = PLAIN.forward(query, key, value, texts, causal and self.what != "sees the future", scale)
        return out, sums.t() if self.what == "sums the other way round" else sums

    def backward(
        self,
        by_out: Tensor,
        states: tuple[Tensor, Tensor, Tensor],
        result: tuple[Tensor, Tensor],
        texts: tuple[PackedLengths, PackedLengths],
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if self.what == "forgets the given result":
            result = PLAIN.forward(*states, texts, causal, scale)
        return PLAIN.backward(by_out, states, result, texts, causal, scale)


WRONG = {
    "changed schema": "RuntimeError: aten::_flash_attention_forward() is missing value for argument",
    "vanished operator": "AttributeError: '_OpNamespace' 'aten' object has no attribute",
    "other results": "ValueError: not enough values to unpack",
    "sees the future": "the flash kernel of torch differs from the definition by",
    "sums the other way round": "the flash kernel of torch gives shape",
    "forgets the given result": "the flash kernel of torch differs from the definition by",
}


@pytest.mark.parametrize("what", WRONG)
def test_a_kernel_that_is_wrong_is_left_out_with_the_reason(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's flash kernels are private operators: whatever a changed one raises or returns must not end a run, nor go unsaid."""
    assert not kernel_disagreement(_Wrong(""), CPU, torch.float32, 16)
    monkeypatch.setitem(FUSED, "cpu", _Wrong(what))
    kernel, reason = packed_kernel.__wrapped__("cpu", torch.float32, 16)
    assert kernel is PLAIN and reason.startswith(WRONG[what])


@pytest.mark.parametrize("width", [64, 128])
def test_on_a_gpu_the_fused_kernel_is_taken(width: int, gpu: str) -> None:
    assert packed_kernel(gpu, torch.bfloat16, width) == (FUSED["cuda"], "")
    layout = LAYOUTS["two prompts, a text alone"]
    states = [state.detach().to(gpu, torch.bfloat16).requires_grad_() for state in _states(sum(layout[0]))]
    exact = [state.detach().double().cpu().requires_grad_() for state in states]
    got = PackedAttention(*layout, scale=SCALE, device=states[0].device)(0, *states)
    want = _masked(exact[0], exact[1], exact[2], _sees(*layout))
    torch.testing.assert_close(got.double().cpu(), want, rtol=0.05, atol=0.05)
    for by, expected in zip(torch.autograd.grad(got.sum(), states), torch.autograd.grad(want.sum(), exact), strict=True):
        torch.testing.assert_close(by.double().cpu(), expected, rtol=0.05, atol=0.15)
