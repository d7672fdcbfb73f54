"""Where the parts of a Llama-shaped model are, projections of one input that are computed as one, and the operations between them.

A model belongs to the family if its layers have exactly these parts: two root-mean-square norms, four projections (norms of queries and keys
allowed), a gated MLP; and if attention reaches over the whole text with positions that are rotations fixed beforehand. Whether it computes
what this layout suggests is found by a probe (`probe_backbone`).

Projections of the same input become views of one matrix (`FusedLinear`): the module's own parameters move into shared storage, so one product
computes them all, an optimiser that updates the parameters updates the matrix, and there is no second copy. Code that replaces a parameter's
storage (another precision, another device) undoes that; `FusedLinear.join` notices and joins them again.

The operations between the matrix products are Triton kernels on a CUDA device and plain torch elsewhere, with gradients in both. Everything is
computed in float32 inside an operation and rounded to the model's precision at its end.

Shape legend: S tokens, N width of a row, F width of the MLP, H query heads, K key heads, D width of a head, P positions, R half of D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel

STATIC_ROTATIONS = ("default", "linear", "llama3", "yarn")
LAYER_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
HEAD_NORMS = {"q_norm", "k_norm"}
MLP_PARTS = {"gate_proj", "up_proj", "down_proj"}
FEW_ROWS = range(4, 49)
"""Rows for which weight times rows is faster on several threads of a CPU than rows times weight: the library gives each thread a part of the rows
there, and each reads the whole weight. Measured on two threads, MKL: 0.46 to 0.65 of the time; one thread gains nothing."""


class FusedLinear:
    """Linear layers over one input, as one matrix of which their weights are views.

    Invariant, whenever `is_whole`: the weights (and biases) of the layers lie one behind the other in memory, in this order, and `_weight`
    (`_bias`) is the whole of that memory. Parameters are never copied back and forth: an optimiser's update of a layer's parameter is
    an update of `_weight`, because it is the same memory. Only the storage of a parameter changes, never the Parameter object, so
    optimisers and hooks that hold parameters keep working.
    """

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
        # Addresses are compared, not contents: a parameter that was given other storage (`model.to`, a loaded checkpoint) has another one.
        wholes = [(weight, [layer.weight for layer in self._layers])]
        if self._bias is not None:
            wholes.append((self._bias, [layer.bias for layer in self._layers]))
        for whole, parts in wholes:
            begin = whole.data_ptr()
            for part in parts:
                if part.data_ptr() != begin or part.dtype != whole.dtype:
                    return False
                begin += part.nbytes
        return True

    def join(self) -> bool:
        """Bring the weights together where they are not; returns whether they had to be moved."""
        if self.is_whole:
            return False
        with torch.inference_mode(False), torch.no_grad():  # an optimiser cannot change tensors that were made in inference mode
            if self._adopt():
                return False
            self._join()
        return True

    def _adopt(self) -> bool:
        """Take weights as they are if they lie together already, as another FusedLinear over the same layers has left them."""
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

    @property
    def weight(self) -> Tensor:
        assert self._weight is not None  # joined before the first use
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        return self._bias

    def __call__(self, x_SD: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return product(x_SD, self.weight, self.bias)
        biases = () if self.bias is None else [layer.bias for layer in self._layers]
        out_SN: Tensor = _JoinedProduct.apply(x_SD, self.weight, self.bias, *(layer.weight for layer in self._layers), *biases)
        return out_SN


def _are_few(x_SN: Tensor) -> bool:
    on_cpu = x_SN.device.type == "cpu" and x_SN.dtype == torch.float32 and torch.get_num_threads() > 1
    return on_cpu and x_SN.ndim == 2 and len(x_SN) in FEW_ROWS and not torch.is_grad_enabled()


def product(x_SN: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`nn.functional.linear`, few rows on a CPU in the order that is quicker for them."""
    if not _are_few(x_SN):
        return nn.functional.linear(x_SN, weight, bias)
    out = (weight @ x_SN.T).T.contiguous()
    return out if bias is None else out.add_(bias)


