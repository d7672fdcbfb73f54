"""Where sequences are placed, with answers worked out by hand, and that sharing a row changes no number of any of them."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tether.models.logprobs import forward, logprobs_and_entropy, token_logprobs
from tether.models.packing import MicroBatch, RowSlice, micro_batches, pack_rows
from tether.models.policy import Policy

LENGTHS = torch.tensor([9, 30, 12, 5, 17, 3, 2])
Build = Callable[..., Any]


@pytest.mark.parametrize(
    ("lengths", "max_tokens", "together", "want"),
    [
        ([3, 8, 5, 2], 16, True, [[[1], [2, 0]], [[3]]]),
        ([3, 8, 5, 2], 24, True, [[[1], [2, 0], [3]]]),
        ([3, 8, 5, 2], 16, False, [[[1], [2]], [[0], [3]]]),
        ([3, 8, 5, 2], 8, False, [[[1]], [[2]], [[0], [3]]]),
        ([3, 8, 5, 2], 7, True, [[[1]], [[2]], [[0], [3]]]),  # 5 + 2 is wider than 5
        ([4, 4, 4], 8, True, [[[0], [1]], [[2]]]),  # equal lengths keep their order
        ([10, 4, 5, 4, 1, 1], 20, True, [[[0], [2, 1, 4]], [[3], [5]]]),
        ([10, 6, 5, 4], 20, True, [[[0], [1, 3]], [[2]]]),  # 5 finds no room, the shorter 4 still does
        ([6], 2, True, [[[0]]]),  # one sequence at least
        ([], 5, True, []),
    ],
)
def test_placement_by_hand(lengths: list[int], max_tokens: int, together: bool, want: list[list[list[int]]]) -> None:
    assert pack_rows(lengths, max_tokens, together) == want


def test_a_budget_of_nothing() -> None:
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        pack_rows([1], 0, True)


@pytest.mark.parametrize("together", [True, False])
def test_every_sequence_once_within_the_budget(together: bool) -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(1, 40) for _ in range(draw.randint(1, 30))]
        max_tokens = draw.randint(1, 120)
        batches = micro_batches(torch.tensor(lengths), max_tokens, together)
        assert sorted(place.sequence for batch in batches for place in batch.slices) == list(range(len(lengths)))
        for batch in batches:
            assert batch.width == max(place.length for place in batch.slices)
            assert batch.num_rows * batch.width <= max_tokens or batch.num_rows == 1
            assert {place.row for place in batch.slices} == set(range(batch.num_rows))
            assert list(batch.slices) == sorted(batch.slices)
            taken = [(place.row, place.start + t) for place in batch.slices for t in range(place.length)]
            assert len(taken) == len(set(taken)) and max(column for _, column in taken) < batch.width
            assert together or not batch.shares_rows
            assert all(place.length == lengths[place.sequence] for place in batch.slices)


def test_ids_and_positions_by_hand() -> None:
    ids = torch.tensor([[11, 12, 13, 0, 0], [21, 22, 23, 24, 25], [31, 0, 0, 0, 0]])
    micro = MicroBatch((RowSlice(0, 1, 1, 3), RowSlice(1, 0, 0, 5), RowSlice(2, 1, 0, 1)), num_rows=2, width=5)
    to_padded, positions = micro.to_padded(ids)
    assert to_padded[0].tolist() == [21, 22, 23, 24, 25] and to_padded[1, :4].tolist() == [31, 11, 12, 13]
    assert positions.tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]  # padding goes on counting: no sequence of its own
    assert micro.index_M.tolist() == [0, 1, 2] and micro.shares_rows


def _batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(0, 97, (len(LENGTHS), 34), generator=generator)
    mask_BT = (torch.rand(ids_BT.shape, generator=generator) < 0.6) & (torch.arange(34) < LENGTHS[:, None])
    mask_BT[:, 0] = False
    return ids_BT, mask_BT


def _mean_logprobs(model: Any, together: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of the batch, in row order, and the gradient of their mean."""
    policy = Policy(model)
    ids_BT, mask_BT = _batch()
    result_BT = torch.zeros(ids_BT.shape)
    model.zero_grad()
    for micro in micro_batches(LENGTHS, 64, together):
        logprobs_N, _ = logprobs_and_entropy(policy, *forward(policy, ids_BT, mask_BT, micro), 0.8)
        (logprobs_N.sum() / mask_BT.sum()).backward()
        part = result_BT[micro.index_M]
        part[mask_BT[micro.index_M]] = logprobs_N.detach()
        result_BT[micro.index_M] = part
    return result_BT[mask_BT], {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _alone(model: Any) -> Tensor:
    """The same log-probs, one unpadded sequence at a time through the model itself."""
    ids_BT, mask_BT = _batch()
    found = []
    for ids, mask, length in zip(ids_BT, mask_BT, LENGTHS.tolist(), strict=True):
        with torch.no_grad():
            table = (model(input_ids=ids[None, :length], use_cache=False).logits[0] / 0.8).log_softmax(-1)
        found += [float(table[t - 1, ids[t]]) for t in mask.nonzero()[:, 0].tolist()]
    return torch.tensor(found)


@pytest.mark.parametrize(
    ("name", "attention"),
    [(name, attention) for name in ("llama", "qwen2", "gemma", "gpt2", "mistral") for attention in ("sdpa", "eager")]
    + [("gemma2", "eager")],
)
def test_sharing_a_row_is_exact(name: str, attention: str, small_model: Build) -> None:
    model = small_model(name)
    model.set_attn_implementation(attention)
    assert Policy(model).supports_packing
    assert any(micro.shares_rows for micro in micro_batches(LENGTHS, 64, True))
    padded, padded_grad = _mean_logprobs(model, together=False)
    packed, packed_grad = _mean_logprobs(model, together=True)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed, _alone(model), rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_grad, padded_grad, rtol=0, atol=1e-5)


