"""The two parts of the attention and their merge: known answers by hand, and the softmax over everything, computed in one piece."""

import math
from typing import Any

import pytest
import torch

from tether.models.fast import prefix_attention
from tether.models.fast.prefix_attention import NotShared, Pass, PrefixSpan, _attention, plain_attention, prefix_kernel


def test_the_definition_by_hand() -> None:
    """Two keys with scores log 1 and log 3 and values 0 and 4: weights 1/4 and 3/4, so 3; the log-sum-exp is log 4."""
    query, key = torch.tensor([[[[1.0]]]]), torch.tensor([[[[0.0], [math.log(3)]]]])
    out, sums = plain_attention(query, key, torch.tensor([[[[0.0], [4.0]]]]), False, 1.0)
    assert out.item() == pytest.approx(3.0) and sums.item() == pytest.approx(math.log(4))
    out, sums = plain_attention(query, key, torch.tensor([[[[0.0], [4.0]]]]), True, 1.0)
    assert out.item() == 0.0 and sums.item() == 0.0, "the first token sees the first key only"
    _, sums = plain_attention(query, key, key, False, 0.5)
    assert sums.item() == pytest.approx(math.log(1 + math.sqrt(3))), "the scale is applied"


def test_a_part_of_the_queries_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = torch.randn(3, 2, 3, 11, 8, generator=torch.Generator().manual_seed(0))
    for causal in (True, False):
        whole = plain_attention(query, key, value, causal, 0.3)
        monkeypatch.setattr(prefix_attention, "PLAIN_QUERIES", 4)
        parts = plain_attention(query, key, value, causal, 0.3)
        monkeypatch.undo()
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("width", [8, 24, 64])
def test_the_chosen_kernel_is_the_definition(dtype: torch.dtype, width: int) -> None:
    query, key, value = torch.randn(3, 2, 3, 70, width, generator=torch.Generator().manual_seed(1)).to(dtype)
    kernel = prefix_kernel("cpu", dtype, width, width).kernel
    slack = 3e-2 if dtype == torch.bfloat16 else 1e-5
    for queries, causal in ((query, True), (query[:, :, :9], False)):
        for found, expected in zip(
            kernel(queries, key, value, causal, 0.2), plain_attention(queries, key, value, causal, 0.2), strict=True
        ):
            assert found.shape == expected.shape
            assert torch.allclose(found.float(), expected.float(), atol=slack)


def _refuses(*_: Any) -> Any:
    raise RuntimeError("no such kernel")


