"""Adapters: they start from the very model, only they are trained, every part of Tether sees them, and they are saved and merged exactly."""

import copy
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tether.core.errors import BadInput, MissingDependency, ModelUnavailable
from tether.core.protocols import Sampling
from tether.core.types import Completion
from tether.models import load, lora, reference
from tether.models.load import load_model
from tether.models.logprobs import token_logprobs
from tether.models.lora import add_lora, is_lora, merged, save_model, without_adapters
from tether.models.policy import Policy
from tether.models.scoring.local import PrefixScorer
from tether.rollout.engines.native import NativeEngine

IDS = torch.arange(20, 44).view(2, 12)
LLAMA_LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
Build = Callable[..., Any]


def _logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def _train(model: Any) -> None:
    """Stand-in for training: adapters that change what the model says."""
    torch.manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)


@pytest.fixture
def trained(tiny_model: Any) -> Any:
    add_lora(tiny_model, 4, 8, seed=3)
    _train(tiny_model)
    return tiny_model


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma"])
def test_training_starts_from_the_very_model(name: str, small_model: Build) -> None:
    model = small_model(name)
    before = _logits(model)
    assert not is_lora(model)
    add_lora(model, 2, 4)
    assert is_lora(model) and not model.training
    assert torch.equal(_logits(model), before)
    _train(model)
    assert (_logits(model) - before).abs().max() > 1e-3


def test_the_arithmetic_of_one_layer(small_model: Build) -> None:
    """y = W x + alpha / rank * B (A x)."""
    model = small_model("llama")
    add_lora(model, 2, 6, ["down_proj"])
    _train(model)
    layer = model.model.layers[1].mlp.down_proj
    x = torch.linspace(-1, 1, 48)
    want = layer.base_layer.weight @ x + 3.0 * layer.lora_B["default"].weight @ (layer.lora_A["default"].weight @ x)
    torch.testing.assert_close(layer(x), want, rtol=0, atol=1e-5)


def test_only_adapters_are_trained_and_every_linear_layer_has_one(tiny_model: Any) -> None:
    add_lora(tiny_model, 4, 8)
    trainable = [name for name, parameter in tiny_model.named_parameters() if parameter.requires_grad]
    assert trainable and all(".lora_A." in name or ".lora_B." in name for name in trainable)
    layers = {name.partition(".lora_")[0] for name in trainable}
    assert {layer.rpartition(".")[2] for layer in layers} == LLAMA_LINEAR
    assert len(layers) == 7 * tiny_model.config.num_hidden_layers  # the language head has none
    tiny_model(input_ids=IDS).logits.sum().backward()
    assert all((parameter.grad is not None) == parameter.requires_grad for parameter in tiny_model.parameters())


def test_chosen_targets(tiny_model: Any) -> None:
    add_lora(tiny_model, 4, 8, ["q_proj", "v_proj"])
    layers = {name.partition(".lora_")[0].rpartition(".")[2] for name, p in tiny_model.named_parameters() if p.requires_grad}
    assert layers == {"q_proj", "v_proj"}


