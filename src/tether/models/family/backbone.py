"""The forward pass of the Llama family over flat tokens: no batch dimension, no padding, no mask.

Tokens of any number of texts stand behind one another; each knows its position, and a function that the caller brings does the attention.
That one difference is all between a learner (texts that do not see each other, with gradient), a scorer (continuations of shared prompts)
and a decoder (a cache). The weights are the module's own. Without gradient, projections of one input are one product; with gradient the
module's own layers are called, so that adapters and hooks on parameters work as ever.

Shape legend: S tokens, D width of the model, H query heads, K key heads, W width of a head, P positions, R half of W.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tether.models.family.layout import Layer, find_layers
from tether.models.family.ops import add_rms_norm, rms_norm, rotary, swiglu
from tether.models.probing import agree, evaluating, probe_ids

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [S, H, W], keys [S, K, W], values [S, K, W]) -> [S, H, W]; positions are in queries and keys already."""

Place = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Puts positions into queries and keys, in a way of its own; for decoders, which write to their cache in the same pass."""

PROBE_TOKENS = 24
"""Enough for positions and attention to matter."""

MOST_POSITIONS = 2**17
"""Of the tables of angles; models that allow more are not used at such lengths."""


class LlamaBackbone:
    """The layers of a model between its embedding and its head."""

    def __init__(self, model: PreTrainedModel, layers: list[Layer]) -> None:
        backbone: Any = model.base_model
        config = model.config.get_text_config()
        self.model = model
        self.layers = layers
        self.num_layers = len(layers)
        self.num_heads = int(config.num_attention_heads)
        self.num_kv_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or config.hidden_size // self.num_heads)
        self.mlp_width = int(config.intermediate_size)
        self.scale = self.head_dim**-0.5
        self._embed: nn.Module = backbone.embed_tokens
        self._norm: Any = backbone.norm
        self._rotary: nn.Module = backbone.rotary_emb
        self._num_positions = min(int(config.max_position_embeddings), MOST_POSITIONS)
        self._angles: tuple[Tensor, Tensor] | None = None

    def join(self) -> bool:
        """Join the projections of each layer (see layout); returns whether any memory moved. For callers without gradient."""
        moved = [joined.join() for layer in self.layers for joined in layer.joins]
        return any(moved)

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, [P, R], in the model's precision."""
        weight = self._norm.weight
        if self._angles is None or self._angles[0].device != weight.device or self._angles[0].dtype != weight.dtype:
            with torch.inference_mode(False), torch.no_grad():
                positions_1P = torch.arange(self._num_positions, device=weight.device)[None]
                cos_1PW, sin_1PW = self._rotary(torch.empty(0, dtype=weight.dtype, device=weight.device), position_ids=positions_1P)
                half = self.head_dim // 2
                self._angles = cos_1PW[0, :, :half].contiguous(), sin_1PW[0, :, :half].contiguous()
        return self._angles

    def features(
        self, ids_S: Tensor, positions_S: Tensor, attend: Attend, *, place: Place | None = None, recompute: bool = False
    ) -> Tensor:
        """[S, D]: what the trunk says at every token, the final norm applied.

        Args:
            ids_S: the tokens.
            positions_S: the position of each in its text.
            attend: the attention.
            place: puts positions into queries and keys; rotation by the tables of angles if not given.
            recompute: keep only the input of each layer for the backward pass and compute the layer again there.
        """
        if not torch.is_grad_enabled():
            self.join()
        place = place or partial(self._rotate, positions_S, self.angles)
        residual_SD: Tensor = self._embed(ids_S)
        delta_SD: Tensor | None = None
        for index, layer in enumerate(self.layers):
            if recompute and torch.is_grad_enabled():
                stream_SD = residual_SD if delta_SD is None else residual_SD + delta_SD
                delta_SD, residual_SD = checkpoint(
                    self._layer, index, layer, None, stream_SD, place, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                delta_SD, residual_SD = self._layer(index, layer, delta_SD, residual_SD, place, attend)
        assert delta_SD is not None  # there is at least one layer
        return add_rms_norm(delta_SD, residual_SD, self._norm.weight, self._norm.variance_epsilon)[0]

    def _layer(
        self, index: int, layer: Layer, delta_SD: Tensor | None, residual_SD: Tensor, place: Place, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """One layer: (what the MLP adds, the residual stream before it)."""
        norm: Any = layer.attention_norm
        if delta_SD is None:
            normed_SD = rms_norm(residual_SD, norm.weight, norm.variance_epsilon)
        else:
            normed_SD, residual_SD = add_rms_norm(delta_SD, residual_SD, norm.weight, norm.variance_epsilon)
        query_SHW, key_SKW, value_SKW = self._states(layer, normed_SD)
        query_SHW, key_SKW = place(index, query_SHW, key_SKW, value_SKW)
        mixed_SD = layer.output(attend(index, query_SHW, key_SKW, value_SKW).flatten(1))
        norm = layer.mlp_norm
        normed_SD, residual_SD = add_rms_norm(mixed_SD, residual_SD, norm.weight, norm.variance_epsilon)
        if layer.gate_up is not None and not torch.is_grad_enabled():
            gate_SF, up_SF = layer.gate_up(normed_SD).chunk(2, dim=-1)
        else:
            gate_SF, up_SF = layer.gate(normed_SD), layer.up(normed_SD)
        added_SD: Tensor = layer.down(swiglu(gate_SF, up_SF))
        return added_SD, residual_SD

    def _states(self, layer: Layer, normed_SD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads apart and normed where the model does that."""
        width = self.head_dim
        if layer.states is not None and not torch.is_grad_enabled():
            sizes = [self.num_heads * width, self.num_kv_heads * width, self.num_kv_heads * width]
            parts = layer.states(normed_SD).split(sizes, dim=-1)
        else:
            parts = tuple(project(normed_SD) for project in (layer.query, layer.key, layer.value))
        query, key, value = (part.unflatten(1, (-1, width)) for part in parts)
        if layer.query_norm is not None and layer.key_norm is not None:
            norms: tuple[Any, Any] = layer.query_norm, layer.key_norm
            query, key = (rms_norm(x, norm.weight, norm.variance_epsilon) for x, norm in zip((query, key), norms, strict=True))
        return query, key, value

    @staticmethod
    def _rotate(
        positions_S: Tensor, angles: tuple[Tensor, Tensor], layer: int, query_SHW: Tensor, key_SKW: Tensor, value_SKW: Tensor
    ) -> tuple[Tensor, Tensor]:
        return rotary(query_SHW, key_SKW, positions_S, *angles)


@torch.no_grad()
def llama_backbone(model: PreTrainedModel) -> LlamaBackbone | None:
    """The family's forward pass over a model; None where the model is of another kind or computes something else."""
    layers = find_layers(model)
    if layers is None:
        return None
    backbone = LlamaBackbone(model, layers)
    if model.device.type == "cuda":
        from tether.models.kernels.warm_up import warm_up

        warm_up(backbone)
    ids_1T = probe_ids(model, PROBE_TOKENS)
    with evaluating(model):
        expected_TD: Tensor = model.base_model(input_ids=ids_1T, use_cache=False).last_hidden_state[0]
        found_TD = backbone.features(ids_1T[0], torch.arange(PROBE_TOKENS, device=ids_1T.device), plain_causal(backbone))
    return backbone if agree(found_TD, expected_TD, model.dtype) else None


def plain_causal(backbone: LlamaBackbone) -> Attend:
    """Attention inside one text that is the whole row; the definition, for probes and comparisons."""

    def attend(layer: int, query_SHW: Tensor, key_SKW: Tensor, value_SKW: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query_SHW, key_SKW, value_SKW))
        out_1HSW = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=backbone.scale, enable_gqa=True)
        return out_1HSW[0].transpose(0, 1)

    return attend
