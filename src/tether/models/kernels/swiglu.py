"""silu(gate) * up in one pass over memory, and its gradient. The two halves may lie in one matrix, beside each other.

Shape legend: S tokens, F width of the layer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


@triton.jit
def _forward(gate_ptr, up_ptr, out_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = wide / (1.0 + tl.exp(-wide))
    tl.store(out_ptr + row * width + columns, (silu * up.to(tl.float32)).to(gate.dtype), mask=inside)


@triton.jit
def _backward(grad_ptr, gate_ptr, up_ptr, gate_grad_ptr, up_grad_ptr, gate_stride, up_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    grad = tl.load(grad_ptr + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    share = 1.0 / (1.0 + tl.exp(-wide))
    silu = wide * share
    tl.store(up_grad_ptr + row * width + columns, (grad * silu).to(gate.dtype), mask=inside)
    slope = share * (1.0 + wide * (1.0 - share))
    tl.store(gate_grad_ptr + row * width + columns, (grad * up * slope).to(gate.dtype), mask=inside)


def swiglu_forward(gate_SF: Tensor, up_SF: Tensor) -> Tensor:
    """Contiguous [S, F]; the rows of both inputs may stand apart."""
    num_rows, width = gate_SF.shape
    out_SF = torch.empty(num_rows, width, dtype=gate_SF.dtype, device=gate_SF.device)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _forward[grid](gate_SF, up_SF, out_SF, gate_SF.stride(0), up_SF.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return out_SF


def swiglu_backward(grad_SF: Tensor, gate_SF: Tensor, up_SF: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gate and up from a contiguous gradient of the product."""
    num_rows, width = gate_SF.shape
    gate_grad_SF, up_grad_SF = torch.empty_like(grad_SF), torch.empty_like(grad_SF)
    grid = (num_rows, triton.cdiv(width, BLOCK))
    _backward[grid](grad_SF, gate_SF, up_SF, gate_grad_SF, up_grad_SF, gate_SF.stride(0), up_SF.stride(0), width, BLOCK=BLOCK, num_warps=4)
    return gate_grad_SF, up_grad_SF
