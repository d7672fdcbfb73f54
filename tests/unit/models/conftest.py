"""Small random models of several architectures, for tests of what must hold for any of them; more threads than one."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

WORDS = 97
NO_MARKERS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
LLAMA_LIKE: dict[str, Any] = {
    **NO_MARKERS,
    "vocab_size": WORDS,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": lambda **more: hf.LlamaConfig(**{**LLAMA_LIKE, **more}),
    "qwen2": lambda **more: hf.Qwen2Config(**{**LLAMA_LIKE, **more}),
    "gemma": lambda **more: hf.GemmaConfig(**{**LLAMA_LIKE, **more}, head_dim=8),
    "gemma2": lambda **more: hf.Gemma2Config(**{**LLAMA_LIKE, **more}, head_dim=8, sliding_window=64),
    "mistral": lambda **more: hf.MistralConfig(**{**LLAMA_LIKE, **more}, sliding_window=7),
    "gpt2": lambda **more: hf.GPT2Config(
        **{"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, **NO_MARKERS, **more}
    ),
    "bloom": lambda **more: hf.BloomConfig(vocab_size=WORDS, hidden_size=32, n_layer=2, n_head=4, **NO_MARKERS, **more),
    "opt": lambda **more: hf.OPTConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32, **more
    ),
}


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Tests have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_model() -> Callable[..., Any]:
    """`small_model("qwen2", dropout=...)`: weights large enough that who sees whom changes every number."""

    def build(name: str, **config: Any) -> Any:
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(CONFIGS[name](**config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(8)
        return model

    return build
