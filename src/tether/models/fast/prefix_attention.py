"""Attention to a prefix that many continuations share, computed without copying the prefix.

Texts stand behind one another in one row, so that no layer computes padding. A `Pass` says where each of them lies, and which stored prefix
it continues. Attention is done in two parts: a text's tokens among themselves, causally, and, for all tokens that continue the same
prefix at once, against the prefix's keys and values, where every query sees every key and no mask is needed. Each part comes with the
log-sum-exp of its scores, and the two are merged by these into exactly the softmax over both.

The parts are put into a model through transformers' registry of attention functions, under a name of their own (`attending`): any
architecture that asks the registry takes them. What an architecture does beyond scaled dot products (soft caps, sinks, biases) is refused
with `NotShared`, and the caller computes such a model in another way.

Shape legend: S tokens of the row, B texts, T tokens of the longest, H query heads, K key heads, D width of a head, X tokens of a prefix.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from tether.models.probing import reason_against

NAME = "tether_shared_prefix"
BEYOND_DOT_PRODUCTS = ("softcap", "s_aux", "position_bias", "head_mask")
"""Arguments by which architectures ask an attention function for more than this one does."""
PLAIN_QUERIES = 1024
"""Queries at a time where no fused kernel serves."""

PrefixKernel = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""(queries [B, H, T, D], keys, values [B, H, X, D], causal, scale) -> (output [B, H, T, D], log-sum-exp [B, H, T] in float32)."""


class NotShared(RuntimeError):
    """The model's attention is not one that can be split into a prefix and the rest."""


class PrefixSpan(NamedTuple):
    """Tokens `start:stop` of the row continue the prefix that is stored in `prefix_start:prefix_stop`."""

    start: int
    stop: int
    prefix_start: int
    prefix_stop: int


@dataclass(eq=False)
class Pass:
    """One forward pass over a row of texts."""

    pieces_BT: Tensor
    """Where the tokens of each text stand in the row; a shorter text repeats its last one, which nothing of it sees."""
    padded_index_S: Tensor
    """Where each token of the row stands in the flattened `pieces_BT`."""
    spans: Sequence[PrefixSpan] = ()
    """Which tokens continue which prefix, in the order of the row; empty for texts without a prefix."""
    stored: "dict[nn.Module, tuple[Tensor, Tensor]]" = field(default_factory=dict)
    """Keys and values [1, K, S, D] by attention layer: read where there are spans, written where there are none."""
    is_even: bool = False
    """Whether all texts are equally long: they can then be read where they stand."""
    window: int = 2**31
    """The shortest attention window that a layer has asked for; not applied here."""


_current: ContextVar[Pass] = ContextVar("tether_current_pass")


