"""The Triton kernels against their definitions in torch: by Triton's interpreter where there is no CUDA device."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from tether.core.seeding import derive_seed, generator

pytest.importorskip("triton")

from tether.models.fast.kernels import attention
from tether.models.fast.kernels.attention import attend_new_tokens, paged_attention, text_attention
from tether.models.fast.kernels.logits import BLOCK, DecodeState, sample_step
from tether.models.fast.kernels.pointwise import (
    merge_attention,
    norm_backward,
    norm_forward,
    rotate,
    rotate_and_store,
    swiglu_backward,
    swiglu_forward,
)
from tether.models.fast.kernels.products import product, product_parts, product_swiglu

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ONLY_CUDA = pytest.mark.skipif(DEVICE != "cuda", reason="Triton's interpreter has no products in half precision")
assert_close: Callable[..., None] = torch.testing.assert_close


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(derive_seed("test", "kernels"))


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def test_norm() -> None:
    x, delta, weight = random(9, 70).requires_grad_(), random(9, 70).requires_grad_(), random(70).requires_grad_()
    total = x + delta
    expected = weight * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5)
    by_normed, by_total = random(9, 70), random(9, 70)
    torch.autograd.backward([expected, total], [by_normed, by_total])
    normed, found_total, scale = norm_forward(x.detach(), delta.detach(), weight.detach(), 1e-5, save=True)
    assert_close(normed, expected.detach(), rtol=1e-5, atol=1e-5)
    assert_close(found_total, total.detach())
    by_x, by_weight = norm_backward(by_normed, by_total, found_total, scale, weight.detach())
    assert_close(by_x, x.grad, rtol=1e-5, atol=1e-5)
    assert_close(by_weight, weight.grad, rtol=1e-5, atol=1e-5)


def test_norm_of_a_sum_in_parts() -> None:
    """Products of few rows leave what they add in parts."""
    x, parts, weight = random(9, 70), random(3, 9, 70), random(70)
    total = x + parts.sum(dim=0)
    normed, found_total, _ = norm_forward(x, parts, weight, 1e-5, save=False)
    assert_close(found_total, total)
    assert_close(normed, weight * total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=ONLY_CUDA)])
def test_products_of_few_rows(num_tokens: int, dtype: torch.dtype) -> None:
    """Sizes that no block divides; parts of the depth that add up to the whole."""
    x, weight, bias = ((scale * t).to(dtype) for scale, t in ((0.1, random(num_tokens, 592)), (1, random(72, 592)), (1, random(72))))
    rounding: dict[str, float] = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 0.01, "atol": 0.01}
    expected = x.float() @ weight.float().T
    assert_close(product(x, weight, bias).float(), expected + bias.float(), **rounding)
    parts = product_parts(x, weight)
    assert parts.shape == (2, num_tokens, 72)
    assert parts.dtype == torch.float32
    assert_close(parts.sum(dim=0), expected, rtol=1e-4, atol=1e-4)
    gate, up = expected.to(dtype).float().chunk(2, dim=1)
    assert_close(product_swiglu(x, weight).float(), silu(gate) * up, **{name: 4 * value for name, value in rounding.items()})


def test_norm_of_heads_that_stand_apart() -> None:
    """Queries are normed where the joint projection wrote them."""
    states, weight = random(5, 4 * 24), random(24)
    heads = states[:, : 2 * 24].unflatten(1, (2, 24))
    expected = weight * heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
    assert_close(norm_forward(heads, None, weight, 1e-6, save=False)[0], expected, rtol=1e-5, atol=1e-5)


def test_swiglu() -> None:
    both = random(3, 2 * 1050)
    gate, up = (part.detach().requires_grad_() for part in both.chunk(2, dim=1))
    by_product = random(3, 1050)
    product = silu(gate) * up
    product.backward(by_product)
    assert_close(swiglu_forward(*both.chunk(2, dim=1)), product.detach(), rtol=1e-5, atol=1e-5)
    by_gate, by_up = swiglu_backward(by_product, *both.chunk(2, dim=1)).chunk(2, dim=1)
    assert_close(by_gate, gate.grad, rtol=1e-5, atol=1e-5)
    assert_close(by_up, up.grad, rtol=1e-5, atol=1e-5)


def test_two_parts_of_an_attention() -> None:
    """The softmax over 7 keys, from those over the first 3 and the last 4; the parts lie inside larger tensors."""
    scores_HSX, values_HXD = random(3, 5, 7) * 4, random(3, 7, 20)
    parts = [(scores_HSX[..., part], values_HXD[:, part]) for part in (slice(0, 3), slice(3, 7), slice(0, 7))]
    own, other, whole = ((scores.softmax(-1) @ values, scores.logsumexp(-1)) for scores, values in parts)
    out_SHD, sums_HS = random(9, 3, 20), random(3, 9)
    out_SHD[2:7], sums_HS[:, 2:7] = own[0].transpose(0, 1), own[1]
    before = out_SHD.clone(), sums_HS.clone()
    merge_attention(out_SHD[2:7], sums_HS[:, 2:7], other[0].transpose(0, 1).contiguous(), other[1])
    assert_close(out_SHD[2:7], whole[0].transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert_close(sums_HS[:, 2:7], whole[1], rtol=1e-5, atol=1e-5)
    assert_close(out_SHD[[0, 1, 7, 8]], before[0][[0, 1, 7, 8]])
    assert_close(sums_HS[:, :2], before[1][:, :2])


def turned(x_SHD: Tensor, positions_S: Tensor, angles_PR: Tensor) -> Tensor:
    """By complex numbers: a head's halves are real and imaginary parts."""
    first, second = x_SHD.double().chunk(2, dim=-1)
    moved = torch.complex(first, second) * torch.polar(torch.ones_like(angles_PR).double(), angles_PR.double())[positions_S][:, None]
    return torch.cat([moved.real, moved.imag], dim=-1).float()


