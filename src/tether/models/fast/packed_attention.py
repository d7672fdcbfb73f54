"""Attention over a flat row of texts that do not see each other, with gradient; texts may continue prompts that stand in the row once.

Every text of the row attends to itself, causally. Tokens that continue a shared prompt attend to the prompt as well, where every query sees
every key. Each part comes with the log-sum-exp of its scores, and by these the two are merged into exactly the softmax over both. The way
back is as simple: the backward pass of attention needs nothing but its inputs, its output and the log-sum-exp, from which it gets each
probability as exp(score - log-sum-exp). Given the merged output and log-sum-exp, the backward pass of each part alone finds the
probabilities of the softmax over both, hence its share of the exact gradient; what both parts say of a query, and what many texts say of a
prompt's keys and values, adds up.

The parts are computed by the flash kernels that torch brings: one call for all texts on a GPU, text by text on a CPU. A kernel is taken only
where it reproduces the definition, forward and backward, on a small example; the definition itself serves everywhere else.

Shape legend: S tokens of the row, H query heads, K key heads, D width of a head, T queries and X keys of a text.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tether.models.hardware import sent
from tether.models.probing import reason_against

Gradients = tuple[Tensor, Tensor, Tensor]


class PackedLengths(NamedTuple):
    """Consecutive stretches of a row."""

    lengths: tuple[int, ...]
    """Not known where they change between replays of a recorded pass."""
    cumulative: Tensor
    """Where each begins, and where the last one ends; int32, on the device."""
    longest: int
    """At least the longest of them."""
    total: int

    def slices(self) -> Iterator[slice]:
        start = 0
        for length in self.lengths:
            yield slice(start, start + length)
            start += length


def packed_lengths(lengths: Sequence[int], device: torch.device) -> PackedLengths:
    """Stretches of these lengths, none of them empty, one behind the other."""
    cumulative = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return PackedLengths(tuple(lengths), sent(cumulative, device), max(lengths), sum(lengths))


class PackedAttention:
    """The attention of one forward pass; what `LlamaBackbone.features` calls.

    Args:
        lengths: of the texts, in the order of the row.
        prompts: lengths of the shared prompts, which are the first texts of the row.
        followers: how many tokens continue each of them; these come right after the prompts, in the same order.
        scale: of the scores before the softmax.
    """

    def __init__(
        self, lengths: Sequence[int], prompts: Sequence[int] = (), followers: Sequence[int] = (), *, scale: float, device: torch.device
    ) -> None:
        self.texts = packed_lengths(lengths, device)
        self.scale = scale
        self.shared = (packed_lengths(followers, device), packed_lengths(prompts, device)) if prompts else None

    def __call__(self, layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
        out_SHD: Tensor = _Attention.apply(query_SHD, key_SKD, value_SKD, self)
        return out_SHD


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, plan: PackedAttention) -> Tensor:
        kernel = packed_kernel(query_SHD.device.type, query_SHD.dtype, query_SHD.shape[-1]).kernel
        texts = plan.texts
        out_SHD, sums_HS = kernel.forward(query_SHD, key_SKD, value_SKD, (texts, texts), True, plan.scale)
        if plan.shared is not None:
            follow, prompt = _parts(plan)
            to_prompt_SHD, prompt_sums_HS = kernel.forward(
                query_SHD[follow], key_SKD[prompt], value_SKD[prompt], plan.shared, False, plan.scale
            )
            _merge(out_SHD[follow], sums_HS[:, follow], to_prompt_SHD, prompt_sums_HS)
        ctx.save_for_backward(query_SHD, key_SKD, value_SKD, out_SHD, sums_HS)
        ctx.plan = plan
        return out_SHD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, by_out_SHD: Tensor) -> tuple[Tensor | None, ...]:
        query_SHD, key_SKD, value_SKD, out_SHD, sums_HS = ctx.saved_tensors
        plan: PackedAttention = ctx.plan
        kernel = packed_kernel(query_SHD.device.type, query_SHD.dtype, query_SHD.shape[-1]).kernel
        texts, by_out_SHD = plan.texts, by_out_SHD.contiguous()
        by_query, by_key, by_value = kernel.backward(
            by_out_SHD, (query_SHD, key_SKD, value_SKD), (out_SHD, sums_HS), (texts, texts), True, plan.scale
        )
        # Both calls get the merged output and log-sum-exp, not those of their own part: with these, exp(score - log-sum-exp) is a token's
        # probability in the softmax over prompt and text together, and each call returns its summands of the exact gradient.
        if plan.shared is not None:
            follow, prompt = _parts(plan)
            more_query, more_key, more_value = kernel.backward(
                by_out_SHD[follow],
                (query_SHD[follow], key_SKD[prompt], value_SKD[prompt]),
                (out_SHD[follow], sums_HS[:, follow].contiguous()),
                plan.shared,
                False,
                plan.scale,
            )
            by_query[follow] += more_query
            by_key[prompt] += more_key
            by_value[prompt] += more_value
        return by_query, by_key, by_value, None


def _merge(out_SHD: Tensor, sums_HS: Tensor, other_SHD: Tensor, other_sums_HS: Tensor) -> None:
    """Make the softmax over some keys, in place, that over these keys and others."""
    if out_SHD.is_cuda:
        from tether.models.fast.kernels.pointwise import merge_attention

        merge_attention(out_SHD, sums_HS, other_SHD, other_sums_HS)
        return
    # Each part is weighed by exp of its log-sum-exp; the share of the others is a sigmoid.
    share_SH1 = torch.sigmoid(other_sums_HS - sums_HS).t()[..., None]
    out_SHD.copy_(torch.lerp(out_SHD.to(share_SH1.dtype), other_SHD.to(share_SH1.dtype), share_SH1))
    sums_HS.copy_(torch.logaddexp(sums_HS, other_sums_HS))


def _parts(plan: PackedAttention) -> tuple[slice, slice]:
    """Where the tokens that continue prompts stand in the row, and where the prompts do."""
    assert plan.shared is not None
    followers, prompts = plan.shared
    return slice(prompts.total, prompts.total + followers.total), slice(0, prompts.total)


# ------------------------------------------------------------------------------------------------------------------------ kernels


class PackedKernel(Protocol):
    """Attention of the queries of each text to the keys and values of the text of the same number."""

    def forward(
        self, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, texts: tuple[PackedLengths, PackedLengths], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Outputs [S, H, D] and log-sum-exps [H, S] in float32 or better; `texts` are those of the queries and of the keys."""
        ...

    def backward(
        self,
        by_out_SHD: Tensor,
        states: Gradients,
        result: tuple[Tensor, Tensor],
        texts: tuple[PackedLengths, PackedLengths],
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Gradients by query, key and value; `result` may be that of a softmax over more keys than these."""
        ...


class _Plain:
    """The definition, text by text, in float32 or better; `_FlashOnCpu` replaces what is done for one text."""

    def forward(
        self, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, texts: tuple[PackedLengths, PackedLengths], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        repeats = query_SHD.shape[1] // key_SKD.shape[1]
        wide = torch.promote_types(query_SHD.dtype, torch.float32)
        out_SHD = torch.empty_like(query_SHD, memory_format=torch.contiguous_format)
        sums_HS = torch.empty(query_SHD.shape[1], len(query_SHD), dtype=wide, device=query_SHD.device)
        for queries, keys in zip(texts[0].slices(), texts[1].slices(), strict=True):
            states = _by_head(query_SHD[queries], 1), _by_head(key_SKD[keys], repeats), _by_head(value_SKD[keys], repeats)
            out_HTD, sums_HT = self.one_forward(*states, causal, scale)
            out_SHD[queries], sums_HS[:, queries] = out_HTD.transpose(0, 1), sums_HT
        return out_SHD, sums_HS

    def backward(
        self,
        by_out_SHD: Tensor,
        states: Gradients,
        result: tuple[Tensor, Tensor],
        texts: tuple[PackedLengths, PackedLengths],
        causal: bool,
        scale: float,
    ) -> Gradients:
        query_SHD, key_SKD, value_SKD = states
        out_SHD, sums_HS = result
        repeats = query_SHD.shape[1] // key_SKD.shape[1]
        by_query, by_key, by_value = (torch.empty_like(state, memory_format=torch.contiguous_format) for state in states)
        for queries, keys in zip(texts[0].slices(), texts[1].slices(), strict=True):
            parts = _by_head(query_SHD[queries], 1), _by_head(key_SKD[keys], repeats), _by_head(value_SKD[keys], repeats)
            by_parts = self.one_backward(
                _by_head(by_out_SHD[queries], 1), parts, (_by_head(out_SHD[queries], 1), sums_HS[:, queries]), causal, scale
            )
            by_query[queries] = by_parts[0].transpose(0, 1)
            # Heads that share a key add up what they say of it.
            by_key[keys], by_value[keys] = (by.unflatten(0, (-1, repeats)).sum(dim=1).transpose(0, 1) for by in by_parts[1:])
        return by_query, by_key, by_value

    def one_forward(self, query_HTD: Tensor, key_HXD: Tensor, value_HXD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """One text, heads first, as many of the keys as of the queries."""
        scores_HTX = _scores(query_HTD, key_HXD, causal, scale)
        sums_HT = scores_HTX.logsumexp(dim=-1)
        return ((scores_HTX - sums_HT[..., None]).exp() @ value_HXD.to(scores_HTX.dtype)).to(query_HTD.dtype), sums_HT

    def one_backward(self, by_out_HTD: Tensor, states: Gradients, result: tuple[Tensor, Tensor], causal: bool, scale: float) -> Gradients:
        query_HTD, key_HXD, value_HXD = states
        shares_HTX = (_scores(query_HTD, key_HXD, causal, scale) - result[1][..., None]).exp()
        wide = shares_HTX.dtype
        by_out_HTD = by_out_HTD.to(wide)
        by_value = shares_HTX.transpose(1, 2) @ by_out_HTD
        by_shares_HTX = by_out_HTD @ value_HXD.to(wide).transpose(1, 2)
        by_scores_HTX = shares_HTX * (by_shares_HTX - (by_out_HTD * result[0].to(wide)).sum(dim=-1, keepdim=True)) * scale
        return by_scores_HTX @ key_HXD.to(wide), by_scores_HTX.transpose(1, 2) @ query_HTD.to(wide), by_value


def _by_head(states_SKD: Tensor, repeats: int) -> Tensor:
    """[H, S, D]; heads that several queries share are repeated."""
    heads = states_SKD.transpose(0, 1)
    return heads.repeat_interleave(repeats, dim=0) if repeats > 1 else heads


def _scores(query_HTD: Tensor, key_HXD: Tensor, causal: bool, scale: float) -> Tensor:
    wide = torch.promote_types(query_HTD.dtype, torch.float32)
    scores_HTX = query_HTD.to(wide) @ key_HXD.to(wide).transpose(1, 2) * scale
    if causal:
        later_TX = torch.ones(scores_HTX.shape[1:], dtype=torch.bool, device=scores_HTX.device).triu(1)
        scores_HTX.masked_fill_(later_TX, -torch.inf)
    return scores_HTX


class _FlashOnCpu(_Plain):
    """Text by text through torch's flash attention for CPUs."""

    def one_forward(self, query_HTD: Tensor, key_HXD: Tensor, value_HXD: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        states = (state[None] for state in (query_HTD, key_HXD, value_HXD))
        out_1HTD, sums_1HT = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*states, 0.0, causal, scale=scale)
        return out_1HTD[0], sums_1HT[0]

    def one_backward(self, by_out_HTD: Tensor, states: Gradients, result: tuple[Tensor, Tensor], causal: bool, scale: float) -> Gradients:
        by_query, by_key, by_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            by_out_HTD[None], *(tensor[None] for tensor in (*states, *result)), 0.0, causal, scale=scale
        )
        return by_query[0], by_key[0], by_value[0]


