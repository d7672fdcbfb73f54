"""Log-probs and entropies of masked tokens, and scores of reasonings, against one plain forward pass and against numbers done by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tether.models.head import SplitModel
from tether.models.logprobs import token_logprobs
from tether.models.scorer import PrefixScorer


def _constant_model(probabilities: list[float]) -> GPT2LMHeadModel:
    """A model that predicts the same distribution everywhere: the last norm puts out a constant, which the head turns into log p."""
    size = len(probabilities)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=size, n_embd=4, n_layer=1, n_head=1, n_positions=16, bos_token_id=0, eos_token_id=0))
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(torch.tensor([1.0, 0, 0, 0]))
        model.transformer.wte.weight[:, 0] = torch.tensor(probabilities).log()
    return model.eval()


def test_numbers_done_by_hand() -> None:
    model = SplitModel(_constant_model([0.1, 0.2, 0.3, 0.4]))
    ids = torch.tensor([[0, 3, 1, 2], [2, 2, 0, 0]])
    mask = torch.tensor([[False, True, False, True], [False, False, True, False]])
    logprobs, entropy = token_logprobs(model, ids, mask, temperature=1.0)
    assert logprobs.tolist() == pytest.approx([math.log(0.4), math.log(0.3), math.log(0.1)], abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.2798542] * 3, abs=1e-5)
    # At temperature 0.5 the probabilities are proportional to their squares: 1, 4, 9, 16 in 30.
    logprobs, entropy = token_logprobs(model, ids, mask, temperature=0.5)
    assert logprobs.tolist() == pytest.approx([math.log(16 / 30), math.log(9 / 30), math.log(1 / 30)], abs=1e-5)
    assert entropy.tolist() == pytest.approx([1.0784768] * 3, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_against_the_full_softmax(tiny: Any, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 400, (3, 24), generator=generator)
    mask = torch.rand(3, 24, generator=generator) < 0.4
    mask[:, 0] = False
    with torch.inference_mode():
        got, entropy = token_logprobs(SplitModel(tiny.model), ids, mask, temperature)
        full = torch.log_softmax(tiny.model(input_ids=ids, use_cache=False).logits / temperature, dim=-1)
    places = mask.nonzero().tolist()
    assert got.tolist() == pytest.approx([float(full[b, t - 1, ids[b, t]]) for b, t in places], abs=1e-4)
    assert entropy.tolist() == pytest.approx([float(-(full[b, t - 1].exp() * full[b, t - 1]).sum()) for b, t in places], abs=1e-4)


def test_padding_on_the_right_changes_nothing(tiny: Any) -> None:
    ids = torch.arange(20, 40)[None]
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[0, 0] = False
    padded = torch.cat([ids, torch.full((1, 9), 7)], dim=1)
    with torch.inference_mode():
        alone, _ = token_logprobs(SplitModel(tiny.model), ids, mask, 1.0)
        inside, _ = token_logprobs(SplitModel(tiny.model), padded, torch.cat([mask, torch.zeros(1, 9, dtype=torch.bool)], dim=1), 1.0)
    torch.testing.assert_close(alone, inside, rtol=0, atol=1e-4)


def test_gradients_flow(tiny_model: Any) -> None:
    mask = torch.tensor([[False, True, True]])
    logprobs, _ = token_logprobs(SplitModel(tiny_model), torch.tensor([[5, 6, 7]]), mask, 1.0)
    logprobs.sum().backward()
    assert float(tiny_model.get_input_embeddings().weight.grad.abs().sum()) > 0


def test_the_first_token_cannot_be_selected(tiny: Any) -> None:
    with pytest.raises(ValueError, match="first token of a row, which nothing predicts"):
        token_logprobs(SplitModel(tiny.model), torch.tensor([[1, 2]]), torch.tensor([[True, True]]), 1.0)


@pytest.mark.parametrize("tokens_per_call", [8192, 12, 1])
def test_scores_equal_one_forward_per_pair(tiny: Any, tokens_per_call: int) -> None:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 400, (n,), generator=generator).tolist() for n in (1, 30)]
    reasonings = [torch.randint(0, 400, (n,), generator=generator).tolist() for n in (6, 1, 11, 3, 1)]
    scorer = PrefixScorer(tiny.model, tokens_per_call)
    for prompt in prompts:
        want = []
        for reasoning in reasonings:
            with torch.inference_mode():
                logits = tiny.model(input_ids=torch.tensor([prompt + reasoning]), use_cache=False).logits[0].double()
            table = torch.log_softmax(logits, dim=-1)
            want.append(sum(float(table[len(prompt) - 1 + t, token]) for t, token in enumerate(reasoning)))
        got = scorer.score_many(prompt, reasonings)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-4)
        assert scorer.score(prompt, reasonings[2]) == pytest.approx(want[2], abs=2e-4)


def test_a_score_done_by_hand() -> None:
    scorer = PrefixScorer(_constant_model([0.1, 0.2, 0.3, 0.4]))
    assert scorer.score_many([0], [[3, 1], [2]]).tolist() == pytest.approx([math.log(0.08), math.log(0.3)], abs=1e-5)
