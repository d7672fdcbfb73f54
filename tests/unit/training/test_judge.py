"""Who judges: scores are those of the model that was asked for, whatever the policy has become; nothing is loaded where nothing is measured."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tether.core.config import validate
from tether.core.errors import BadInput, ModelUnavailable
from tether.diagnostics.cross_score import cross_score
from tether.models.load import load_model
from tether.models.lora import add_lora
from tether.training import judge
from tether.training.judge import build_scorer
from tether.training.settings import RunSettings

PROMPTS = ["user: P _ G\n<think>", "user: _ _ O G, go on\n<think>"]
REASONINGS = ["I go right.", "The hole is left of me", "up"]


def _settings(scorer: str, every: int = 1, model: str = "tiny") -> RunSettings:
    chosen = {"scorer": scorer, "every": every}
    return validate(RunSettings, {"env": {"name": "frozen_lake"}, "model": {"name": model, "device": "cpu"}, "diagnosis": chosen})


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


def _judged(settings: RunSettings, model: Any, tokenizer: Any) -> np.ndarray:
    return cross_score(build_scorer(settings, model, tokenizer), *_encoded(tokenizer))


def _train(model: Any) -> None:
    """Stand-in for updates: what is trainable moves."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.add_(0.03 * torch.randn_like(parameter))


def test_the_policy_judges_as_it_is_now(tiny: Any, tiny_model: Any) -> None:
    before = _by_hand(tiny_model, tiny.tokenizer)
    scorer = build_scorer(_settings("policy"), tiny_model, tiny.tokenizer)
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(before, rel=1e-4)
    _train(tiny_model)
    now = _by_hand(tiny_model, tiny.tokenizer)
    assert np.abs(now - before).max() > 1
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(now, rel=1e-4)


def test_the_reference_is_the_model_the_run_started_from(tiny: Any, tiny_model: Any) -> None:
    """Asked for after training, as a resumed run does, and before."""
    start = _by_hand(tiny_model, tiny.tokenizer)
    early = build_scorer(_settings("reference"), tiny_model, tiny.tokenizer)
    _train(tiny_model)
    for scorer in (early, build_scorer(_settings("reference"), tiny_model, tiny.tokenizer)):
        assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(start, rel=1e-4)


def test_the_reference_of_adapters_is_the_model_without_them(tiny: Any, tiny_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.setattr(judge, "make_scorer", lambda *_, **__: pytest.fail("no second copy is needed"))
    add_lora(tiny_model, 2, 16)
    start = _by_hand(tiny.model, tiny.tokenizer)
    scorer = build_scorer(_settings("reference"), tiny_model, tiny.tokenizer)
    _train(tiny_model)
    trained = _by_hand(tiny_model, tiny.tokenizer)
    assert np.abs(trained - start).max() > 1
    assert cross_score(scorer, *_encoded(tiny.tokenizer)) == pytest.approx(start, rel=1e-4)
    prompts, reasonings = _encoded(tiny.tokenizer)
    assert scorer.score(prompts[1], reasonings[2]) == pytest.approx(start[2, 1], rel=1e-4)
    assert _by_hand(tiny_model, tiny.tokenizer) == pytest.approx(trained, rel=1e-6), "the adapters are on again"
    assert all(p.requires_grad == ("lora_" in name) for name, p in tiny_model.named_parameters())


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
    assert _judged(_settings(name), tiny_model, tiny.tokenizer) == pytest.approx(expected, rel=1e-4)
    assert np.abs(expected - _by_hand(tiny_model, tiny.tokenizer)).max() > 1


def test_a_third_model_with_tokens_of_its_own(tmp_path: Path, tiny: Any) -> None:
    """Its scores are those of the text as it reads it."""
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ", "Ċ"]
    words = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    name = _third(tmp_path / "third", PreTrainedTokenizerFast(tokenizer_object=words))
    other = load_model(name, device="cpu")
    assert _judged(_settings(name), tiny.model, tiny.tokenizer) == pytest.approx(_by_hand(other.model, other.tokenizer), rel=1e-4)


def test_a_judge_computes_where_and_in_what_the_policy_does(tmp_path: Path, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, dict[str, str]]] = []
    real = judge.make_scorer

    def make(name: str, **how: str) -> Any:
        asked.append((name, how))
        return real(name, **how)

    monkeypatch.setattr(judge, "make_scorer", make)
    name = _third(tmp_path / "third", tiny.tokenizer)
    half = load_model(name, device="cpu", dtype="bfloat16").model
    assert build_scorer(_settings("reference", model=name), half, tiny.tokenizer).precision == "bfloat16"
    assert build_scorer(_settings("reference", model=name), tiny.model, tiny.tokenizer).precision == "float32"
    build_scorer(_settings("http://localhost:9/v1#judge"), tiny.model, tiny.tokenizer)
    cpu = {"device": "cpu"}
    assert asked == [(name, {**cpu, "dtype": "bfloat16"}), (name, {**cpu, "dtype": "float32"}), ("http://localhost:9/v1#judge", {})]


def test_a_judge_that_cannot_be_had(tmp_path: Path, tiny: Any) -> None:
    with pytest.raises(
        ModelUnavailable, match=r"^diagnosis\.scorer: Hugging Face model 'nobody/none' is neither cached here nor reachable"
    ):
        build_scorer(_settings("nobody/none"), tiny.model, tiny.tokenizer)
    with pytest.raises(ModelUnavailable, match=r"^diagnosis\.scorer: "):
        build_scorer(_settings(str(tmp_path)), tiny.model, tiny.tokenizer)
    with pytest.raises(BadInput, match=r"^diagnosis\.scorer: unknown model 'polisy': .*; or take policy or reference$"):
        build_scorer(_settings("polisy"), tiny.model, tiny.tokenizer)


def test_nothing_is_loaded_where_nothing_is_measured(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge, "make_scorer", lambda *_, **__: pytest.fail("loaded for nothing"))
    for name in ("nobody/none", "reference", "policy"):
        assert build_scorer(_settings(name, every=0), tiny.model, tiny.tokenizer).score([5, 6], [7]) < 0
    assert build_scorer(_settings("policy"), tiny.model, tiny.tokenizer).score([5, 6], [7]) < 0
