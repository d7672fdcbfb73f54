"""The forward pass of the Llama family over flat tokens: no batch dimension, no padding, no mask.

Tokens of any number of texts stand behind one another. Each has its position, and the caller passes a function that does the attention:
this is the only difference between a learner (texts that do not see each other, with gradient), a scorer (continuations of shared prompts)
and a decoder (a cache). The weights are the module's own. Projections of one input are one product, with gradient on a card alone; gradients are
those of the module's own parameters. Layers that are more than that, such as adapters, are called.

`policy.probe_backbone` decides whether a model is computed this way: the parts must be those of a Llama (fast/layers.py), and 24 tokens at positions up
to the last one that the run may use must give what the module gives.

Shape legend: S tokens, D width of the model, H query heads, K key heads, W width of a head, P positions, R half of W.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from tether.models.fast.layers import Layer, add_rms_norm, language_part, projected, rms_norm, rotary, swiglu
from tether.models.probing import HALF_TYPES, widened
from tether.models.vision import Embedded, Vision

T = TypeVar("T")

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, queries [S, H, W], keys [S, K, W], values [S, K, W]) -> [S, H, W]; positions are in queries and keys already."""

ApplyPositions = Callable[[int, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, queries, keys, values) -> rotated (queries, keys). A decoder passes its own, which writes to its cache in the same pass."""

FeedForward = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""(what attention adds, the residual stream before it) -> (what the MLP adds, the stream before that)."""

MOST_POSITIONS = 2**17
"""Of the tables of angles; texts that are longer are computed by the module."""


class LlamaBackbone:
    """The layers of a model between its embedding and its head."""

    def __init__(self, model: PreTrainedModel, layers: list[Layer], max_positions: int | None = None) -> None:
        backbone = language_part(model)
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
        limit = int(config.max_position_embeddings)
        self.num_positions = min(limit if max_positions is None else min(limit, max_positions), MOST_POSITIONS)
        """How many positions the tables of angles hold. The probe covers them all, so no text beyond them may be computed here."""
        self.through_modules = False
        """Whether a layer is computed inside a call of its module, so that hooks on the module run. FSDP gathers a layer's weights in such
        hooks."""
        self.joins_gradients = model.device.type == "cuda"
        """Whether projections of one input are one product in a pass with gradient too: fewer kernels, which a card gains by."""
        self.few_by_kernels = all(layer.has_plain_products for layer in layers)
        """Whether kernels of our own compute the products of few tokens."""
        self.vision: Vision | None = None
        """Of a model that sees: embeds images, and says how positions are divided."""
        self._angles: tuple[Tensor, Tensor] | None = None
        self._angles_for: tuple[torch.device, torch.dtype] | None = None
        self._axes: Tensor | None = None

    @cached_property
    def one_of_each(self) -> list[int]:
        """The first two layers, since the first has no sum before its norm, and one of every other kind: together they call what all layers call."""
        kinds: dict[object, int] = {}
        for index, layer in enumerate(self.layers):
            parts = [(name, type(part), *part.parameters(recurse=False)) for name, part in layer.module.named_modules()]
            kinds.setdefault(tuple((name, kind, *(weight.shape for weight in weights)) for name, kind, *weights in parts), index)
        return sorted({*range(min(2, len(self.layers))), *kinds.values()})

    def join(self) -> bool:
        """Join the projections of each layer (see layout); returns whether any memory moved. For callers without gradient."""
        moved = [joined.join() for layer in self.layers for joined in layer.joins]
        return any(moved)

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines of every position, [P, R], in the precision in which the module rotates."""
        weight = self._norm.weight
        if self._angles is None or self._angles_for != (weight.device, weight.dtype):
            with torch.inference_mode(False), torch.no_grad():
                self._angles = self._angles_at(torch.arange(self.num_positions, device=weight.device), weight.dtype)
            self._angles_for = weight.device, weight.dtype
        return self._angles

    @property
    def sections(self) -> tuple[int, ...]:
        """How the rotations of a head are divided among time, height and width of images; empty where positions are plain."""
        return () if self.vision is None else self.vision.sections

    @property
    def axes(self) -> Tensor | None:
        """[R], int32: whether a rotation goes by time, height or width (0, 1, 2); None where positions are plain. Seen from one step along each."""
        device = self._norm.weight.device
        if self.sections and (self._axes is None or self._axes.device != device):
            with torch.inference_mode(False), torch.no_grad():
                steps_33 = torch.eye(3, dtype=torch.long, device=device)
                self._axes = self._angles_at(steps_33, torch.float32)[1].abs().argmax(dim=0).int()
        return self._axes

    def _angles_at(self, positions_S: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[S, R] each; positions are [S], or [3, S] where images have places in time, height and width."""
        sections = self.sections
        positions = positions_S.expand(3, -1)[:, None] if sections else positions_S[None]
        tables = self._rotary(torch.empty(0, dtype=dtype, device=positions_S.device), position_ids=positions)
        if tables[0].ndim == 4:  # the module leaves it to its attention to choose among the three
            tables = tuple(torch.cat([part[n] for n, part in enumerate(table.split(sections, dim=-1)[:3])], dim=-1) for table in tables)
        half = self.head_dim // 2
        cos_SR, sin_SR = (table[0, :, :half].contiguous() for table in tables)
        return cos_SR, sin_SR

    def words(self, ids_S: Tensor) -> Tensor:
        """[S, D]: what enters the layers for tokens among which no image is."""
        states_SD: Tensor = self._embed(ids_S)
        return states_SD

    def features(
        self,
        tokens: Tensor | Embedded,
        positions_S: Tensor | None,
        attend: Attend,
        *,
        apply_positions: ApplyPositions | None = None,
        recompute: bool = False,
        float8: Sequence[FeedForward] | None = None,
        layers: Sequence[int] | None = None,
    ) -> Tensor:
        """[S, D]: the last hidden state of every token, the final norm applied.

        Args:
            tokens: their ids [S], or what enters the layers for them.
            positions_S: the position of each in its text; [3, S] with images whose patches have places in time, height and width.
            attend: the attention.
            apply_positions: puts positions into queries and keys; rotation by the tables of angles if not given. It has the positions then.
            recompute: keep only the input of each layer for the backward pass and compute the layer again there.
            float8: what computes the MLP of each layer in place of the model's own; without gradient.
            layers: compute these alone, as a rehearsal (`one_of_each`).
        """
        # Weights that are in place only during a call have no memory of their own to be joined in.
        fused = not self.through_modules and (self.joins_gradients or not torch.is_grad_enabled())
        if fused:
            self.join()
        if apply_positions is None:
            assert positions_S is not None
            angles = self.angles
            if positions_S.ndim == 2:
                angles = self._angles_at(positions_S, self._norm.weight.dtype)
                positions_S = torch.arange(positions_S.shape[1], device=positions_S.device)
            apply_positions = partial(self._rotate, positions_S, angles)
        if isinstance(tokens, Tensor):
            tokens = Embedded(self.words(tokens)) if self.vision is None else self.vision.embed(tokens)
        residual_SD, deep = tokens
        delta_SD: Tensor | None = None
        few = fused and not torch.is_grad_enabled() and self._are_few(residual_SD)
        for index in range(len(self.layers)) if layers is None else layers:
            layer = self.layers[index]
            compute: Callable[..., tuple[Tensor, Tensor]] = partial(
                self._layer, index, layer, few=few, feed_forward=None if float8 is None else float8[index]
            )
            if recompute and torch.is_grad_enabled():
                residual_SD, delta_SD = residual_SD if delta_SD is None else residual_SD + delta_SD, None
                compute = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
            if self.through_modules:
                compute = partial(called, layer.module, compute)
            delta_SD, residual_SD = compute(delta_SD, residual_SD, apply_positions, attend, fused)
            if index < len(deep):
                residual_SD = residual_SD + deep[index]
        assert delta_SD is not None  # there is at least one layer
        return add_rms_norm(delta_SD, residual_SD, self._norm.weight, self._norm.variance_epsilon)[0]

    def float32_features(self, ids_S: Tensor, positions_S: Tensor, attend: Attend) -> Tensor:
        """The same in float32 whatever the weights are stored in, one layer's weights widened at a time; for the probe.

        A wrong formula cannot hide behind the rounding of half precision here.
        """
        angles = self._angles_at(positions_S, torch.float32)
        rows_S = torch.arange(len(positions_S), device=positions_S.device)  # these angles are listed by token
        apply_positions = partial(self._rotate, rows_S, angles)
        residual_SD: Tensor = self._embed(ids_S).float()
        delta_SD: Tensor | None = None
        for index, layer in enumerate(self.layers):
            with widened(layer.module.modules()):
                delta_SD, residual_SD = self._layer(index, layer, delta_SD, residual_SD, apply_positions, attend, fused=False)
        assert delta_SD is not None
        return add_rms_norm(delta_SD, residual_SD, self._norm.weight.float(), self._norm.variance_epsilon)[0]

    def _layer(
        self,
        index: int,
        layer: Layer,
        delta_SD: Tensor | None,
        residual_SD: Tensor,
        apply_positions: ApplyPositions,
        attend: Attend,
        fused: bool,
        *,
        few: bool = False,
        feed_forward: FeedForward | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One layer: (what the MLP adds, the residual stream before it).

        The sum of the two is left to the next norm, which reads it anyway: one pass over memory instead of two. `fused` computes the
        projections of one input as one product. Kernels of our own compute products of `few` tokens; what is added comes in parts there
        ([P, S, D], whose sum it is), which the next norm sums up.
        """
        norm: Any = layer.attention_norm
        if delta_SD is None:
            normed_SD = rms_norm(residual_SD, norm.weight, norm.variance_epsilon)
        else:
            normed_SD, residual_SD = add_rms_norm(delta_SD, residual_SD, norm.weight, norm.variance_epsilon)
        query_SHW, key_SKW, value_SKW = self._states(layer, normed_SD, fused, few)
        query_SHW, key_SKW = apply_positions(index, query_SHW, key_SKW, value_SKW)
        attended_SD = attend(index, query_SHW, key_SKW, value_SKW).flatten(1)
        mixed_SD = _few_parts(attended_SD, layer.output) if few else projected(layer.output, attended_SD)
        if feed_forward is not None:
            return feed_forward(mixed_SD, residual_SD)
        norm = layer.mlp_norm
        normed_SD, residual_SD = add_rms_norm(mixed_SD, residual_SD, norm.weight, norm.variance_epsilon)
        if few:
            from tether.models.fast.kernels.products import product_swiglu

            assert layer.gate_up is not None
            return _few_parts(product_swiglu(normed_SD, layer.gate_up.weight), layer.down), residual_SD
        if layer.gate_up is not None and fused:
            product_SF = swiglu(layer.gate_up(normed_SD))
        else:
            product_SF = swiglu(layer.gate(normed_SD), layer.up(normed_SD))
        return projected(layer.down, product_SF), residual_SD

    def _are_few(self, x_SD: Tensor) -> bool:
        """Whether these are few enough tokens for the kernels of our own, as in a step of decoding."""
        if not self.few_by_kernels or not x_SD.is_cuda or x_SD.dtype not in HALF_TYPES:
            return False
        from tether.models.fast.kernels.products import MOST_ROWS

        return len(x_SD) <= MOST_ROWS

    def _states(self, layer: Layer, normed_SD: Tensor, fused: bool, few: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, heads apart and normed where the model does that."""
        if layer.states is not None and few:
            from tether.models.fast.kernels.products import product

            return self._heads(layer, product(normed_SD, layer.states.weight, layer.states.bias))
        if layer.states is not None and fused:
            return self._heads(layer, layer.states(normed_SD))
        return self._normed_heads(layer, [project(normed_SD) for project in (layer.query, layer.key, layer.value)])

    def _heads(self, layer: Layer, states_SN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values that were computed as one."""
        sizes = [heads * self.head_dim for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        query_SN, key_SN, value_SN = states_SN.split(sizes, dim=-1)
        # With gradient values are kept for the backward pass, and as a part of the whole they would keep it all.
        return self._normed_heads(layer, (query_SN, key_SN, value_SN.contiguous() if torch.is_grad_enabled() else value_SN))

    def _normed_heads(self, layer: Layer, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        width = self.head_dim
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


def _few_parts(x_SD: Tensor, linear: nn.Module) -> Tensor:
    from tether.models.fast.kernels.products import product_parts

    return product_parts(x_SD, cast("nn.Linear", linear).weight)


def called(module: nn.Module, compute: Callable[..., T], *inputs: Any) -> T:
    """Compute something as if it were the module's forward pass."""
    vars(module)["forward"] = compute
    try:
        found: T = module(*inputs)
    finally:
        del vars(module)["forward"]
    return found


def plain_causal(backbone: LlamaBackbone) -> Attend:
    """Attention inside one text that is the whole row; the definition, for probes and comparisons."""

    def attend(layer: int, query_SHW: Tensor, key_SKW: Tensor, value_SKW: Tensor) -> Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query_SHW, key_SKW, value_SKW))
        out_1HSW = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=backbone.scale, enable_gqa=True)
        return out_1HSW[0].transpose(0, 1)

    return attend