class _FlashOnGpu:
    """All texts in one call; query heads that share a key head are the kernel's business."""

    def forward(
        self, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor, texts: tuple[PackedLengths, PackedLengths], causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        of_queries, of_keys = texts
        out_SHD, sums_HS, *_ = torch.ops.aten._flash_attention_forward(
            query_SHD,
            key_SKD,
            value_SKD,
            of_queries.cumulative,
            of_keys.cumulative,
            _at_least_two(of_queries),
            of_keys.longest,
            0.0,
            causal,
            False,
            scale=scale,
        )
        return out_SHD, sums_HS

    def backward(
        self,
        by_out_SHD: Tensor,
        states: Gradients,
        result: tuple[Tensor, Tensor],
        texts: tuple[PackedLengths, PackedLengths],
        causal: bool,
        scale: float,
    ) -> Gradients:
        of_queries, of_keys = texts
        by_query, by_key, by_value = torch.ops.aten._flash_attention_backward(
            by_out_SHD,
            *states,
            *result,
            of_queries.cumulative,
            of_keys.cumulative,
            _at_least_two(of_queries),
            of_keys.longest,
            0.0,
            causal,
            *_no_dropout(by_out_SHD.device),
            scale=scale,
        )
        return by_query, by_key, by_value


@lru_cache
def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    """The random state of dropout, of which there is none."""
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _at_least_two(texts: PackedLengths) -> int:
    """A bound on the lengths: for texts of one query the kernel would regroup heads as queries, a way of its own that is not needed here."""
    return max(2, texts.longest)


PLAIN = _Plain()
FUSED: dict[str, PackedKernel] = {"cpu": _FlashOnCpu(), "cuda": _FlashOnGpu()}


class KernelChoice(NamedTuple):
    """The kernel that serves, and why it is the definition where it is."""

    kernel: PackedKernel
    reason: str


@lru_cache
def packed_kernel(device_type: str, dtype: torch.dtype, width: int) -> KernelChoice:
    """The flash kernel of the device where it reproduces the definition, else the definition and the reason.

    The flash kernels are private operators of torch, whose arguments may change with a release: the reason then holds torch's own words.
    """
    fused = FUSED.get(device_type)
    if fused is None:
        return KernelChoice(PLAIN, f"torch has no flash kernel for device type '{device_type}'")
    reason = reason_against(lambda: kernel_disagreement(fused, torch.device(device_type), dtype, width))
    return KernelChoice(PLAIN if reason else fused, reason)


@torch.no_grad()
def kernel_disagreement(kernel: PackedKernel, device: torch.device, dtype: torch.dtype, width: int) -> str:
    """Why a kernel does not compute the definition; "" where it does.

    The example has grouped heads, uneven texts, both kinds of mask, and results of a softmax over more keys.
    """
    source = torch.Generator().manual_seed(0)

    def random_states(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=source).to(device, dtype)

    slack = 1e-4 if dtype in (torch.float32, torch.float64) else 4e-2
    scale = width**-0.5
    for lengths, key_lengths, causal in (((37, 5), (37, 5), True), ((3, 20), (19, 40), False)):
        texts = packed_lengths(lengths, device), packed_lengths(key_lengths, device)
        states = random_states(sum(lengths), 4, width), random_states(sum(key_lengths), 2, width), random_states(sum(key_lengths), 2, width)
        by_out_SHD = random_states(*states[0].shape)
        expected = PLAIN.forward(*states, texts, causal, scale)
        wider = (expected[0] * 0.8, expected[1] + 0.4)  # as if there were more keys
        expected_by = PLAIN.backward(by_out_SHD, states, wider, texts, causal, scale)
        found = kernel.forward(*states, texts, causal, scale)
        found_by = kernel.backward(by_out_SHD, states, wider, texts, causal, scale)
        for got, want in zip((*found, *found_by), (*expected, *expected_by), strict=True):
            if got.shape != want.shape:
                return f"the flash kernel of torch gives shape {tuple(got.shape)} where the definition gives {tuple(want.shape)}"
            difference = float((got.float() - want.float()).abs().max()) / max(1.0, float(want.abs().max()))
            if not difference <= slack:
                return f"the flash kernel of torch differs from the definition by {difference:.2g}"
    return ""