@contextmanager
def attending(model: PreTrainedModel, current: Pass) -> Iterator[None]:
    """The model attends in this way inside the block, and as it did before afterwards."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}.values()
    before = [(config, config._attn_implementation_internal) for config in configs if hasattr(config, "_attn_implementation_internal")]
    token = _current.set(current)
    try:
        for config, _ in before:
            config._attn_implementation_internal = NAME
        yield
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
        _current.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What a layer calls: query [1, H, S, D], key and value [1, K, S, D] in, [1, S, H, D] out."""
    current = _current.get()
    asked = [name for name in BEYOND_DOT_PRODUCTS if others.get(name) is not None]
    if asked or attention_mask is not None or len(query) != 1:
        raise NotShared(f"{type(module).__name__} asks for {', '.join(asked) or 'a mask'}")
    if sliding_window:
        current.window = min(current.window, int(sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    own_SHD, own_SH = _among_themselves(current, query, key, value, scale)
    if not current.spans:
        if module in current.stored:
            raise NotShared(f"{type(module).__name__} attends twice in one pass")
        current.stored[module] = key, value
        return own_SHD[None], None
    prefix_SHD, prefix_SH = _to_prefixes(current.spans, query, *current.stored[module], scale)
    own_share_SH1, prefix_share_SH1 = (torch.sigmoid(ahead)[..., None] for ahead in (own_SH - prefix_SH, prefix_SH - own_SH))
    merged_SHD = (own_SHD * own_share_SH1).addcmul_(prefix_SHD, prefix_share_SH1)  # in float32: the shares are
    return merged_SHD.to(query.dtype)[None], None


AttentionInterface.register(NAME, _attention)


def _among_themselves(current: Pass, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Causal attention inside each text: [S, H, D] and its log-sum-exp [S, H]."""
    num_heads, pieces_BT = query.shape[1], current.pieces_BT
    if current.is_even:
        query_BHTD, key_BKTD, value_BKTD = (states[0].unflatten(1, pieces_BT.shape).transpose(0, 1) for states in (query, key, value))
    else:
        query_BHTD, key_BKTD, value_BKTD = (states[0].transpose(0, 1)[pieces_BT].transpose(1, 2) for states in (query, key, value))
    repeats = num_heads // key.shape[1]
    key_BHTD, value_BHTD = (states.repeat_interleave(repeats, dim=1) if repeats > 1 else states for states in (key_BKTD, value_BKTD))
    kernel = prefix_kernel(query.device.type, query.dtype, query.shape[-1], value.shape[-1]).kernel
    out_BHTD, sums_BHT = kernel(query_BHTD, key_BHTD, value_BHTD, True, scale)
    out_SHD, sums_SH = out_BHTD.transpose(1, 2).flatten(0, 1), sums_BHT.transpose(1, 2).flatten(0, 1)
    return (out_SHD, sums_SH) if current.is_even else (out_SHD[current.padded_index_S], sums_SH[current.padded_index_S])


def _to_prefixes(spans: Sequence[PrefixSpan], query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of all tokens to the prefixes they continue: [S, H, D] and its log-sum-exp [S, H]."""
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    kernel = prefix_kernel(query.device.type, query.dtype, query.shape[-1], value.shape[-1]).kernel
    outs, sums = [], []
    for start, stop, prefix_start, prefix_stop in spans:
        # Query heads that share a key head are more queries of that head: nothing is repeated.
        folded_1KND = query[:, :, start:stop].reshape(1, num_key_heads, -1, query.shape[-1])
        prefix = slice(prefix_start, prefix_stop)
        out, sum_ = kernel(folded_1KND, key[:, :, prefix], value[:, :, prefix], False, scale)
        outs.append(out.reshape(num_heads, stop - start, -1))
        sums.append(sum_.reshape(num_heads, stop - start))
    return torch.cat(outs, dim=1).transpose(0, 1), torch.cat(sums, dim=1).transpose(0, 1)


# ------------------------------------------------------------------------------------------------------------------------ kernels


def _fused(name: str, *before: Any, after: tuple[Any, ...] = ()) -> PrefixKernel:
    """An attention kernel of torch by its name, with what it takes between the states and `causal`, and behind it."""

    def attend(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        out, sums, *_ = getattr(torch.ops.aten, name)(query, key, value, *before, causal, *after, scale=scale)
        return out, sums[:, :, : query.shape[2]]  # one of them rounds the number of queries up

    return attend


def plain_attention(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """The definition, in float32 or better, for any device; a part of the queries at a time."""
    wide = torch.promote_types(query.dtype, torch.float32)
    key_BHDX, value_BHXD = key.to(wide).transpose(-1, -2), value.to(wide)
    columns_X = torch.arange(key.shape[2], device=query.device)
    outs, sums = [], []
    for start in range(0, query.shape[2], PLAIN_QUERIES):
        scores = query[:, :, start : start + PLAIN_QUERIES].to(wide) @ key_BHDX * scale
        if causal:
            rows_T1 = torch.arange(start, start + scores.shape[2], device=query.device)[:, None]
            scores.masked_fill_(columns_X > rows_T1, -torch.inf)
        sums.append(torch.logsumexp(scores, dim=-1))
        outs.append((scores - sums[-1][..., None]).exp() @ value_BHXD)
    return torch.cat(outs, dim=2).to(query.dtype), torch.cat(sums, dim=2)


FUSED: dict[str, tuple[PrefixKernel, ...]] = {
    "cpu": (_fused("_scaled_dot_product_flash_attention_for_cpu", 0.0),),
    "cuda": (
        _fused("_scaled_dot_product_flash_attention", 0.0, after=(False,)),
        _fused("_scaled_dot_product_efficient_attention", None, True, 0.0),
    ),
}


class PrefixKernelChoice(NamedTuple):
    """The kernel that serves, and why it is the definition where it is."""

    kernel: PrefixKernel
    reason: str


@lru_cache
def prefix_kernel(device_type: str, dtype: torch.dtype, width: int, value_width: int) -> PrefixKernelChoice:
    """The first fused kernel of the device that reproduces the definition, else the definition and the reason."""
    if width != value_width:
        return PrefixKernelChoice(plain_attention, f"keys are {width} wide and values {value_width}; fused kernels need them equal")
    reasons = []
    for kernel in FUSED.get(device_type, ()):
        reason = reason_against(partial(_kernel_disagreement, kernel, device_type, dtype, width))
        if not reason:
            return PrefixKernelChoice(kernel, "")
        reasons.append(reason)
    return PrefixKernelChoice(plain_attention, "; ".join(reasons) or f"torch has no fused attention for device type '{device_type}'")


def _kernel_disagreement(kernel: PrefixKernel, device_type: str, dtype: torch.dtype, width: int) -> str:
    """Why a kernel does not compute the definition; "" where it does."""
    source = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 37, width, generator=source).to(device_type, dtype) for _ in range(3))
    slack = 1e-4 if dtype in (torch.float32, torch.float64) else 3e-2
    for queries, causal in ((query, True), (query[:, :, :5], False)):
        expected = plain_attention(queries, key, value, causal, width**-0.5)
        found = kernel(queries, key, value, causal, width**-0.5)
        for got, want in zip(found, expected, strict=True):
            if got.shape != want.shape:
                return f"the fused attention of torch gives shape {tuple(got.shape)} where the definition gives {tuple(want.shape)}"
            difference = float((got.float() - want.float()).abs().max())
            if not difference <= slack:
                return f"the fused attention of torch differs from the definition by {difference:.2g}"
    return ""