def _is_off(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Any:
    out, sums = plain_attention(query, key, value, causal, scale)
    return out, sums + 0.01


def _forgets_causality(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Any:
    return plain_attention(query, key, value, False, scale)


def _pads(query: Any, key: Any, value: Any, causal: bool, scale: float) -> Any:
    out, sums = plain_attention(query, key, value, causal, scale)
    return out, torch.nn.functional.pad(sums, (0, 1))


@pytest.mark.parametrize("kernel", [_refuses, _is_off, _forgets_causality, _pads])
def test_a_kernel_that_does_not_serve_is_passed_over(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    (flash,) = prefix_attention.FUSED["cpu"]
    for fused, expected in (((kernel,), plain_attention), ((kernel, flash), flash)):
        monkeypatch.setitem(prefix_attention.FUSED, "cpu", fused)
        prefix_kernel.cache_clear()
        choice = prefix_kernel("cpu", torch.float32, 8, 8)
        assert choice.kernel is expected and bool(choice.reason) == (expected is plain_attention)
    prefix_kernel.cache_clear()


def test_no_fused_kernel_for_other_devices_and_widths() -> None:
    assert prefix_kernel("meta", torch.float32, 8, 8).kernel is plain_attention
    assert prefix_kernel("cpu", torch.float32, 8, 12).kernel is plain_attention


# ------------------------------------------------------------------------------------------------------------- the merge


class Layer(torch.nn.Module):
    """A module to store keys under."""


def attend(run: Pass, layer: Layer, query: Any, key: Any, value: Any, **more: Any) -> Any:
    token = prefix_attention._current.set(run)
    try:
        return _attention(layer, query, key, value, more.pop("mask", None), **more)[0]
    finally:
        prefix_attention._current.reset(token)


def test_prefix_and_own_tokens_merge_into_one_softmax() -> None:
    """Prompts of 3 and 2 tokens; texts of 2 and 1 after the first, of 2 after the second. 4 query heads share 2 key heads."""
    source = torch.Generator().manual_seed(2)
    layer = Layer()
    prompt_query, prompt_key, prompt_value = (torch.randn(1, heads, 5, 8, generator=source, dtype=torch.float64) for heads in (4, 2, 2))
    read = Pass(torch.tensor([[0, 1, 2], [3, 4, 4]]), torch.tensor([0, 1, 2, 3, 4]))
    prompts_out = attend(read, layer, prompt_query, prompt_key, prompt_value)
    query, key, value = (torch.randn(1, heads, 5, 8, generator=source, dtype=torch.float64) for heads in (4, 2, 2))
    run = Pass(
        torch.tensor([[0, 1], [2, 2], [3, 4]]), torch.tensor([0, 1, 2, 4, 5]), [PrefixSpan(0, 3, 0, 3), PrefixSpan(3, 5, 3, 5)], read.stored
    )
    out = attend(run, layer, query, key, value, scaling=0.4)
    sees = [([0, 1, 2], [0]), ([0, 1, 2], [0, 1]), ([0, 1, 2], [2]), ([3, 4], [3]), ([3, 4], [3, 4])]
    assert out.shape == (1, 5, 4, 8)
    for token, (of_prompt, of_own) in enumerate(sees):
        for head in range(4):
            keys = torch.cat([prompt_key[0, head // 2, of_prompt], key[0, head // 2, of_own]])
            values = torch.cat([prompt_value[0, head // 2, of_prompt], value[0, head // 2, of_own]])
            expected = (0.4 * keys @ query[0, head, token]).softmax(0) @ values
            assert torch.allclose(out[0, token, head], expected, atol=1e-6)
    first = (8**-0.5 * prompt_key[0, 0, 3:5] @ prompt_query[0, 0, 4]).softmax(0) @ prompt_value[0, 0, 3:5]
    assert torch.allclose(prompts_out[0, 4, 0], first, atol=1e-6), (
        "prompts see themselves only, scaled by their width if not told otherwise"
    )


@pytest.mark.parametrize("name", prefix_attention.BEYOND_DOT_PRODUCTS)
def test_more_than_dot_products_is_refused(name: str) -> None:
    states = torch.randn(1, 1, 2, 8)
    run = Pass(torch.tensor([[0, 1]]), torch.tensor([0, 1]))
    with pytest.raises(NotShared, match=f"Layer asks for {name}"):
        attend(run, Layer(), states, states, states, **{name: 30.0})


def test_masks_batches_and_second_calls_are_refused() -> None:
    states = torch.randn(1, 1, 2, 8)
    run, layer = Pass(torch.tensor([[0, 1]]), torch.tensor([0, 1])), Layer()
    with pytest.raises(NotShared, match="asks for a mask"):
        attend(run, layer, states, states, states, mask=torch.zeros(1, 1, 2, 2))
    with pytest.raises(NotShared):
        attend(run, layer, *(states.expand(2, -1, -1, -1),) * 3)
    attend(run, layer, states, states, states)
    with pytest.raises(NotShared, match="attends twice"):
        attend(run, layer, states, states, states)


def test_the_shortest_window_is_noted() -> None:
    states = torch.randn(1, 1, 2, 8)
    run = Pass(torch.tensor([[0, 1]]), torch.tensor([0, 1]))
    for window in (None, 40, 30, 50):
        attend(run, Layer(), states, states, states, sliding_window=window)
    assert run.window == 30
