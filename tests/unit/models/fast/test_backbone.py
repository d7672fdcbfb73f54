"""The family's forward pass against the modules it computes, and the parameters that it joins."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from peft import LoraConfig, get_peft_model
from torch import Tensor

from tether.core.seeding import derive_seed
from tether.models.fast.backbone import LlamaBackbone, plain_causal
from tether.models.fast.layers import find_layers, product, projected
from tether.models.policy import probe_backbone

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MEMBERS = {
    "llama": lambda: hf.LlamaConfig(**SMALL),
    "llama with biases": lambda: hf.LlamaConfig(**SMALL, attention_bias=True),
    "llama 3 positions": lambda: hf.LlamaConfig(
        **SMALL,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "qwen2": lambda: hf.Qwen2Config(**SMALL),
    "qwen3": lambda: hf.Qwen3Config(**SMALL, head_dim=24),
    "mistral": lambda: hf.MistralConfig(**SMALL, sliding_window=None),
}
STRANGERS = {
    "gpt2": lambda: hf.GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=2),
    "gemma": lambda: hf.GemmaConfig(**SMALL, head_dim=16),
    "gemma2": lambda: hf.Gemma2Config(**SMALL, head_dim=16),
    "granite": lambda: hf.GraniteConfig(**SMALL, residual_multiplier=0.5),
    "a window": lambda: hf.MistralConfig(**SMALL, sliding_window=16),
    "a window wider than the probe": lambda: hf.MistralConfig(**SMALL, sliding_window=100),
    "such a window in some layers": lambda: hf.Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=100, max_window_layers=1),
    "positions that depend on the length": lambda: hf.LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    ),
    "another activation": lambda: hf.LlamaConfig(**SMALL, hidden_act="gelu"),
}


def model_of(config: Any) -> hf.PreTrainedModel:
    torch.manual_seed(derive_seed("test", "family"))
    model = hf.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases that do something
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def trunk_of(model: hf.PreTrainedModel) -> LlamaBackbone:
    backbone, reason = probe_backbone(model)
    assert backbone is not None, reason
    return backbone


def ours(backbone: LlamaBackbone, ids_T: Tensor, **how: Any) -> Tensor:
    return backbone.features(ids_T, torch.arange(len(ids_T)), plain_causal(backbone), **how)


@pytest.mark.parametrize("name", MEMBERS)
def test_it_computes_what_the_module_computes(name: str) -> None:
    model = model_of(MEMBERS[name]())
    ids_T = torch.arange(60) * 7 % 99
    with torch.no_grad():
        expected = model.base_model(input_ids=ids_T[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(trunk_of(model), ids_T), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there the probe does this, in half precision")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_few_tokens_by_kernels_of_our_own(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products in parts, which the norms add up; by Triton's interpreter."""
    pytest.importorskip("triton")
    model = model_of(MEMBERS[name]())
    ids_T = torch.arange(20) * 7 % 99
    backbone = trunk_of(model)
    assert backbone.few_by_kernels
    monkeypatch.setattr(backbone, "_are_few", lambda x: True)
    with torch.no_grad():
        expected = model.base_model(input_ids=ids_T[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(backbone, ids_T), expected, rtol=1e-4, atol=1e-4)


def test_layers_that_are_more_than_weights_are_left_to_the_library() -> None:
    assert not trunk_of(model_of(MEMBERS["llama with biases"]())).few_by_kernels


@pytest.mark.parametrize("name", STRANGERS)
def test_models_of_other_kinds_are_left_alone(name: str) -> None:
    backbone, reason = probe_backbone(model_of(STRANGERS[name]()))
    assert backbone is None and reason


def test_the_probe_finds_out_what_the_parts_do_not_tell() -> None:
    """Granite has the parts of a Llama, and scales what its layers add."""
    assert find_layers(model_of(STRANGERS["granite"]()))


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_gradients_are_the_modules(name: str, recompute: bool, joined: bool) -> None:
    model = model_of(MEMBERS[name]())
    backbone = trunk_of(model)
    backbone.joins_gradients = joined
    ids_T = torch.arange(30) * 5 % 99
    weights = torch.randn(30, 64)
    (ours(backbone, ids_T, recompute=recompute) * weights).sum().backward()
    found = {key: parameter.grad.clone() for key, parameter in model.base_model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    (model.base_model(input_ids=ids_T[None]).last_hidden_state[0] * weights).sum().backward()
    expected = dict(model.base_model.named_parameters())
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        torch.testing.assert_close(gradient, expected[key].grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_are_computed_inside_calls_of_their_modules(recompute: bool) -> None:
    """So hooks see what goes in and out, forwards and backwards, once a layer; the module's own forward pass is untouched afterwards."""
    model = model_of(MEMBERS["llama"]())
    backbone, ids_T = trunk_of(model), torch.arange(30) * 5 % 99
    expected = ours(backbone, ids_T)
    backbone.through_modules = True
    begun, ended = [], []
    for number, layer in enumerate(backbone.layers):
        layer.module.register_forward_pre_hook(lambda module, inputs, number=number: begun.append(number))
        layer.module.register_full_backward_hook(lambda module, given, taken, number=number: ended.append(number))
    found = ours(backbone, ids_T, recompute=recompute)
    assert torch.equal(found, expected) and begun == list(range(len(backbone.layers)))
    found.sum().backward()
    assert ended == begun[::-1] and not any("forward" in vars(layer.module) for layer in backbone.layers)


def test_adapters_are_part_of_the_layers() -> None:
    model = model_of(MEMBERS["llama"]())
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False))
    base = wrapped.get_base_model()
    backbone = trunk_of(base)
    assert backbone.layers[0].states is None and backbone.layers[0].gate_up is None, "they are more than one matrix"
    ids_T = torch.arange(20)
    with torch.no_grad():
        expected = base.base_model(input_ids=ids_T[None]).last_hidden_state[0]
        torch.testing.assert_close(ours(backbone, ids_T), expected, rtol=1e-5, atol=1e-5)
    ours(backbone, ids_T).sum().backward()
    assert all(parameter.grad is not None for key, parameter in base.named_parameters() if "lora_B" in key)


def test_a_rehearsal_computes_one_layer_of_each_kind() -> None:
    """Five layers of which one has adapters: that one, and the first two."""
    config = hf.LlamaConfig(**{**SMALL, "num_hidden_layers": 5})
    assert trunk_of(model_of(config)).one_of_each == [0, 1]
    wrapped = get_peft_model(model_of(config), LoraConfig(target_modules=["q_proj"], layers_to_transform=[3], init_lora_weights=False))
    base = wrapped.get_base_model()
    backbone = trunk_of(base)
    assert backbone.one_of_each == [0, 1, 3]
    ids_T = torch.arange(20)
    with torch.no_grad():
        found = ours(backbone, ids_T, layers=backbone.one_of_each)
        layers = base.model.layers
        base.model.layers = torch.nn.ModuleList(layers[index] for index in (0, 1, 3))
        expected = base.base_model(input_ids=ids_T[None], use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_joined_weights_are_the_modules_own() -> None:
    """An update of the parameters is an update of what is computed; nothing is synchronised."""
    model = model_of(MEMBERS["qwen2"]())
    backbone = trunk_of(model)
    ids_T = torch.arange(20)
    with torch.inference_mode():
        before = ours(backbone, ids_T).clone()
        assert not backbone.join(), "they lie together since the first pass"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ours(backbone, ids_T).square().mean().backward()
    optimizer.step()
    with torch.inference_mode():
        after = ours(backbone, ids_T)
    assert (after - before).abs().max() > 1e-4
    with torch.no_grad():
        torch.testing.assert_close(after.clone(), model.base_model(input_ids=ids_T[None]).last_hidden_state[0], rtol=1e-5, atol=1e-5)


def test_weights_that_moved_are_joined_again() -> None:
    model = model_of(MEMBERS["llama"]())
    backbone = trunk_of(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.float64)
    ids_T = torch.arange(20)
    with torch.no_grad():
        expected = model.base_model(input_ids=ids_T[None]).last_hidden_state[0]
        found = ours(backbone, ids_T)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert not backbone.join()


def test_two_trunks_of_a_model_share_what_is_joined() -> None:
    """Engine, learner and scorer each have their own; none moves the weights of another."""
    model = model_of(MEMBERS["qwen2"]())
    first = trunk_of(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    second = trunk_of(model)
    ids_T = torch.arange(20)
    with torch.no_grad():
        assert torch.equal(ours(first, ids_T), ours(second, ids_T))
    assert not first.join() and not second.join()
    assert places == [parameter.data_ptr() for parameter in model.parameters()]


def test_joined_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    model = model_of(MEMBERS["llama"]())
    backbone = trunk_of(model)
    assert backbone.layers[0].states is not None and backbone.layers[0].states.is_whole
    model.save_pretrained(tmp_path)
    again = hf.AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, saved), (_, parameter) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(saved, parameter), name


@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_on_several_threads_of_a_cpu(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other order gives the same product; with one thread, other numbers of rows or gradient it is torch's own, bit for bit."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 96, bias=bias)
    for threads, num_rows, with_gradient in ((2, 4, False), (2, 48, False), (2, 3, False), (2, 49, False), (1, 16, False), (2, 16, True)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        x_SN = torch.randn(num_rows, 64)
        with torch.set_grad_enabled(with_gradient):
            found, want = projected(linear, x_SN), linear(x_SN)
            assert product(x_SN, linear.weight, linear.bias).equal(found)
        assert found.is_contiguous() and found.requires_grad == with_gradient
        torch.testing.assert_close(found, want, rtol=0, atol=2e-6)
        assert found.equal(want) or num_rows in (4, 48)
