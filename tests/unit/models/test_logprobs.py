"""Log-probs and entropies of masked tokens, and scores of reasonings, against one plain forward pass and against numbers done by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from tether.models.logprobs import forward, logprobs_and_entropy, rows_at, token_logprobs
from tether.models.packing import micro_batches
from tether.models.policy import Policy
from tether.models.scoring.local import PrefixScorer

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def _constant_model(probabilities: list[float]) -> GPT2LMHeadModel:
    """A model that predicts the same distribution everywhere: the last norm puts out a constant, which the head turns into log p."""
    size = len(probabilities)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=4, n_layer=1, n_head=1, n_positions=16, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0, 0, 0]))
        model.transformer.wte.weight[:, 0] = torch.tensor(probabilities).log()
    return model.eval().to(DEVICE)


def _whole(policy: Policy, ids_BT: Tensor, mask_BT: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of a batch of full rows in one pass."""
    (micro,) = micro_batches(torch.full((len(ids_BT),), ids_BT.shape[1]), ids_BT.numel(), together=True)
    return logprobs_and_entropy(policy, *forward(policy, ids_BT, mask_BT, micro), temperature)


def test_numbers_done_by_hand() -> None:
    model = Policy(_constant_model([0.1, 0.2, 0.3, 0.4]))
    ids = tensor([[0, 3, 1, 2], [2, 2, 0, 0]])
    mask = tensor([[False, True, False, True], [False, False, True, False]])
    logprobs, entropy = _whole(model, ids, mask, temperature=1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.4), math.log(0.3), math.log(0.1)], abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.2798542] * 3, abs=1e-5)
    # At temperature 0.5 the probabilities are proportional to their squares: 1, 4, 9, 16 in 30.
    logprobs, entropy = _whole(model, ids, mask, temperature=0.5)
    assert logprobs.tolist() == pytest.approx([math.log(16 / 30), math.log(9 / 30), math.log(1 / 30)], abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.0784768] * 3, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_the_full_softmax(tiny_on_device: Any, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 400, (3, 24), generator=generator).to(DEVICE)
    mask = torch.rand(3, 24, generator=generator).to(DEVICE) < 0.4
    mask[:, 0] = False
    with torch.inference_mode():
        got, entropy = _whole(Policy(tiny_on_device.model), ids, mask, temperature)
        full = torch.log_softmax(tiny_on_device.model(input_ids=ids, use_cache=False).logits / temperature, dim=-1)
    places = mask.nonzero().tolist()
    assert got.tolist() == pytest.approx([float(full[b, t - 1, ids[b, t]]) for b, t in places], abs=1e-4)
    assert entropy.tolist() == pytest.approx([float(-(full[b, t - 1].exp() * full[b, t - 1]).sum()) for b, t in places], abs=1e-4)


