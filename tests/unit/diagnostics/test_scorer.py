"""The scorer of a run: scores are those of the model that was named, whatever the policy has become."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.core.errors import BadInput, ModelUnavailable
from tether.diagnostics import scorer as scorer_module
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.scorer import build_scorer
from tether.models.load import load_model
from tether.models.lora import add_lora, save_model
from tether.models.policy import Policy

PROMPTS = ["user: P _ G\n<think>", "user: _ _ O G, go on\n<think>"]
REASONINGS = ["I go right.", "The hole is left of me", "up"]


def _scorer(name: str, model: Any, tokenizer: Any, start: str = "tiny") -> Any:
    return build_scorer(name, Policy(model), start, tokenizer=tokenizer)


def _encoded(tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    encoded = [[tokenizer.encode(text, add_special_tokens=False) for text in texts] for texts in (PROMPTS, REASONINGS)]
    return encoded[0], encoded[1]


def _by_hand(model: Any, tokenizer: Any) -> np.ndarray:
    """log p(z | x) from one plain forward pass per pair."""
    prompts, reasonings = _encoded(tokenizer)
    table = np.zeros((len(reasonings), len(prompts)))
    for column, prompt in enumerate(prompts):
        for row, reasoning in enumerate(reasonings):
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([prompt + reasoning])).logits[0].double()
            logprobs = torch.log_softmax(logits, dim=-1)
            table[row, column] = sum(float(logprobs[len(prompt) + place - 1, token]) for place, token in enumerate(reasoning))
    return table


def _scored(name: str, model: Any, tokenizer: Any) -> np.ndarray:
    return cross_score(_scorer(name, model, tokenizer), *_encoded(tokenizer))


def _train(model: Any) -> None:
    """Stand-in for updates: what is trainable moves."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.add_(0.03 * torch.randn_like(parameter))


def test_the_policy_scores_as_it_is_now(tiny: Any, tiny_model: Any) -> None:
    before = _by_hand(tiny_model, tiny.tokenizer)
    scorer = _scorer("policy", tiny_model, tiny.tokenizer)
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(before, rel=1e-4)
    _train(tiny_model)
    now = _by_hand(tiny_model, tiny.tokenizer)
    assert np.abs(now - before).max() > 1
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(now, rel=1e-4)


def test_the_reference_is_the_model_the_run_started_from(tiny: Any, tiny_model: Any) -> None:
    """Asked for after training, as a resumed run does, and before."""
    start = _by_hand(tiny_model, tiny.tokenizer)
    early = _scorer("reference", tiny_model, tiny.tokenizer)
    _train(tiny_model)
    for scorer in (early, _scorer("reference", tiny_model, tiny.tokenizer)):
        assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(start, rel=1e-4)


def test_the_reference_of_adapters_is_the_model_without_them(tiny: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(scorer_module, "make_scorer", lambda *_, **__: pytest.fail("no second copy is needed"))
    add_lora(tiny_model, 2, 16)
    start = _by_hand(tiny.model, tiny.tokenizer)
    scorer = _scorer("reference", tiny_model, tiny.tokenizer)
    _train(tiny_model)
    trained = _by_hand(tiny_model, tiny.tokenizer)
    assert np.abs(trained - start).max() > 1
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(start, rel=1e-4)
    prompts, reasonings = _encoded(tiny.tokenizer)
    assert scorer.score_many(prompts[1], reasonings[2:3]) == pytest.approx(start[2:3, 1], rel=1e-4)
    assert _by_hand(tiny_model, tiny.tokenizer) == pytest.approx(trained, rel=1e-6), "the adapters are on again"
    assert all(p.requires_grad == ("lora_" in name) for name, p in tiny_model.named_parameters())


def test_the_reference_of_a_run_that_starts_from_adapters_is_the_model_with_them(tiny: Any, tiny_model: Any, tmp_path: Path) -> None:
    add_lora(tiny_model, 2, 16)
    _train(tiny_model)
    save_model(tiny_model, tmp_path)
    start = _by_hand(tiny_model, tiny.tokenizer)
    assert np.abs(start - _by_hand(tiny.model, tiny.tokenizer)).max() > 1
    _train(tiny_model)
    scorer = _scorer("reference", tiny_model, tiny.tokenizer, start=str(tmp_path))
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(start, rel=1e-4)


def _third(folder: Path, tokenizer: Any) -> str:
    torch.manual_seed(3)
    size: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    ids: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, initializer_range=1.0, **size, **ids))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_third_model_with_the_same_tokens(tmp_path: Path, tiny: Any, tiny_model: Any) -> None:
    name = _third(tmp_path / "third", tiny.tokenizer)
    expected = _by_hand(load_model(name, device="cpu").model, tiny.tokenizer)
    _train(tiny_model)
    assert _scored(name, tiny_model, tiny.tokenizer) == pytest.approx(expected, rel=1e-4)
    assert np.abs(expected - _by_hand(tiny_model, tiny.tokenizer)).max() > 1


def _letters() -> Any:
    """A tokenizer of single letters."""
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=words)


def test_a_third_model_with_tokens_of_its_own(tmp_path: Path, tiny: Any) -> None:
    """Its scores are those of the text as it reads it."""
    name = _third(tmp_path / "third", _letters())
    other = load_model(name, device="cpu")
    assert _scored(name, tiny.model, tiny.tokenizer) == pytest.approx(_by_hand(other.model, other.tokenizer), rel=1e-4)


def test_a_scorer_computes_where_and_in_what_the_policy_does(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []
    real = scorer_module.make_scorer

    def make(name: str, **how: str) -> Any:
        asked.append((name, how))
        return real(name, **how)

    monkeypatch.setattr(scorer_module, "make_scorer", make)
    name = _third(tmp_path / "third", tiny.tokenizer)
    half = load_model(name, device="cpu", dtype="bfloat16").model
    assert _scorer("reference", half, tiny.tokenizer, start=name).precision == "bfloat16"
    assert _scorer("reference", tiny.model, tiny.tokenizer, start=name).precision == "float32"
    _scorer("http://localhost:9/v1#judge", tiny.model, tiny.tokenizer)
    cpu = {"device": "cpu"}
    assert asked == [(name, {**cpu, "dtype": "bfloat16"}), (name, {**cpu, "dtype": "float32"}), ("http://localhost:9/v1#judge", {})]


def test_a_scorer_that_is_not_available(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(
        ModelUnavailable, match=r"^diagnosis\.scorer: Hugging Face model 'nobody/none' is neither cached here nor reachable"
    ):
        _scorer("nobody/none", tiny.model, tiny.tokenizer)
    with pytest.raises(ModelUnavailable, match=r"^diagnosis\.scorer: "):
        _scorer(str(tmp_path), tiny.model, tiny.tokenizer)
    with pytest.raises(BadInput, match=r"^diagnosis\.scorer: unknown model 'polisy': .*; or take policy or reference$"):
        _scorer("polisy", tiny.model, tiny.tokenizer)


def test_the_tokenizer_of_the_policy_is_the_default(tmp_path: Path, tiny: Any) -> None:
    name = _third(tmp_path / "third", _letters())
    given = _scored(name, tiny.model, tiny.tokenizer)
    found = cross_score(build_scorer(name, Policy(tiny.model, tiny.tokenizer), "tiny"), *_encoded(tiny.tokenizer))
    assert (found == given).all()
