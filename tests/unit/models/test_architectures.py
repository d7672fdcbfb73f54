"""Any causal language model is scored exactly: the cached way equals one forward per pair, and what takes no cache is scored the long way.

The models are small and randomly initialised; the reference is the model's own log-softmax over prompt and reasoning in one piece.
"""

from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import tether
from tether.models.policy import Policy
from tether.models.scoring.local import PrefixScorer
from tether.rollout.engines.native import NativeEngine

WORDS = 97
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
LLAMA_LIKE = {**SIZES, "vocab_size": WORDS, "intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 128}
NO_MARKERS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
CONFIGS = {
    "gpt2": lambda: hf.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=2, n_head=4, n_positions=128, **NO_MARKERS),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**{**LLAMA_LIKE, **NO_MARKERS}),
    "qwen2": lambda: hf.Qwen2Config(**{**LLAMA_LIKE, **NO_MARKERS}),
    "qwen3": lambda: hf.Qwen3Config(**{**LLAMA_LIKE, **NO_MARKERS}, head_dim=8),
    "gemma2": lambda: hf.Gemma2Config(**{**LLAMA_LIKE, **NO_MARKERS}, head_dim=8, sliding_window=64),
    "granite": lambda: hf.GraniteConfig(**{**LLAMA_LIKE, **NO_MARKERS}, logits_scaling=4.0),
    "bloom": lambda: hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, **NO_MARKERS),
}
WAYS = {"gemma2": "copied", "bloom": "whole"}
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13], [90, 1, 2, 3]]
REASONINGS = [[4], [20, 21, 22, 23, 24], [30, 31], [40, 41, 42]]


def _model(name: str) -> Any:
    torch.manual_seed(0)
    return hf.AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()


def _one_by_one(model: Any) -> np.ndarray:
    scores = np.zeros((len(REASONINGS), len(PROMPTS)))
    for n, reasoning in enumerate(REASONINGS):
        for j, prompt in enumerate(PROMPTS):
            with torch.no_grad():
                logprobs = model(torch.tensor([prompt + reasoning])).logits.double().log_softmax(-1)[0]
            scores[n, j] = sum(float(logprobs[len(prompt) - 1 + t, token]) for t, token in enumerate(reasoning))
    return scores


@pytest.mark.parametrize("name", CONFIGS)
def test_scores_are_exact(name: str) -> None:
    model = _model(name)
    np.testing.assert_allclose(tether.cross_score(model, PROMPTS, REASONINGS), _one_by_one(model), atol=1e-5)
    assert PrefixScorer(model).backend == WAYS.get(name, "shared")


def test_dropout_does_not_enter_the_scores() -> None:
    config = CONFIGS["gpt2"]()
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.5
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config).train()
    scores = tether.cross_score(model, PROMPTS, REASONINGS)
    assert model.training
    np.testing.assert_allclose(scores, _one_by_one(model.eval()), atol=1e-5)


def test_the_engine_refuses_what_it_cannot_decode(tiny: Any) -> None:
    with pytest.raises(tether.BadInput, match="models of type 'bloom' cannot be decoded"):
        NativeEngine(Policy(_model("bloom"), tiny.tokenizer))
