"""`tether doctor --model` says what computes a model, and why something slow is used."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tether.cli.main import main

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 4096, "head_dim": 8,
}  # fmt: skip


def _doctor(*words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    with pytest.raises(SystemExit) as caught:
        main(["doctor", *words, "--set", "model.device=cpu"])
    assert caught.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_a_fast_model_takes_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    found = [line for line in _doctor("--model", "tiny", capsys=capsys) if "computing tiny" in line]
    assert found == [
        "ok   computing tiny: fast path (llama, float32 on cpu): decoder contiguous, learner attention flash kernel of torch, "
        "scorer shared, head linear, fused log-probs"
    ]


def test_slow_parts_are_notes_with_reasons(tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    hf.AutoModelForCausalLM.from_config(hf.GemmaConfig(**SIZES, vocab_size=len(tiny.tokenizer))).save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    found = [line for line in _doctor("--model", str(tmp_path), capsys=capsys) if "computing" in line]
    assert found[0].startswith(f"ok   computing {tmp_path}: partly slow path (gemma, float32 on cpu): decoder generic")
    assert all(line.startswith(f"note computing {tmp_path}: ") for line in found[1:]) and len(found) == 3
    assert found[1].endswith("decoder is slow (generic): the last norm (GemmaRMSNorm) is not a root-mean-square norm")