def test_the_seed_decides_the_start(tiny: Any) -> None:
    models = [copy.deepcopy(tiny.model) for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(id(model) % 1000)  # whatever was drawn before does not matter
        before = torch.random.get_rng_state()
        add_lora(model, 4, 8, seed=seed)
        assert torch.equal(torch.random.get_rng_state(), before)
    first, again, other = ({name: p for name, p in model.named_parameters() if "lora_" in name} for model in models)
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    assert all(not first[name].any() for name in first if "lora_B" in name)
    shapes = {tuple(first[name].shape) for name in drawn}
    assert len({first[name].flatten()[0].item() for name in drawn}) == len(drawn) > len(shapes)  # no two layers start alike
    # peft's own start: uniform on [-1/sqrt(width), 1/sqrt(width)], width 192 here
    bound = 192**-0.5
    values = first["model.layers.0.self_attn.q_proj.lora_A.default.weight"]
    assert 0.95 * bound < float(values.detach().abs().max()) <= bound


def test_adapters_of_a_half_precision_model_are_float32(tiny_model: Any) -> None:
    add_lora(tiny_model.to(torch.bfloat16), 4, 8)
    assert {p.dtype for p in tiny_model.parameters() if p.requires_grad} == {torch.float32}
    assert {p.dtype for p in tiny_model.parameters() if not p.requires_grad} == {torch.bfloat16}


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 says so, once
def test_a_half_precision_model_with_adapters_computes_and_decodes(small_model: Build, tiny: Any) -> None:
    model = small_model("llama").to(torch.bfloat16)
    add_lora(model, 4, 8)
    _train(model)
    assert _logits(model).dtype == torch.bfloat16
    NativeEngine(Policy(model, tiny.tokenizer))  # refuses what it cannot decode


class OneTurn:
    """A dialogue of one response."""

    prefix_key = 0
    closing_tags = ("</answer>",)

    def __init__(self, prompt: tuple[int, ...], seed: int) -> None:
        self.prompt = prompt
        self.uniforms = np.random.Generator(np.random.PCG64(seed))
        self.completion: Completion | None = None

    def begin(self) -> tuple[int, ...]:
        return self.prompt

    def receive(self, completion: Completion) -> None:
        self.completion = completion


def test_sampling_learning_and_scoring_see_the_same_model(trained: Any, tiny: Any, chat: Any) -> None:
    talks = [OneTurn(chat.first_prompt("Be brief.", "Where do you go?"), seed) for seed in range(4)]
    NativeEngine(Policy(trained, tiny.tokenizer)).run(talks, Sampling(temperature=0.9, max_tokens=30))
    policy, plain, scorer = Policy(trained), Policy(tiny.model), PrefixScorer(trained)
    assert policy.separable_head and policy.supports_packing
    for talk in talks:
        assert talk.completion is not None
        ids = torch.tensor([[*talk.prompt, *talk.completion.token_ids]])
        mask = (torch.arange(ids.shape[1]) >= len(talk.prompt))[None]
        lengths = torch.tensor([ids.shape[1]])
        sampled = torch.tensor(talk.completion.logprobs)
        torch.testing.assert_close(token_logprobs(policy, ids, mask, lengths, 0.9, max_tokens=999), sampled, rtol=0, atol=1e-5)
        assert (token_logprobs(plain, ids, mask, lengths, 0.9, max_tokens=999) - sampled).abs().max() > 0.01
        score = scorer.score(talk.prompt, talk.completion.token_ids)
        assert score == pytest.approx(float(token_logprobs(policy, ids, mask, lengths, 1.0, max_tokens=999).sum()), abs=1e-3)


def test_without_adapters_is_the_model_before(trained: Any, tiny: Any) -> None:
    moved = _logits(trained)
    trainable = [p.requires_grad for p in trained.parameters()]
    with without_adapters(trained):
        assert torch.equal(_logits(trained), _logits(tiny.model))
    assert torch.equal(_logits(trained), moved)
    assert [p.requires_grad for p in trained.parameters()] == trainable
    with pytest.raises(KeyError), without_adapters(trained):
        raise KeyError("trouble")
    assert torch.equal(_logits(trained), moved)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merged_is_a_plain_model(name: str, small_model: Build, tmp_path: Path) -> None:
    model = small_model(name)
    kinds = [type(module) for module in model.modules()]
    add_lora(model, 2, 4)
    _train(model)
    before = _logits(model)
    plain = merged(model)
    assert not is_lora(plain) and is_lora(model)
    assert [type(module) for module in plain.modules()] == kinds
    assert all(parameter.requires_grad for parameter in plain.parameters())
    torch.testing.assert_close(_logits(plain), before, rtol=0, atol=1e-4)
    assert torch.equal(_logits(model), before)  # the original is untouched
    save_model(plain, tmp_path)
    assert (tmp_path / "model.safetensors").is_file() and not (tmp_path / "adapter_config.json").exists()
    again = type(model).from_pretrained(tmp_path)
    torch.testing.assert_close(_logits(again), before, rtol=0, atol=1e-4)


def test_merging_a_model_without_adapters_copies_it(tiny: Any) -> None:
    plain = merged(tiny.model)
    assert plain is not tiny.model and torch.equal(_logits(plain), _logits(tiny.model))


def _halved(folder: Path) -> dict[str, Tensor]:
    """Round saved adapters to float16."""
    saved = {name: tensor.half() for name, tensor in load_file(folder / "adapter_model.safetensors").items()}
    save_file(saved, folder / "adapter_model.safetensors", {"format": "pt"})
    return saved


def test_merged_adapters_are_a_plain_model_by_name(trained: Any, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the name stands for is base + scale x B A, rounded once, wherever the program runs; what is put on it names it by its whole path."""
    save_model(trained, tmp_path / "mine")
    saved = _halved(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    model = load_model("merged:mine", device="cpu").model
    assert not is_lora(model) and all(parameter.requires_grad and parameter.dtype == torch.float32 for parameter in model.parameters())
    layers = dict(tiny.model.named_parameters())
    assert {name.removeprefix("base_model.model.").partition(".lora_")[0] + ".weight" for name in saved} < layers.keys()
    for name, weight in model.named_parameters():
        key = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        exact = layers[name].detach().double()
        if f"{key}A.weight" in saved:
            exact = exact + saved[f"{key}B.weight"].double() @ saved[f"{key}A.weight"].double() * (8 / 4)
        assert torch.equal(weight, exact.float()), name
    half = load_model("merged:mine", device="cpu", dtype="bfloat16").model
    assert all(torch.equal(weight.bfloat16(), own) for weight, own in zip(model.parameters(), half.parameters(), strict=True))
    add_lora(half, 2, 4)
    save_model(half, tmp_path / "further")
    monkeypatch.chdir("/")
    further = load_model(str(tmp_path / "further"), device="cpu").model
    torch.testing.assert_close(_logits(further), _logits(model), rtol=0, atol=0)


def test_the_sums_of_merging_have_no_order(small_model: Build) -> None:
    """Adapters whose numbers float16 holds: the inner places in another order give the same bits, as another machine's product would."""
    model = small_model("llama")
    add_lora(model, 8, 16)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = (torch.randn(parameter.shape) * 10 ** torch.empty(parameter.shape).uniform_(-6, 0)).half().float()
    other, order = copy.deepcopy(model), torch.randperm(8)
    for name, parameter in other.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data[order] if ".lora_A." in name else parameter.data[:, order]
    pairs = list(zip(merged(model).parameters(), merged(other).parameters(), strict=True))
    assert all(torch.equal(one, two) for one, two in pairs)


def test_only_adapters_are_merged(tiny: Any, tmp_path: Path) -> None:
    save_model(tiny.model, tmp_path / "plain")
    tiny.tokenizer.save_pretrained(tmp_path / "plain")
    with pytest.raises(ModelUnavailable, match=r"'.*plain' holds no adapters to merge; leave out 'merged:'"):
        load_model(f"merged:{tmp_path / 'plain'}", device="cpu")
    with pytest.raises(ModelUnavailable, match=r"model folder '.*nothing' does not exist"):
        load_model(f"merged:{tmp_path / 'nothing'}", device="cpu")


def test_saved_and_loaded(trained: Any, tiny: Any, tmp_path: Path) -> None:
    save_model(trained, tmp_path / "new" / "folder")
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"  # on any machine
    again = load_model(str(folder), device="cpu")
    assert torch.equal(_logits(again.model), _logits(trained))
    assert [p.requires_grad for p in again.model.parameters()] == [p.requires_grad for p in trained.parameters()]
    assert again.tokenizer.chat_template == tiny.tokenizer.chat_template and not again.model.training
    save_model(again.model, tmp_path / "again")
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    loaded, saved = (load_file(path / "adapter_model.safetensors") for path in (tmp_path / "again", folder))
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)


def test_what_is_saved_is_read_by_peft(trained: Any, tiny: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    save_model(trained, tmp_path)
    foreign = PeftModel.from_pretrained(copy.deepcopy(tiny.model), str(tmp_path)).eval()
    assert torch.equal(_logits(foreign), _logits(trained))


def test_what_peft_saves_is_loaded(tiny: Any, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    foreign = get_peft_model(
        copy.deepcopy(tiny.model), LoraConfig(r=3, lora_alpha=5, target_modules=["q_proj", "o_proj"], lora_dropout=0.5)
    )
    _train(foreign)
    foreign.eval().peft_config["default"].base_model_name_or_path = "tiny"
    foreign.save_pretrained(str(tmp_path), save_embedding_layers=False)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["inference_mode"] is True
    model = load_model(str(tmp_path), device="cpu").model
    assert torch.equal(_logits(model), _logits(foreign))
    assert all(parameter.requires_grad is ("lora_" in name) for name, parameter in model.named_parameters())  # to be trained on


def test_a_base_in_a_folder_is_named_by_its_whole_path(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.model.save_pretrained(tmp_path / "base")
    tiny.tokenizer.save_pretrained(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    model = load_model("./base", device="cpu").model
    add_lora(model, 2, 4)
    save_model(model, tmp_path / "adapters")
    monkeypatch.chdir("/")
    assert torch.equal(_logits(load_model(str(tmp_path / "adapters"), device="cpu").model), _logits(model))
    (tmp_path / "base" / "config.json").unlink()
    (tmp_path / "base").rename(tmp_path / "moved")
    with pytest.raises(
        ModelUnavailable, match=r"the adapters in '.*adapters' belong to model '.*base', which cannot be had: model folder"
    ) as caught:
        load_model(str(tmp_path / "adapters"), device="cpu")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_beside_the_adapters_is_taken(trained: Any, tiny: Any, tmp_path: Path) -> None:
    save_model(trained, tmp_path)
    tokenizer = copy.deepcopy(tiny.tokenizer)
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    assert load_model(str(tmp_path), device="cpu").tokenizer.chat_template == "{{ messages }}"


def _damage(folder: Path, what: str) -> None:
    from peft import IA3Config

    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if what in ("no weights", "torn"):
        weights.write_bytes(weights.read_bytes()[:500]) if what == "torn" else weights.unlink()
        return
    if what == "not json":
        config.write_text("{")
        return
    if what == "kind":
        IA3Config(base_model_name_or_path="tiny").save_pretrained(str(folder))
        return
    if what in ("missing", "shape"):
        tensors = load_file(weights)
        name = sorted(tensors)[0]
        tensors = {**tensors, name: tensors[name][:1].clone()} if what == "shape" else {k: v for k, v in tensors.items() if k != name}
        save_file(tensors, weights)
        return
    changes: dict[str, Any] = {
        "no base": {"base_model_name_or_path": None},
        "itself": {"base_model_name_or_path": str(folder)},
        "layers": {"target_modules": ["c_attn"]},
    }
    config.write_text(json.dumps({**json.loads(config.read_text()), **changes[what]}))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("no weights", "cannot read the adapters in"),
        ("torn", "cannot read the adapters in"),
        ("not json", "cannot read '.*adapter_config.json'"),
        ("missing", r"do not fit model 'tiny': 1 tensors differ, base_model.model.model.layers.0"),
        ("shape", r"do not fit model 'tiny': 1 tensors differ, base_model.model.model.layers.0"),
        ("no base", "names no base_model_name_or_path"),
        ("itself", "which holds adapters itself; merge those into a model first"),
        ("layers", "do not fit model 'tiny': its layers are named otherwise"),
        ("kind", "are of type .*IA3; only LORA is supported"),
    ],
)
def test_a_damaged_folder(what: str, words: str, trained: Any, tmp_path: Path) -> None:
    save_model(trained, tmp_path)
    _damage(tmp_path, what)
    with pytest.raises(ModelUnavailable, match=words) as caught:
        load_model(str(tmp_path), device="cpu")
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 8), "lora needs rank and alpha of at least 1, got rank 0 and alpha 8"),
        ((4, 0), "got rank 4 and alpha 0"),
        ((4, 8, ["q_prj"]), r"lora target 'q_prj' is no linear layer of this model: did you mean 'q_proj'\?"),
        ((4, 8, "all_linear"), "lora target 'all_linear' is no linear layer"),
        ((4, 8, []), "lora needs at least one target, got none"),
    ],
)
def test_bad_settings(arguments: tuple[Any, ...], words: str, tiny_model: Any) -> None:
    with pytest.raises(BadInput, match=words):
        add_lora(tiny_model, *arguments)
    assert not is_lora(tiny_model) and all(parameter.requires_grad for parameter in tiny_model.parameters())


def test_adapters_on_adapters(trained: Any) -> None:
    with pytest.raises(BadInput, match="the model already carries adapters"):
        add_lora(trained, 4, 8)


def test_without_peft(tiny_model: Any, trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_model(trained, tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    words = r"adapters \(LoRA\) need the package peft; install with: pip install 'tether-agents\[lora\]'"
    with pytest.raises(MissingDependency, match=words):
        add_lora(tiny_model, 4, 8)
    with pytest.raises(MissingDependency, match=words):
        load_model(str(tmp_path), device="cpu")


def test_a_model_without_adapters_needs_no_peft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    for module in (lora, load, reference):
        importlib.reload(module)
    assert not lora.is_lora(load.load_model("tiny", device="cpu").model)