def projected(linear: nn.Module, x_SN: Tensor) -> Tensor:
    """What a linear layer gives; one that is more than a weight is called."""
    if type(linear) is nn.Linear and _are_few(x_SN):
        return product(x_SN, linear.weight, linear.bias)
    out: Tensor = linear(x_SN)
    return out


def _lie_together(tensors: Sequence[Tensor]) -> bool:
    """Whether each begins in memory where the one before ends."""
    same = all(t.dtype == tensors[0].dtype and t.untyped_storage().data_ptr() == tensors[0].untyped_storage().data_ptr() for t in tensors)
    return same and all(a.is_contiguous() and b.data_ptr() == a.data_ptr() + a.nbytes for a, b in pairwise(tensors))


def joinable(layers: Sequence[Any]) -> bool:
    """Whether these are plain linear layers, all with a bias or all without."""
    return all(type(layer) is nn.Linear and (layer.bias is None) == (layers[0].bias is None) for layer in layers)


def base_linear(linear: Any) -> Any:
    """The layer beside which adapters stand, or the layer itself."""
    return linear.get_base_layer() if hasattr(linear, "get_base_layer") else linear


class UnsupportedLayout(ValueError):
    """The model is not Llama-shaped; the message says which part is not."""


@dataclass(eq=False)
class Layer:
    """One layer's parts, under the names of the family."""

    module: nn.Module
    """The layer itself."""
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
    def has_plain_products(self) -> bool:
        """Whether every projection is a weight and nothing else, but for a bias of queries, keys and values."""
        return (
            self.states is not None
            and self.gate_up is not None
            and all(type(linear) is nn.Linear and linear.bias is None for linear in (self.output, self.gate, self.down))
        )

    @property
    def joins(self) -> tuple[FusedLinear, ...]:
        return tuple(joined for joined in (self.states, self.gate_up) if joined is not None)


def has_linear_mlp(layer: Layer) -> bool:
    """Whether gate, up and down are linear layers without bias, adapters beside them allowed, and of sizes that products in float8 take."""
    bases = [base_linear(linear) for linear in (layer.gate, layer.up, layer.down)]
    return all(type(base) is nn.Linear and base.bias is None and base.in_features % 16 == 0 for base in bases)


def language_part(model: PreTrainedModel) -> Any:
    """The layers over text: of a model with images the part behind its vision tower, else all but the head."""
    base: Any = model.base_model
    return getattr(base, "language_model", None) or getattr(base, "text_model", None) or base


def find_layers(model: PreTrainedModel) -> list[Layer]:
    """The layers of a Llama-shaped model; UnsupportedLayout names the first part that is not."""
    backbone = language_part(model)
    config = model.config.get_text_config()
    for name in ("embed_tokens", "layers", "norm", "rotary_emb"):
        if not hasattr(backbone, name):
            raise UnsupportedLayout(f"the model has no {name}")
    kind = getattr(backbone.rotary_emb, "rope_type", "default")
    if not isinstance(kind, str) or kind not in STATIC_ROTATIONS:
        raise UnsupportedLayout(f"rotary type {kind!r} is not static")
    _refuse_window(config)
    if config.num_hidden_layers != len(backbone.layers):
        raise UnsupportedLayout(f"the config names {config.num_hidden_layers} layers, the model has {len(backbone.layers)}")
    if not hasattr(backbone.norm, "weight") or not hasattr(backbone.norm, "variance_epsilon"):
        raise UnsupportedLayout(f"the last norm ({type(backbone.norm).__name__}) is not a root-mean-square norm")
    for name in ("num_attention_heads", "intermediate_size", "max_position_embeddings"):
        if not isinstance(getattr(config, name, None), int):
            raise UnsupportedLayout(f"the config's {name} is not one number")
    return [_layer(module) for module in backbone.layers]


