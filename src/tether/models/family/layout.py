"""Where the parts of a Llama-like model are, and projections of one input that are computed as one.

A model belongs to the family if its layers have exactly these parts: two root-mean-square norms, four projections (norms of queries and keys
allowed), a gated MLP; and if attention reaches over the whole text with positions that are rotations fixed beforehand. That it computes what
this layout suggests is for a probe to find out (`family_trunk`).

Projections of the same input become views of one matrix (`Joined`): the module's own parameters move into shared storage, so one product
computes them all, an optimiser that updates the parameters updates the matrix, and there is no second copy. Whoever replaces a parameter's
storage (another precision, another device) undoes that; `Joined.join` notices and joins them again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}


class FusedLinear:
    """Linear layers over one input, as one matrix of which their weights are views."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        self._layers = tuple(layers)
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether the layers' weights still lie where they were put."""
        weight = self._weight
        if weight is None:
            return False
        begin, size = weight.data_ptr(), weight.element_size()
        for layer in self._layers:
            if layer.weight.data_ptr() != begin or layer.weight.dtype != weight.dtype:
                return False
            begin += layer.weight.numel() * size
        return self._bias is None or self._layers[0].bias.data_ptr() == self._bias.data_ptr()

    def join(self) -> bool:
        """Bring the weights together where they are not; returns whether they had to be moved."""
        if self.is_whole:
            return False
        with torch.inference_mode(False), torch.no_grad():  # an optimiser could not change tensors born in inference mode
            if self._adopt():
                return False
            self._join()
        return True

    def _adopt(self) -> bool:
        """Take weights as they are that somebody else has brought together."""
        weights = [layer.weight.data for layer in self._layers]
        biases = [layer.bias.data for layer in self._layers if layer.bias is not None]
        if not _lie_together(weights) or not _lie_together(biases):
            return False
        self._weight = weights[0].as_strided((sum(map(len, weights)), weights[0].shape[1]), weights[0].stride())
        self._bias = biases[0].as_strided((sum(map(len, biases)),), (1,)) if biases else None
        return True

    def _join(self) -> None:
        self._weight = torch.cat([layer.weight.data for layer in self._layers])
        has_bias = self._layers[0].bias is not None
        self._bias = torch.cat([layer.bias.data for layer in self._layers]) if has_bias else None
        start = 0
        for layer in self._layers:
            stop = start + layer.out_features
            layer.weight.data = self._weight[start:stop]
            if self._bias is not None:
                layer.bias.data = self._bias[start:stop]
            start = stop

    def __call__(self, x_SD: Tensor) -> Tensor:
        assert self._weight is not None  # joined before the first use
        return nn.functional.linear(x_SD, self._weight, self._bias)


def _lie_together(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins in memory where the one before ends."""
    same = all(t.dtype == tensors[0].dtype and t.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for t in tensors)
    return same and all(a.is_contiguous() and b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(tensors))


def joinable(layers: Sequence[Any]) -> bool:
    """Whether these are plain linear layers, all with a bias or all without."""
    return all(type(layer) is nn.Linear and (layer.bias is None) == (layers[0].bias is None) for layer in layers)


@dataclass(eq=False)
class Layer:
    """One layer's parts, under the names of the family."""

    attention_norm: nn.Module
    query: nn.Module
    key: nn.Module
    value: nn.Module
    output: nn.Module
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    mlp_norm: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module
    states: FusedLinear | None
    """Query, key and value as one product; None where a layer is more than linear, as with adapters."""
    gate_up: FusedLinear | None

    @property
    def joins(self) -> tuple[FusedLinear, ...]:
        return tuple(joined for joined in (self.states, self.gate_up) if joined is not None)


def find_layers(model: PreTrainedModel) -> list[Layer] | None:
    """The layers of a model of the family; None for any other."""
    backbone: Any = model.base_model
    config = model.config.get_text_config()
    if not all(hasattr(backbone, name) for name in ("embed_tokens", "layers", "norm", "rotary_emb")):
        return None
    if getattr(backbone.rotary_emb, "rope_type", "default") not in STATIC_ROTATIONS or _has_window(config):
        return None
    if config.num_hidden_layers != len(backbone.layers):
        return None
    found = [_layer(module) for module in backbone.layers]
    return None if any(layer is None for layer in found) else [layer for layer in found if layer is not None]


def _has_window(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None)) and getattr(config, "use_sliding_window", True)


def _layer(module: Any) -> Layer | None:
    if {name for name, _ in module.named_children()} != LAYER_PARTS:
        return None
    attention, mlp = module.self_attn, module.mlp
    parts = {name for name, child in attention.named_children() if not _is_rotary(child)}
    has_norms = parts >= HEAD_NORMS
    if parts - HEAD_NORMS != ATTENTION_PARTS or (parts & HEAD_NORMS and not has_norms):
        return None
    if not {name for name, _ in mlp.named_children()} >= MLP_PARTS or not _is_silu(mlp.act_fn):
        return None
    norms = [module.input_layernorm, module.post_attention_layernorm, *([attention.q_norm, attention.k_norm] if has_norms else [])]
    if not all(hasattr(norm, "weight") and hasattr(norm, "variance_epsilon") for norm in norms):
        return None
    states, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return Layer(
        module.input_layernorm,
        *states,
        attention.o_proj,
        attention.q_norm if has_norms else None,
        attention.k_norm if has_norms else None,
        module.post_attention_layernorm,
        *gate_up,
        mlp.down_proj,
        FusedLinear(states) if joinable(states) else None,
        FusedLinear(gate_up) if joinable(gate_up) else None,
    )


def _is_rotary(module: nn.Module) -> bool:
    return type(module).__name__.endswith("RotaryEmbedding")


def _is_silu(activation: Any) -> bool:
    return activation is nn.functional.silu or type(activation).__name__ in ("SiLU", "SiLUActivation")
