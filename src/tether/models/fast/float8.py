"""The MLPs of a model in float8 (`rollout.precision: fp8`): a copy that a decoder reads in place of the learner's weights.

Gate, up and down hold seven eighths of a layer's weights, and a step of decoding lasts as long as reading them. Projections of attention stay as they are: of
their 14 us for 128 tokens of a 3B model float8 saves 3.5, less a kernel that rounds activations and one that adds parts up. So does the head: it would gain 2% of a step, and half as
much again would be off. Activations are rounded token by token on the way (kernels/float8.py).

`refresh` writes the learner's present weights into the copy, in place, so that steps that were recorded as CUDA graphs read the new ones. Adapters
are worked in.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tether.models.fast.kernels.float8 import Float8Rows, float8_product, float8_product_parts, norm_float8, swiglu_float8
from tether.models.fast.layers import Layer, base_linear

LARGEST = torch.finfo(torch.float8_e4m3fn).max
LEAST_PEAK = 1e-12
"""Of a row: zeros have a scale, too."""


def quantise(x_MK: Tensor) -> Float8Rows:
    """Each row divided by its scale, |x| at most over 448, and rounded to the nearest float8."""
    scale_M = x_MK.abs().amax(dim=1).float().clamp_(min=LEAST_PEAK) / LARGEST
    return Float8Rows((x_MK / scale_M[:, None]).to(torch.float8_e4m3fn), scale_M)


class Float8Mlp:
    """The MLP of one layer."""

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        gate, up, down = self._weights()
        self._gate_up, self._down = quantise(torch.cat([gate, up])), quantise(down)

    def refresh(self) -> None:
        """Take over the learner's weights."""
        gate, up, down = self._weights()
        for weight, target in ((gate, _part(self._gate_up, 0, len(gate))), (up, _part(self._gate_up, len(gate), None)), (down, self._down)):
            for new, old in zip(quantise(weight), target, strict=True):
                old.copy_(new)

    def _weights(self) -> list[Tensor]:
        return [_weight_of(linear) for linear in (self._layer.gate, self._layer.up, self._layer.down)]

    def __call__(self, delta: Tensor, residual_SD: Tensor) -> tuple[Tensor, Tensor]:
        """(what the MLP adds, the residual stream before it) from what attention adds and the stream before that."""
        norm: Any = self._layer.mlp_norm
        normed_SD, residual_SD = norm_float8(delta, residual_SD, norm.weight, norm.variance_epsilon)
        product_SF = swiglu_float8(float8_product(normed_SD, self._gate_up, residual_SD.dtype))
        return float8_product_parts(product_SF, self._down, residual_SD.dtype), residual_SD


class Float8Mlps:
    """Those of all layers; in the order of the layers."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            self.layers = [Float8Mlp(layer) for layer in layers]

    def refresh(self) -> None:
        """Take over the learner's weights."""
        with torch.no_grad():
            for mlp in self.layers:
                mlp.refresh()


def _part(rows: Float8Rows, start: int, stop: int | None) -> Float8Rows:
    return Float8Rows(rows.values_MK[start:stop], rows.scale_M[start:stop])


def _weight_of(linear: Any) -> Tensor:
    """With its adapters worked in."""
    weight: Tensor = base_linear(linear).weight
    for adapter in linear.active_adapters if hasattr(linear, "get_base_layer") else ():
        weight = weight + linear.get_delta_weight(adapter).to(weight.dtype)
    return weight
