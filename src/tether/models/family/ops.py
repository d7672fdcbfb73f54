"""The operations between a layer's matrix products: Triton kernels on a CUDA device, plain torch elsewhere, with gradients in both.

Everything is computed in float32 inside an operation and rounded to the model's precision at its end.

Shape legend: S tokens, N width of a row, F width of the MLP, H query heads, K key heads, D width of a head, P positions, R half of D.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight over the last dimension, [S, N] or [S, heads, N]."""
    if x.is_cuda:
        normed: Tensor = _Norm.apply(x.contiguous(), weight_N, eps) if torch.is_grad_enabled() else _norm(x, None, weight_N, eps)[0]
        return normed
    wide = x.float()
    return weight_N * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(delta_SN: Tensor, residual_SN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(norm of the sum, the sum): a layer's output goes into the residual stream, and the next norm reads it there."""
    if not residual_SN.is_cuda:
        total_SN = residual_SN + delta_SN
        return rms_norm(total_SN, weight_N, eps), total_SN
    if torch.is_grad_enabled():
        found: tuple[Tensor, Tensor] = _AddNorm.apply(delta_SN.contiguous(), residual_SN.contiguous(), weight_N, eps)
        return found
    return _norm(residual_SN, delta_SN, weight_N, eps)


def swiglu(gate_SF: Tensor, up_SF: Tensor) -> Tensor:
    """silu(gate) * up."""
    if not gate_SF.is_cuda:
        return torch.nn.functional.silu(gate_SF) * up_SF
    if torch.is_grad_enabled():
        product: Tensor = _SwiGlu.apply(gate_SF, up_SF)
        return product
    from tether.models.kernels.swiglu import swiglu_forward

    return swiglu_forward(gate_SF, up_SF)


def rotary(query_SHD: Tensor, key_SKD: Tensor, positions_S: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by their positions."""
    if query_SHD.is_cuda:
        turned: tuple[Tensor, Tensor] = _Rotary.apply(query_SHD, key_SKD, positions_S, cos_PR, sin_PR)
        return turned
    cos_S1R, sin_S1R = cos_PR[positions_S][:, None], sin_PR[positions_S][:, None]
    return _turned(query_SHD, cos_S1R, sin_S1R), _turned(key_SKD, cos_S1R, sin_S1R)


def _turned(x_SHD: Tensor, cos_S1R: Tensor, sin_S1R: Tensor) -> Tensor:
    first, second = x_SHD.chunk(2, dim=-1)
    return torch.cat([first * cos_S1R - second * sin_S1R, second * cos_S1R + first * sin_S1R], dim=-1)


def _norm(x: Tensor, delta: Tensor | None, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    from tether.models.kernels.norm import norm_forward

    return norm_forward(x, delta, weight_N, eps, save=False)[:2]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_N: Tensor, eps: float) -> Tensor:
        from tether.models.kernels.norm import norm_forward

        normed, _, scale = norm_forward(x, None, weight_N, eps, save=True)
        ctx.save_for_backward(x, scale, weight_N)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        from tether.models.kernels.norm import norm_backward

        return *norm_backward(grads[0].contiguous(), None, *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta_SN: Tensor, residual_SN: Tensor, weight_N: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from tether.models.kernels.norm import norm_forward

        normed_SN, total_SN, scale_S = norm_forward(residual_SN, delta_SN, weight_N, eps, save=True)
        ctx.save_for_backward(total_SN, scale_S, weight_N)
        return normed_SN, total_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from tether.models.kernels.norm import norm_backward

        out_SN, weight_N = norm_backward(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors)
        return out_SN, out_SN, weight_N, None


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_SF: Tensor, up_SF: Tensor) -> Tensor:
        from tether.models.kernels.swiglu import swiglu_forward

        ctx.save_for_backward(gate_SF, up_SF)
        return swiglu_forward(gate_SF, up_SF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        from tether.models.kernels.swiglu import swiglu_backward

        return swiglu_backward(grads[0].contiguous(), *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_SHD: Tensor, key_SKD: Tensor, positions_S: Tensor, cos_PR: Tensor, sin_PR: Tensor) -> tuple[Tensor, Tensor]:
        from tether.models.kernels.rotary import rotate

        ctx.save_for_backward(positions_S, cos_PR, sin_PR)
        return rotate(query_SHD, key_SKD, positions_S, cos_PR, sin_PR, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        from tether.models.kernels.rotary import rotate

        return *rotate(grads[0].contiguous(), grads[1].contiguous(), *ctx.saved_tensors, back=True), None, None, None