def test_sharing_a_row_is_exact_for_tiny(tiny_model: Any) -> None:
    packed, packed_grad = _mean_logprobs(tiny_model, together=True)
    padded, padded_grad = _mean_logprobs(tiny_model, together=False)
    torch.testing.assert_close(packed, padded, rtol=0, atol=1e-5)
    torch.testing.assert_close(packed_grad, padded_grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "opt"])
def test_models_that_do_not_share_rows(name: str, small_model: Build) -> None:
    """Their attention does not look at positions; they are found out, and get one sequence a row."""
    model = small_model(name)
    policy = Policy(model)
    assert not policy.supports_packing
    ids_BT, mask_BT = _batch()
    got = token_logprobs(policy, ids_BT, mask_BT, LENGTHS, 0.8, max_tokens=64)
    torch.testing.assert_close(got, _alone(model), rtol=0, atol=1e-5)
    shared = next(micro for micro in micro_batches(LENGTHS, 64, True) if micro.shares_rows)
    with pytest.raises(ValueError, match=f"models of type '{name}' do not take shared rows"):
        forward(policy, ids_BT, mask_BT, shared)


PACKS = [("llama", True), ("gpt2", True), ("bloom", False), ("opt", False)]


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
@pytest.mark.parametrize("shrink", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "supports_packing"), PACKS)
def test_the_probe_is_sharp(name: str, supports_packing: bool, dtype: torch.dtype, shrink: int, small_model: Build) -> None:
    """Fresh weights are so small that what is seen hardly matters, and in half precision it drowns in rounding; the probe tells."""
    model = small_model(name)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.div_(shrink)
    assert Policy(model.to(dtype)).supports_packing is supports_packing


def test_the_probe_finds_positions_that_do_not_start_again(small_model: Build) -> None:
    """The texts do not see each other, but the second one is computed as if it stood later."""
    model = small_model("gpt2")
    model.transformer.wpe.register_forward_pre_hook(lambda _, inputs: (torch.arange(inputs[0].shape[1]).expand(inputs[0].shape),))
    assert not Policy(model).supports_packing


def test_rows_are_shared_where_the_model_allows_it(small_model: Build) -> None:
    """And positions are given only then: without them the attention is the plain causal one."""
    ids_BT, mask_BT = _batch()
    for name, shared in (("gpt2", True), ("opt", False)):
        policy = Policy(small_model(name))
        assert policy.supports_packing is shared
        rows: list[tuple[int, bool]] = []
        policy.module.base_model.register_forward_pre_hook(
            lambda module, args, inputs, rows=rows: rows.append((len(inputs["input_ids"]), "position_ids" in inputs)), with_kwargs=True
        )
        token_logprobs(policy, ids_BT, mask_BT, LENGTHS, 1.0, max_tokens=1000)
        token_logprobs(policy, ids_BT[:2], mask_BT[:2], torch.tensor([30, 30]), 1.0, max_tokens=1000)
        assert rows == ([(3, True), (2, False)] if shared else [(7, False), (2, False)])


def test_the_probe_is_not_misled_by_dropout(small_model: Build) -> None:
    model = small_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    policy = Policy(model)
    model.train()
    assert policy.supports_packing
    assert model.training
