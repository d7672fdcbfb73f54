"""Compiling the kernels that decoding needs, all at once.

Triton compiles a kernel when it is first called, in compilers that are processes of their own: one after the other that takes seconds, side by
side as long as the slowest of them. What was compiled is kept on disk, and the next process finds it there.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch

from tether.models.kernels.drawing import Ledger, draw_step
from tether.models.kernels.norm import norm_forward
from tether.models.kernels.paged_attention import ENOUGH_PROGRAMS, paged_attention
from tether.models.kernels.rotary import rotate, rotate_and_store
from tether.models.kernels.swiglu import swiglu_forward

if TYPE_CHECKING:
    from tether.models.family.trunk import FamilyTrunk

TOKENS = 16
PAGE = 64


def warm_up(trunk: "FamilyTrunk") -> None:
    """Call every kernel once on zeros, in the types and widths of a model."""
    jobs = _jobs(trunk)
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(_run, [trunk.model.device] * len(jobs), jobs))


@torch.inference_mode()
def _run(device: torch.device, job: Callable[[], Any]) -> None:
    with torch.cuda.device(device):
        job()


def _jobs(trunk: "FamilyTrunk") -> list[Callable[[], Any]]:
    layer: Any = trunk.layers[0]
    norm, head = layer.attention_norm.weight, trunk.model.get_output_embeddings()
    dtype, device = norm.dtype, norm.device

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    def states(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = [trunk.num_heads, trunk.num_kv_heads, trunk.num_kv_heads]
        query, key, value = (
            part.unflatten(1, (-1, trunk.head_dim))
            for part in zeros(count, sum(sizes) * trunk.head_dim).split([size * trunk.head_dim for size in sizes], dim=1)
        )
        return (query, key, value) if layer.query_norm is None else (query.contiguous(), key.contiguous(), value)

    def attend(num_texts: int, most_new: int) -> None:
        numbers = torch.arange(num_texts + 1, dtype=torch.int32, device=device)
        tables = zeros(num_texts, 2, dtype=torch.int32)
        query = states(num_texts * most_new)[0]
        paged_attention(query, caches, tables, numbers * most_new, torch.full_like(numbers[1:], most_new), most_new, trunk.scale)

    cache = zeros(1, trunk.num_kv_heads, PAGE, trunk.head_dim)
    caches = cache, cache.clone()
    places = torch.arange(TOKENS, dtype=torch.int32, device=device)
    x_SD, gate_up = zeros(TOKENS, len(norm)), zeros(TOKENS, 2 * trunk.mlp_width)
    return [
        lambda: norm_forward(x_SD, None, norm, 1e-6, save=False),
        lambda: norm_forward(x_SD, x_SD, norm, 1e-6, save=False),
        lambda: swiglu_forward(*gate_up.chunk(2, dim=1)),
        lambda: rotate(*states(TOKENS)[:2], places, *trunk.angles, back=False),
        lambda: rotate_and_store(states(TOKENS), caches, places, places * 0, zeros(1, 2, dtype=torch.int32), trunk.angles),
        lambda: attend(-(-ENOUGH_PROGRAMS // trunk.num_kv_heads), 1),
        lambda: attend(1, TOKENS),
        lambda: draw_step(zeros(TOKENS, head.weight.shape[0], dtype=torch.float32), Ledger(TOKENS, 1, device), greedy=False),
    ]