@pytest.mark.parametrize("max_tokens", [1, 20, 1000])
def test_a_whole_batch_comes_back_in_row_order(tiny_on_device: Any, max_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    lengths = tensor([4, 11, 2, 7])
    ids = torch.randint(0, 400, (4, 13), generator=generator).to(DEVICE)
    mask = (tensor(range(13)) < lengths[:, None]) & (tensor(range(13)) > 0)
    mask[1, 3:6] = False
    got = token_logprobs(Policy(tiny_on_device.model), ids, mask, lengths, 0.7, max_tokens=max_tokens)
    want = []
    for row, length in enumerate(lengths.tolist()):
        with torch.no_grad():
            table = (tiny_on_device.model(input_ids=ids[row : row + 1, :length]).logits[0] / 0.7).log_softmax(-1)
        want += [float(table[t - 1, ids[row, t]]) for t in mask[row].nonzero()[:, 0].tolist()]
    assert got.tolist() == pytest.approx(want, rel=2e-6, abs=1e-5)
    assert not got.requires_grad


def test_a_micro_batch_lines_up_with_its_rows(tiny_on_device: Any) -> None:
    """Its features and targets stand in the order of the rows of the batch, not of their places."""
    ids = tensor([[5, 6, 0, 0, 0], [7, 8, 9, 10, 11], [12, 13, 14, 0, 0]])
    lengths = tensor([2, 5, 3])
    mask = (tensor(range(5)) < lengths[:, None]) & (tensor(range(5)) > 0)
    policy = Policy(tiny_on_device.model)
    (micro,) = micro_batches(lengths, 10, together=True)
    assert [place[1:3] for place in micro.slices] == [(1, 3), (0, 0), (1, 0)]
    with torch.inference_mode():
        selected = forward(policy, ids, mask, micro)
        alone = [policy.features(input_ids=row[None, : length - 1])[0] for row, length in zip(ids, lengths.tolist(), strict=True)]
    assert selected.targets_N.tolist() == [6, 8, 9, 10, 11, 13, 14]
    torch.testing.assert_close(selected.features_ND, torch.cat(alone), rtol=0, atol=1e-5)
    assert torch.equal(selected.targets_N, ids[micro.index_M][mask[micro.index_M]])


def test_a_micro_batch_without_selected_tokens(tiny_on_device: Any) -> None:
    policy = Policy(tiny_on_device.model)
    logprobs, entropy = _whole(policy, tensor([[5, 6, 7]]), tensor([[False] * 3]), 1.0)
    assert logprobs.shape == entropy.shape == (0,)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_numbers_are_float32_whatever_the_model_computes_in(small_model: Any) -> None:
    ids, mask = tensor([[5, 6, 7]]), tensor([[False, True, True]])
    exact, _ = _whole(Policy(small_model("llama").to(DEVICE)), ids, mask, 1.0)
    half = Policy(small_model("llama").to(DEVICE, torch.bfloat16))
    logprobs, entropy = _whole(half, ids, mask, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert half.supports_packing
    torch.testing.assert_close(logprobs, exact, rtol=0.05, atol=0.05)
    assert token_logprobs(half, ids, mask, tensor([3]), 1.0, max_tokens=9).dtype == torch.float32


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # of torch, where the first product of a process is in a backward pass
def test_gradients_flow(tiny_model: Any) -> None:
    tiny_model.to(DEVICE)
    mask = tensor([[False, True, True]])
    logprobs, _ = _whole(Policy(tiny_model), tensor([[5, 6, 7]]), mask, 1.0)
    logprobs.sum().backward()
    assert float(tiny_model.get_input_embeddings().weight.grad.abs().sum()) > 0


def test_the_gradient_of_a_row_that_is_taken_twice_by_hand() -> None:
    states = tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).requires_grad_()
    taken = rows_at(states, tensor([2, 0, 2]))
    assert taken.tolist() == [[5.0, 6.0], [1.0, 2.0], [5.0, 6.0]]
    (taken * tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])).sum().backward()
    assert states.grad is not None and states.grad.tolist() == [[2.0, 20.0], [0.0, 0.0], [5.0, 50.0]]


@pytest.mark.usefixtures("two_threads")
def test_gradients_of_a_row_that_is_taken_often_are_summed_in_one_order() -> None:
    """A shared prompt's last token is taken once for each of its responses. Torch's own backward pass of an index differs between half of such calls."""
    source = torch.Generator().manual_seed(0)
    states = torch.randn(3000, 96, generator=source).to(DEVICE).requires_grad_()
    index = torch.cat([torch.full((600,), 7), torch.randint(3000, (1900,), generator=source)]).to(DEVICE)
    weights = torch.randn(2500, 96, generator=source).to(DEVICE)
    grads = [torch.autograd.grad(rows_at(states, index), states, weights)[0] for _ in range(40)]
    assert all(torch.equal(grads[0], other) for other in grads[1:])


def test_the_first_token_cannot_be_selected(tiny_on_device: Any) -> None:
    with pytest.raises(ValueError, match="first token of a row, which nothing predicts"):
        _whole(Policy(tiny_on_device.model), tensor([[1, 2]]), tensor([[True, True]]), 1.0)


def test_padding_cannot_be_selected(tiny_on_device: Any) -> None:
    ids, mask = tensor([[1, 2, 3]]), tensor([[False, True, True]])
    with pytest.raises(ValueError, match="the mask selects padding"):
        token_logprobs(Policy(tiny_on_device.model), ids, mask, tensor([2]), 1.0, max_tokens=9)


@pytest.mark.parametrize("tokens_per_call", [8192, 12, 1])
def test_scores_equal_one_forward_per_pair(tiny_on_device: Any, tokens_per_call: int) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 400, (n,), generator=generator).tolist() for n in (1, 30)]
    reasonings = [torch.randint(0, 400, (n,), generator=generator).tolist() for n in (6, 1, 11, 3, 1)]
    scorer = PrefixScorer(tiny_on_device.model, tokens_per_call)
    for prompt in prompts:
        want = []
        for reasoning in reasonings:
            with torch.inference_mode():
                logits = tiny_on_device.model(input_ids=tensor([prompt + reasoning]), use_cache=False).logits[0].double()
            table = torch.log_softmax(logits, dim=-1)
            want.append(sum(float(table[len(prompt) - 1 + t, token]) for t, token in enumerate(reasoning)))
        got = scorer.score_many(prompt, reasonings)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
        assert scorer.score(prompt, reasonings[2]) == pytest.approx(want[2], abs=2e-4)


def test_a_score_done_by_hand() -> None:
    scorer = PrefixScorer(_constant_model([0.1, 0.2, 0.3, 0.4]))
    assert scorer.score_many([0], [[3, 1], [2]]).tolist() == pytest.approx([math.log(0.08), math.log(0.3)], abs=1e-5)