def _refuse_window(config: Any) -> None:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        others = sorted({str(kind) for kind in kinds if kind != "full_attention"})
        if others:
            raise UnsupportedLayout(f"some layers have {', '.join(others)}")
    elif getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise UnsupportedLayout("attention has a sliding window")


def _layer(module: Any) -> Layer:
    if (found := {name for name, _ in module.named_children()}) != LAYER_PARTS:
        raise UnsupportedLayout(f"a layer has other parts than a Llama's: {_difference(found, LAYER_PARTS)}")
    attention, mlp = module.self_attn, module.mlp
    parts = {name for name, child in attention.named_children() if not type(child).__name__.endswith("RotaryEmbedding")}
    has_norms = parts >= HEAD_NORMS
    if parts - HEAD_NORMS != ATTENTION_PARTS or (parts & HEAD_NORMS and not has_norms):
        raise UnsupportedLayout(f"attention has other parts than a Llama's: {_difference(parts, ATTENTION_PARTS)}")
    if not (found := {name for name, _ in mlp.named_children()}) >= MLP_PARTS:
        raise UnsupportedLayout(f"the MLP has other parts than a Llama's: {_difference(found, MLP_PARTS)}")
    if mlp.act_fn is not nn.functional.silu and type(mlp.act_fn).__name__ not in ("SiLU", "SiLUActivation"):
        raise UnsupportedLayout(f"the MLP's activation is {type(mlp.act_fn).__name__}, not SiLU")
    norms = [module.input_layernorm, module.post_attention_layernorm, *([attention.q_norm, attention.k_norm] if has_norms else [])]
    for norm in norms:
        if not hasattr(norm, "weight") or not hasattr(norm, "variance_epsilon"):
            raise UnsupportedLayout(f"{type(norm).__name__} is not a root-mean-square norm")
    states, gate_up = (attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)
    return Layer(
        module,
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


def _difference(found: set[str], expected: set[str]) -> str:
    """Example: "more pre_feedforward_layernorm, without mlp"."""
    more, less = sorted(found - expected), sorted(expected - found)
    return ", ".join([*(f"more {name}" for name in more), *(f"without {name}" for name in less)])


def rms_norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [S, N] or [S, heads, N]."""
    if x.is_cuda:
        normed: Tensor = _Norm.apply(x.contiguous(), weight_N, eps) if torch.is_grad_enabled() else _norm(x, None, weight_N, eps)[0]
        return normed
    wide = x.float()
    return weight_N * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(delta_SN: Tensor, residual_SN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): a layer's output goes into the residual stream, and the next norm reads it there.

    Without gradient, delta may also be float32 parts [P, S, N], whose sum it is.
    """
    if not residual_SN.is_cuda:
        if delta_SN.ndim == 3:
            delta_SN = delta_SN.sum(dim=0).to(residual_SN.dtype)
        total_SN = residual_SN + delta_SN
        return rms_norm(total_SN, weight_N, eps), total_SN
    if torch.is_grad_enabled():
        found: tuple[Tensor, Tensor] = _AddNorm.apply(delta_SN.contiguous(), residual_SN.contiguous(), weight_N, eps)
        return found
    return _norm(residual_SN, delta_SN, weight_N, eps)


def swiglu(*parts: Tensor) -> Tensor:
    """silu(gate) * up; gate and up [S, F] each, or beside each other in one matrix."""
    gate_SF, up_SF = _halves(parts)
    if not gate_SF.is_cuda:
        return torch.nn.functional.silu(gate_SF) * up_SF
    if torch.is_grad_enabled():
        product: Tensor = _SwiGlu.apply(*parts)
        return product
    from tether.models.fast.kernels.pointwise import swiglu_forward

    return swiglu_forward(gate_SF, up_SF)


def _halves(parts: Sequence[Tensor]) -> Sequence[Tensor]:
    return parts if len(parts) == 2 else parts[0].chunk(2, dim=-1)


def rotary(query_SHD: Tensor, key_SKD: Tensor, positions_S: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions."""
    if query_SHD.is_cuda:
        turned: tuple[Tensor, Tensor] = _Rotary.apply(query_SHD, key_SKD, positions_S, cos_PR, sin_PR)
        return turned
    cos_S1R, sin_S1R = cos_PR[positions_S][:, None], sin_PR[positions_S][:, None]
    return _turned(query_SHD, cos_S1R, sin_S1R), _turned(key_SKD, cos_S1R, sin_S1R)


def _turned(x_SHD: Tensor, cos_S1R: Tensor, sin_S1R: Tensor) -> Tensor:
    first, second = x_SHD.chunk(2, dim=-1)
    return torch.cat([first * cos_S1R - second * sin_S1R, second * cos_S1R + first * sin_S1R], dim=-1).to(x_SHD.dtype)


def _norm(x: Tensor, delta: Tensor | None, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from tether.models.fast.kernels.pointwise import norm_forward

    return norm_forward(x, delta, weight_N, eps, save=False)[:2]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        from tether.models.fast.kernels.pointwise import norm_forward

        normed, _, scale = norm_forward(x, None, weight_N, eps, save=True)
        ctx.save_for_backward(x, scale, weight_N)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from tether.models.fast.kernels.pointwise import norm_backward

        return *norm_backward(grads[0].contiguous(), None, *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta_SN: Tensor, residual_SN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from tether.models.fast.kernels.pointwise import norm_forward

        normed_SN, total_SN, scale_S = norm_forward(residual_SN, delta_SN, weight_N, eps, save=True)
        ctx.save_for_backward(total_SN, scale_S, weight_N)
        return normed_SN, total_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from tether.models.fast.kernels.pointwise import norm_backward

        out_SN, weight_N = norm_backward(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors)
        return out_SN, out_SN, weight_N, None


class _JoinedProduct(torch.autograd.Function):
    """The product with a joined matrix, and the gradients of the layers' own parameters, which are its rows: two products in all."""

    @staticmethod
    def forward(ctx: Any, x_SD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x_SD, weight_ND)
        ctx.sizes = [len(parameter) for parameter in parameters if parameter.ndim == 2]
        return nn.functional.linear(x_SD, weight_ND, bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out_SN: Tensor) -> tuple[Tensor | None, ...]:
        x_SD, weight_ND = ctx.saved_tensors
        wants_x, _, _, *wanted = ctx.needs_input_grad
        by_x_SD = by_out_SN @ weight_ND if wants_x else None
        by_parameters: list[Tensor | None] = [None] * len(wanted)
        if any(wanted):
            by_parameters[: len(ctx.sizes)] = (by_out_SN.t() @ x_SD).split(ctx.sizes)
            if len(wanted) > len(ctx.sizes):
                by_parameters[len(ctx.sizes) :] = by_out_SN.sum(dim=0).split(ctx.sizes)
        return by_x_SD, None, None, *by_parameters


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        from tether.models.fast.kernels.pointwise import swiglu_forward

        ctx.save_for_backward(*parts)
        return swiglu_forward(*_halves(parts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Tensor | tuple[Tensor, ...]:
        from tether.models.fast.kernels.pointwise import swiglu_backward

        parts = ctx.saved_tensors  # once: where layers are computed again, they are gone then
        by_both_S2F = swiglu_backward(grads[0].contiguous(), *_halves(parts))
        return by_both_S2F if len(parts) == 1 else by_both_S2F.chunk(2, dim=1)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_SHD: Tensor, key_SKD: Tensor, positions_S: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> tuple[Tensor, Tensor]:
        from tether.models.fast.kernels.pointwise import rotate

        ctx.save_for_backward(positions_S, cos_PR, sin_PR)
        return rotate(query_SHD, key_SKD, positions_S, cos_PR, sin_PR, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        from tether.models.fast.kernels.pointwise import rotate

        return *rotate(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors, back=True), None, None, None