def test_rotation_and_its_way_back() -> None:
    states = random(7, (3 + 2) * 24)
    query, key = (part.unflatten(1, (-1, 24)) for part in states.split([3 * 24, 2 * 24], dim=1))
    positions, angles = torch.arange(7, device=DEVICE) * 3 % 20, random(20, 12)
    found = rotate(query, key, positions, angles.cos(), angles.sin(), back=False)
    for part, original in zip(found, (query, key), strict=True):
        assert_close(part, turned(original, positions, angles), rtol=1e-5, atol=1e-5)
    for part, original in zip(rotate(*found, positions, angles.cos(), angles.sin(), back=True), (query, key), strict=True):
        assert_close(part, original.contiguous(), rtol=1e-5, atol=1e-5)


def definition(query_THD: Tensor, key_LKD: Tensor, value_LKD: Tensor, scale: float) -> Tensor:
    """Attention of the last T of L positions to all that is not behind them."""
    repeats = query_THD.shape[1] // key_LKD.shape[1]
    key, value = (states.repeat_interleave(repeats, dim=1).double() for states in (key_LKD, value_LKD))
    scores = torch.einsum("thd,lhd->htl", query_THD.double(), key) * scale
    num_new, length = scores.shape[1:]
    hidden = torch.arange(length, device=scores.device) > torch.arange(length - num_new, length, device=scores.device)[:, None]
    return torch.einsum("htl,lhd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value).float()


@pytest.mark.parametrize("use_prefix", [True, False])
def test_attention_inside_texts(use_prefix: bool) -> None:
    lengths, prefixes = [5, 40, 1], [(0, 30), (30, 100), (30, 100)]
    states = random(sum(lengths), (6 + 2 + 2) * 24)
    query, key, value = (part.unflatten(1, (-1, 24)) for part in states.split([6 * 24, 2 * 24, 2 * 24], dim=1))
    stored = random(100, 2, 24), random(100, 2, 24)
    starts = torch.tensor([0, 5, 45, 46], dtype=torch.int32, device=DEVICE)
    prefix = (*stored, torch.tensor(prefixes, dtype=torch.int32, device=DEVICE)) if use_prefix else None
    found = text_attention(query, key, value, starts, 40, 0.3, prefix)
    for (first, last), (begin, end) in zip(((0, 5), (5, 45), (45, 46)), prefixes, strict=True):
        before = [states[begin:end] for states in stored] if use_prefix else [key[:0], value[:0]]
        own = slice(first, last)
        expected = definition(query[own], torch.cat([before[0], key[own]]), torch.cat([before[1], value[own]]), 0.3)
        assert_close(found[own], expected, rtol=1e-5, atol=1e-5)


def test_blocks_of_texts() -> None:
    """Four tokens to a block: texts of 5, 4 and 1 have two, one and one; there may be one more, of which the first text has nothing."""
    assert attention.num_blocks(10, 3, 4) == 5
    found = attention.text_blocks(np.array([5, 4, 1]), 5, 4)
    assert found.tolist() == [[0, 0], [0, 1], [1, 0], [2, 0], [0, attention.NO_BLOCK]]
    assert attention.text_blocks(np.array([], dtype=np.int64), 2, 4).tolist() == [[0, attention.NO_BLOCK]] * 2
    assert [attention.block_tokens(*heads) for heads in ((12, 2), (9, 3), (4, 4), (512, 1))] == [16, 32, 128, 1]


@pytest.mark.parametrize(("new", "heads"), [((1, 1, 1), (6, 2)), ((3, 20, 1), (6, 2)), ((1, 1), (4, 4)), ((9, 17), (8, 1))])
def test_paged_attention(new: tuple[int, ...], heads: tuple[int, int]) -> None:
    """Pages in no order, rows of several lengths, one token each or many; what lies behind a text's end is not a number."""
    num_heads, num_kv_heads = heads
    page, width = 16, 24
    lengths = [max(count, length) for count, length in zip(new, (1, 37, 64), strict=False)]
    tables = torch.tensor([[7, 0, 0, 0], [2, 5, 1, 0], [9, 3, 8, 6]], dtype=torch.int32, device=DEVICE)[: len(new)]
    states = random(sum(new), (num_heads + 2 * num_kv_heads) * width)
    query, key, value = (
        part.unflatten(1, (-1, width)) for part in states.split([num_heads * width, num_kv_heads * width, num_kv_heads * width], dim=1)
    )
    before = [random(2, length - count, num_kv_heads, width) for length, count in zip(lengths, new, strict=True)]
    caches = tuple(torch.full((10, num_kv_heads, page, width), math.nan, device=DEVICE) for _ in range(2))
    for cache, which in zip(caches, range(2), strict=True):
        for table, past in zip(tables, before, strict=True):
            for position, entry in enumerate(past[which]):
                cache[int(table[position // page]), :, position % page] = entry
    rows = torch.tensor([row for row, count in enumerate(new) for _ in range(count)], dtype=torch.int32, device=DEVICE)
    at = [length - count + step for length, count in zip(lengths, new, strict=True) for step in range(count)]
    positions = torch.tensor(at, dtype=torch.int32, device=DEVICE)
    angles = random(80, width // 2)
    turned_query, turned_key = turned(query, positions.long(), angles), turned(key, positions.long(), angles)
    rotate_and_store((query, key, value), caches, positions, rows, tables, (angles.cos(), angles.sin()))
    assert_close(query, turned_query, rtol=1e-5, atol=1e-5)
    starts = torch.tensor(np.concatenate([[0], np.cumsum(new)]), dtype=torch.int32, device=DEVICE)
    each = attention.block_tokens(num_heads, num_kv_heads)
    blocks = attention.text_blocks(np.array(new), attention.num_blocks(sum(new), len(new), each), each)
    blocks, filled = (torch.tensor(numbers, dtype=torch.int32, device=DEVICE) for numbers in (blocks, lengths))
    found = paged_attention(query, caches, tables, starts, filled, blocks, 0.2)
    for row, past in enumerate(before):
        own = slice(int(starts[row]), int(starts[row + 1]))
        expected = definition(turned_query[own], torch.cat([past[0], turned_key[own]]), torch.cat([past[1], value[own]]), 0.2)
        assert_close(found[own], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize(
    ("lengths", "heads", "programs"),
    [
        pytest.param((4, 37, 64), (6, 2), 264, marks=pytest.mark.long),  # as many programs as a GPU takes: by the interpreter five seconds
        ((4, 37), (6, 2), 8),
        ((5, 33), (4, 4), 1),
        ((17, 48), (8, 1), 8),
    ],
)
def test_attention_of_new_tokens(
    monkeypatch: pytest.MonkeyPatch, new: int, lengths: tuple[int, ...], heads: tuple[int, int], programs: int
) -> None:
    """Positions, cache and attention of new tokens, one each or three and two by turns, split among programs or not; twice, as a step that is replayed.

    Three new tokens of 17 and two of 33 lie on two pages, which are of different programs where each has one.
    """
    monkeypatch.setattr(attention, "ENOUGH_PROGRAMS", programs)
    num_heads, num_kv_heads = heads
    page, width = 16, 24
    tables = torch.tensor([[7, 11, 4, 0], [2, 5, 1, 10], [9, 3, 8, 6]], dtype=torch.int32, device=DEVICE)[: len(lengths)]
    angles = random(80, width // 2)
    caches = tuple(torch.full((12, num_kv_heads, page, width), math.nan, device=DEVICE) for _ in range(2))
    counts = [max(1, new - row % 2) for row in range(len(lengths))]
    before = [random(2, length - count, num_kv_heads, width) for length, count in zip(lengths, counts, strict=True)]
    for cache, which in zip(caches, range(2), strict=True):
        for table, past in zip(tables, before, strict=True):
            for position, entry in enumerate(past[which]):
                cache[int(table[position // page]), :, position % page] = entry
    arrived = torch.zeros(len(lengths) * num_kv_heads, dtype=torch.int32, device=DEVICE)
    filled, firsts, numbers = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (lengths, np.cumsum(counts) - counts, counts))
    positions = torch.tensor([length - count + step for length, count in zip(lengths, counts, strict=True) for step in range(count)])
    ragged = None if new == 1 else (firsts, numbers, new)
    for _ in range(2):
        states = random(sum(counts) + (new > 1), (num_heads + 2 * num_kv_heads) * width)
        sizes = [num_heads * width, num_kv_heads * width, num_kv_heads * width]
        query, key, value = (part.unflatten(1, (-1, width)) for part in states.split(sizes, dim=1))
        out = torch.full((len(query), num_heads, width), 7.0, device=DEVICE)
        found = attend_new_tokens(
            (query, key, value), caches, tables, filled, (angles.cos(), angles.sin()), 0.2, arrived, out, ragged=ragged
        )
        assert found is out and bool((out[sum(counts) :] == 7).all()), "the last token is nobody's"
        turned_query, turned_key = (turned(x[: sum(counts)], positions.to(DEVICE), angles) for x in (query, key))
        for row, past in enumerate(before):
            own = slice(int(firsts[row]), int(firsts[row]) + counts[row])
            keys, values = torch.cat([past[0], turned_key[own]]), torch.cat([past[1], value[own]])
            assert_close(found[own], definition(turned_query[own], keys, values, 0.2), rtol=1e-4, atol=1e-4)
            for at, token in zip(positions[own].tolist(), range(own.start, own.stop), strict=True):
                stored = [cache[int(tables[row, at // page]), :, at % page] for cache in caches]
                assert_close(stored, [turned_key[token], value[token]], rtol=1e-5, atol=1e-5)
        assert not arrived.any()


def drawn(
    logits_V: Tensor, uniforms: Any, temperature: float = 1.0, greedy: bool = False, never: tuple[int, ...] | None = None
) -> DecodeState:
    """One draw per uniform from the same logits."""
    state = DecodeState(len(uniforms), 1, torch.device(DEVICE))
    state.uniforms_BK[:, 0] = torch.as_tensor(uniforms)
    state.rate_1.fill_(1 / temperature)
    never_N = None if never is None else torch.tensor(never, dtype=torch.int32, device=DEVICE)
    sample_step(logits_V.expand(len(uniforms), -1).contiguous(), state, greedy=greedy, never_N=never_N)
    return state


def test_draws_by_hand() -> None:
    """Probabilities 0.5, 0, 0.25, 0.25: cumulative 0.5, 0.5, 0.75, 1."""
    logits = torch.tensor([math.log(2), -math.inf, 0.0, 0.0], device=DEVICE)
    state = drawn(logits, [0.0, 0.49, 0.5, 0.74, 0.75, 0.99999994])
    assert state.sampled_BK[:, 0].tolist() == [0, 0, 2, 2, 3, 3]
    assert_close(state.logprobs_BK[:, 0].exp(), torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25, 0.25], device=DEVICE))
    assert state.ids_B.tolist() == [0, 0, 2, 2, 3, 3]
    assert state.positions_B.tolist() == state.lengths_B.tolist() == [1] * 6 and state.step_1.item() == 1
    assert drawn(logits, [0.99, 0.0], greedy=True).sampled_BK[:, 0].tolist() == [0, 0]
    warm = drawn(logits, [0.0], temperature=2.0)  # sqrt(2) : 0 : 1 : 1
    assert_close(warm.logprobs_BK[0, 0].exp().item(), math.sqrt(2) / (math.sqrt(2) + 2))


def test_tokens_that_are_never_drawn_count_in_log_probs() -> None:
    """Weights 6, 1, 2, 1 and, in a block of its own, 6, of which the sixes are never drawn: draws by 1 : 2 : 1, log-probs among all 16."""
    logits = torch.full((BLOCK + 1,), -math.inf, device=DEVICE)
    logits[:4], logits[BLOCK] = torch.log(torch.tensor([6.0, 1.0, 2.0, 1.0])), math.log(6)
    never = (0, BLOCK)
    state = drawn(logits, [0.0, 0.24, 0.26, 0.74, 0.76, 0.99999994], never=never)
    assert state.sampled_BK[:, 0].tolist() == [1, 1, 2, 2, 3, 3]
    assert_close(state.logprobs_BK[:, 0].exp() * 16, torch.tensor([1.0, 1, 2, 2, 1, 1], device=DEVICE))
    assert drawn(logits, [0.0], greedy=True, never=never).sampled_BK[0, 0].item() == 2
    far = drawn(logits + torch.tensor([200.0] + [0.0] * BLOCK, device=DEVICE), [0.0], never=never)
    assert_close(far.logprobs_BK[0, 0].item(), -200 - math.log(6))


def test_draws_follow_the_distribution_over_several_blocks() -> None:
    """Chi-square, with evenly spaced uniforms in a random order of the vocabulary: nearly no error is left to chance."""
    vocabulary = 2 * BLOCK + 100
    logits = torch.full((vocabulary,), -math.inf)
    likely = generator("test", "vocabulary").permutation(vocabulary)[:20]
    logits[torch.from_numpy(likely)] = torch.linspace(-1, 1, 20)
    probs = torch.softmax(logits, -1)
    uniforms = (np.arange(60) + 0.5) / 60
    counts = torch.bincount(drawn(logits.to(DEVICE), uniforms.astype(np.float32)).sampled_BK[:, 0].cpu(), minlength=vocabulary)
    assert counts[probs == 0].sum() == 0
    assert ((counts - 60 * probs).abs() <= 1.001).all()


def test_a_draw_on_the_border_of_two_blocks_belongs_to_the_second() -> None:
    logits = torch.full((2 * BLOCK,), -math.inf, device=DEVICE)
    logits[[5, BLOCK + 7]] = 0.0
    assert drawn(logits, [0.4999, 0.5]).sampled_BK[:, 0].tolist() == [5, BLOCK + 7]


def test_draws_from_logits_that_are_not_numbers_are_noticed() -> None:
    logits = torch.tensor([0.0, math.nan, 1.0], device=DEVICE)
    state = drawn(logits, [0.5])
    assert not math.isfinite(state.logprobs_BK[0, 0].item()) and 0 <= int(state.sampled_BK[0, 0]) < 3
