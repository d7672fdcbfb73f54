"""Compiling the kernels that decoding and updates need, all at once.

Triton compiles a kernel when it is first called, in compilers that are processes of their own: one after the other that takes seconds, side by
side as long as the slowest of them. What was compiled is kept on disk, and the next process finds it there.

Up to version 3.6 Triton makes a C module for every signature of a kernel, and all of them have the name `__triton_launcher`. Where a file is
loaded a second time, Python does not make a module anew: it takes the one last loaded under that name, whichever that is, and puts the
contents of this file into it. A thread that had just loaded that other one and reads its `launch` a moment later would start its kernel
through a launcher of other arguments: an error where their number differs, and wrong results where only their types do. So here every
caller of the loader gets a module of its own.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from types import ModuleType
from typing import Any

import torch
from triton.runtime import build

from tether.models.fast.backbone import FeedForward, LlamaBackbone
from tether.models.fast.kernels.attention import attend_new_tokens, paged_attention
from tether.models.fast.kernels.drafts import DraftState, TextTable
from tether.models.fast.kernels.logits import DecodeState, logit_gradient, reduce_logits, sample_step
from tether.models.fast.kernels.pointwise import (
    merge_attention,
    norm_backward,
    norm_forward,
    rotate,
    rotate_and_store,
    swiglu_backward,
    swiglu_forward,
)
from tether.models.fast.kernels.products import MOST_ROWS, product, product_parts, product_swiglu
from tether.models.probing import HALF_TYPES

TOKENS = 16
PAGE = 64
BATCH_SIZES = (1, 4, 16, 32, 64, 128)
"""Of steps of decoding: how far attention is split, and whether it starts early, follows from them."""
FLOAT8_SIZES = (16, MOST_ROWS, 64, 128, 256, 512)
"""Tokens of MLPs in float8, each with products of its own."""

_load: Any = getattr(build, "_load_module_from_path", None)  # private, and later versions may do without
_loading = Lock()


def warm_up(backbone: LlamaBackbone) -> None:
    """Call every kernel once on zeros, in the types and widths of a model."""
    _run_all(backbone, _jobs(backbone))


def warm_up_gradients(backbone: LlamaBackbone) -> None:
    """The same for an update."""
    _run_all(backbone, _gradient_jobs(backbone))


def warm_up_float8(backbone: LlamaBackbone, feed_forward: FeedForward) -> None:
    """The same for an MLP in float8."""
    _run_all(backbone, [partial(_feed_forward, backbone, feed_forward, num_tokens) for num_tokens in FLOAT8_SIZES])


def _feed_forward(backbone: LlamaBackbone, feed_forward: FeedForward, num_tokens: int) -> None:
    """An MLP, and the norm behind it."""
    layer: Any = backbone.layers[0]
    norm, zeros = layer.attention_norm.weight, partial(_zeros, backbone)
    x_SD = zeros(num_tokens, len(norm))
    few = backbone.few_by_kernels and num_tokens <= MOST_ROWS
    added = product_parts(zeros(num_tokens, layer.output.in_features), layer.output.weight) if few else x_SD
    norm_forward(x_SD, feed_forward(added, x_SD)[0], norm, 1e-6, save=False)


def warm_up_drafts(backbone: LlamaBackbone, sizes: Iterable[tuple[int, int, int]]) -> None:
    """The same for steps with drafts, by their rows, the tokens that are fed to all, and to each at most."""
    sizes = list(sizes)
    texts = TextTable(1, PAGE, backbone.model.device)
    _run_all(backbone, [*_draft_jobs(texts, sizes), *(partial(_attend_new, backbone, *size) for size in sizes)])


def keep_launchers_apart() -> None:
    """From here on each kernel starts through the launcher that was made for it. Launchers are still built at the same time, outside the lock."""
    if _load is not None:
        build._load_module_from_path = _load_copy


def _load_copy(name: str, path: str) -> ModuleType:
    copy = ModuleType(name)
    with _loading:
        vars(copy).update(vars(_load(name, path)))
    return copy


def _run_all(backbone: LlamaBackbone, jobs: list[Callable[[], Any]]) -> None:
    keep_launchers_apart()
    with ThreadPoolExecutor(len(jobs)) as pool:
        list(pool.map(_run, [backbone.model.device] * len(jobs), jobs))


@torch.inference_mode()
def _run(device: torch.device, job: Callable[[], Any]) -> None:
    with torch.cuda.device(device):
        job()


def _jobs(backbone: LlamaBackbone) -> list[Callable[[], Any]]:
    backbone.join()
    layer: Any = backbone.layers[0]
    norm, head = layer.attention_norm.weight, backbone.model.get_output_embeddings()
    dtype, device = norm.dtype, norm.device
    zeros, states = partial(_zeros, backbone), partial(_states, backbone)

    def attend(num_texts: int, most_new: int) -> None:
        numbers = torch.arange(num_texts + 1, dtype=torch.int32, device=device)
        tables = zeros(num_texts, 2, dtype=torch.int32)
        query = states(num_texts * most_new)[0]
        blocks = zeros(num_texts, 2, dtype=torch.int32)
        paged_attention(query, caches, tables, numbers * most_new, torch.full_like(numbers[1:], most_new), blocks, backbone.scale)

    def multiply(num_tokens: int) -> list[Callable[[], Any]]:
        """The products of few rows, and the norms behind those in parts."""
        x_SD, mixed_SN, inner_SF = (zeros(num_tokens, width) for width in (len(norm), layer.output.in_features, backbone.mlp_width))
        return [
            lambda: product(x_SD, layer.states.weight, layer.states.bias),
            lambda: norm_forward(x_SD, product_parts(mixed_SN, layer.output.weight), norm, 1e-6, save=False),
            lambda: product_swiglu(x_SD, layer.gate_up.weight),
            lambda: norm_forward(x_SD, product_parts(inner_SF, layer.down.weight), norm, 1e-6, save=False),
        ]

    caches = _caches(backbone)
    few = (TOKENS, MOST_ROWS) if backbone.few_by_kernels and dtype in HALF_TYPES else ()
    positions = torch.arange(TOKENS, dtype=torch.int32, device=device)
    placed = None if backbone.axes is None else (zeros(3, TOKENS, dtype=torch.int32), backbone.axes)
    logits = zeros(TOKENS, head.weight.shape[0], dtype=torch.float32)
    never_N = None if backbone.vision is None else zeros(len(backbone.vision.never_sampled), dtype=torch.int32)
    x_SD, gate_up = zeros(TOKENS, len(norm)), zeros(TOKENS, 2 * backbone.mlp_width)
    return [
        lambda: norm_forward(x_SD, None, norm, 1e-6, save=False),
        lambda: norm_forward(x_SD, x_SD, norm, 1e-6, save=False),
        lambda: swiglu_forward(*gate_up.chunk(2, dim=1)),
        lambda: rotate(*states(TOKENS)[:2], positions, *backbone.angles, back=False),
        lambda: rotate_and_store(states(TOKENS), caches, positions, positions * 0, zeros(1, 2, dtype=torch.int32), backbone.angles, placed),
        *(partial(_attend_new, backbone, num_texts, num_texts, 1) for num_texts in BATCH_SIZES),
        *(job for num_tokens in few for job in multiply(num_tokens)),
        lambda: attend(1, TOKENS),
        lambda: sample_step(logits, DecodeState(TOKENS, 1, device), greedy=False, never_N=never_N),
    ]


def _gradient_jobs(backbone: LlamaBackbone) -> list[Callable[[], Any]]:
    norm: Any = backbone.layers[0].attention_norm.weight
    head = backbone.model.get_output_embeddings()
    x_SD, inner_SF, gate_up = (_zeros(backbone, TOKENS, width) for width in (len(norm), backbone.mlp_width, 2 * backbone.mlp_width))
    logits, numbers = (_zeros(backbone, *shape, dtype=torch.float32) for shape in ((TOKENS, head.weight.shape[0]), (3, TOKENS)))
    targets = torch.zeros(TOKENS, dtype=torch.long, device=norm.device)
    query, key = (part.contiguous() for part in _states(backbone, TOKENS)[:2])
    sums_HS = _zeros(backbone, backbone.num_heads, TOKENS, dtype=torch.float32)

    def normed(delta: torch.Tensor | None) -> None:
        _, total, scale = norm_forward(x_SD, delta, norm, 1e-6, save=True)
        norm_backward(x_SD, delta, total, scale, norm)

    def differentiate(by_entropy: torch.Tensor | None) -> None:
        logit_gradient(logits, targets, 1.0, (numbers[0], numbers[1]), (numbers[2], by_entropy), norm.dtype)

    return [
        *(partial(normed, delta) for delta in (None, x_SD)),
        lambda: swiglu_backward(inner_SF, *gate_up.chunk(2, dim=1)),
        *(partial(rotate, query, key, targets, *backbone.angles, back=back) for back in (False, True)),
        lambda: merge_attention(query, sums_HS, torch.zeros_like(query), torch.zeros_like(sums_HS)),
        lambda: reduce_logits(logits, targets, 1.0, (numbers[0], numbers[1], numbers[2])),
        *(partial(differentiate, by_entropy) for by_entropy in (None, numbers[2])),
    ]


def _draft_jobs(texts: TextTable, sizes: Iterable[tuple[int, int, int]]) -> list[Callable[[], Any]]:
    """The kernels that make and verify drafts; each in its own state, since they run at the same time."""
    number = torch.zeros(1, dtype=torch.int32, device=texts.device)
    states = [DraftState(num_rows, most_each, 1, 1, texts.device, num_fed) for num_rows, num_fed, most_each in sizes]
    for state in states:
        state.lengths_B.fill_(1)  # a text has at least one token
    return [lambda: texts.learn(number, number, number), *(partial(job, state) for state in states for job in (texts.guess, texts.accept))]


def _attend_new(backbone: LlamaBackbone, num_texts: int, num_tokens: int, most_new: int) -> None:
    zeros = partial(_zeros, backbone, dtype=torch.int32)
    tables, lengths, arrived = zeros(num_texts, 2), zeros(num_texts) + 1, zeros(num_texts * backbone.num_kv_heads)
    ragged = None if most_new == 1 else (lengths - 1, lengths, most_new)
    inputs = _caches(backbone), tables, lengths, backbone.angles, backbone.scale, arrived
    attend_new_tokens(_states(backbone, num_tokens), *inputs, ragged=ragged, shifts_B=zeros(num_texts) if backbone.sections else None)


def _zeros(backbone: LlamaBackbone, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    norm: Any = backbone.layers[0].attention_norm
    return torch.zeros(shape, dtype=dtype or norm.weight.dtype, device=norm.weight.device)


def _states(backbone: LlamaBackbone, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values as the joint projection leaves them."""
    sizes = [backbone.num_heads, backbone.num_kv_heads, backbone.num_kv_heads]
    query, key, value = (
        part.unflatten(1, (-1, backbone.head_dim))
        for part in _zeros(backbone, count, sum(sizes) * backbone.head_dim).split([size * backbone.head_dim for size in sizes], dim=1)
    )
    return (query, key, value) if backbone.layers[0].query_norm is None else (query.contiguous(), key.contiguous(), value)


def _caches(backbone: LlamaBackbone) -> tuple[torch.Tensor, torch.Tensor]:
    cache = _zeros(backbone, 1, backbone.num_kv_heads, PAGE, backbone.head_dim)
    return cache, cache.clone()
