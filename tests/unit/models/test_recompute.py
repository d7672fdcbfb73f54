"""Recomputing layers changes neither gradients nor the model, keeps dropout off, and saves what it is there to save."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.core.errors import BadInput
from tether.models.logprobs import checkpointed
from tether.models.lora import add_lora

IDS = torch.tensor([[5, 6, 7, 8, 9, 10], [11, 12, 13, 14, 15, 16]])
Build = Callable[..., Any]


def _gradient(model: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(input_ids=IDS, use_cache=False).logits.log_softmax(-1)[..., 3].mean().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def _kept(model: Any) -> int:
    """How many numbers a forward pass keeps for its backward pass."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.numel()) or tensor, lambda tensor: tensor):
        model(input_ids=IDS, use_cache=False)
    return sum(kept)


@pytest.mark.parametrize(
    ("name", "dropout"),
    [
        ("llama", {"attention_dropout": 0.5}),
        ("gpt2", {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}),
        ("opt", {"dropout": 0.5, "attention_dropout": 0.5}),
        ("gemma2", {"attention_dropout": 0.5}),
    ],
)
def test_the_same_gradient(name: str, dropout: dict[str, float], small_model: Build) -> None:
    model = small_model(name, **dropout)
    want, kept = _gradient(model), _kept(model)
    with checkpointed(model):
        got = _gradient(model)
        assert _kept(model) < kept / 2
        assert not model.training
    assert got.keys() == want.keys()
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert _kept(model) == kept  # nothing is left behind
    assert not model.training


def test_layers_run_twice_inside_the_block_only(small_model: Build) -> None:
    model = small_model("llama")
    runs: list[int] = []
    model.model.layers[0].self_attn.register_forward_hook(lambda *_: runs.append(1))
    with checkpointed(model):
        _gradient(model)
    assert len(runs) == 2
    _gradient(model)
    assert len(runs) == 3


def test_adapters_get_the_same_gradient(tiny_model: Any) -> None:
    """Nothing before the first adapter requires a gradient, which the older kind of checkpointing cannot take."""
    add_lora(tiny_model, 4, 8, seed=0)
    want = _gradient(tiny_model)
    with checkpointed(tiny_model):
        got = _gradient(tiny_model)
    assert want and all(torch.equal(got[key], want[key]) for key in want)


def test_an_error_inside_the_block_leaves_the_model_as_it_was(small_model: Build) -> None:
    model = small_model("llama")
    with pytest.raises(KeyError), checkpointed(model):
        raise KeyError("trouble")
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    assert layers and not any("forward" in vars(layer) for layer in layers)


def test_a_model_without_such_layers() -> None:
    class Bare(torch.nn.Linear):
        class config:
            model_type = "bare"

    with pytest.raises(BadInput, match="models of type 'bare' do not say which layers to recompute"), checkpointed(Bare(1, 1)):  # type: ignore[arg-type]
        pass
