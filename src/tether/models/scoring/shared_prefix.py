"""Prompts computed once, and passes over everything that may follow them.

`SharedPrefix` feeds the prompts of a block through the model, keeps the keys and values of every layer, and then feeds continuations:
all pairs of some of its prompts and some texts in one row. How they see what they may see, and nothing else, is for one of two: a kernel
over the family's forward pass on a CUDA device (`text_attention` of models/fast/kernels/attention.py), and models/fast/prefix_attention.py
for all other models.
`shares_prefix` finds out whether a model computes in this way what it computes plainly.

Shape legend: S tokens of a row, B texts in it, T tokens of the longest, D width of the features.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.layers import language_part
from tether.models.fast.prefix_attention import NotShared, Pass, PrefixSpan, attending, prefix_kernel
from tether.models.policy import Policy
from tether.models.probing import attempt, disagreement_with, probe_ids

Ids = Sequence[int]
Counts = npt.NDArray[np.int64]
PROBE_PROMPT_LENGTHS, PROBE_TEXT_LENGTHS = (5, 3), (4, 2)
"""Two short prompts and texts, within small attention windows; their words come from all over the vocabulary (`probe_ids`). The first words
of a vocabulary are often special tokens, whose features in half precision are far from float32 whichever code computes them (seen: 0.29 with
real SmolLM2 weights)."""


class Continuations(NamedTuple):
    """What one pass computed."""

    features_SD: Tensor
    targets_S: Tensor
    """The token that each feature predicts: the text's tokens from the second on."""
    lengths: npt.NDArray[np.int64]
    """How many tokens of the row belong to each pair, prompts in the outer and texts in the inner order."""


class SharedPrefix:
    """A block of prompts whose keys and values are stored."""

    def __init__(self, policy: Policy, prompts: Sequence[Ids]) -> None:
        self._lengths = np.array([len(prompt) for prompt in prompts])
        self._starts = np.cumsum(self._lengths) - self._lengths
        ids = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
        positions, self._after = np.arange(len(ids)) - np.repeat(self._starts, self._lengths), self._lengths
        if policy.places is not None:
            placed = [policy.places(prompt) for prompt in prompts]
            positions = np.concatenate([places_3T for places_3T, _ in placed], axis=1)
            self._after = np.array([after_T[-1] for _, after_T in placed])
        _ = policy.separable_head  # to be known before a pass changes how the module attends
        backbone = _kernel_backbone(policy)
        self._row: _Row = _RegistryRow(policy) if backbone is None else _KernelRow(backbone)
        features_SD = self._row.features(self._lengths, (), ids, positions)
        self.window = self._row.window
        self.last_PD = features_SD[torch.from_numpy(self._starts + self._lengths - 1).to(features_SD.device)]
        """The features of each prompt's last token, which predict a continuation's first."""

    def extend(self, prompts: range, texts: Sequence[Ids]) -> Continuations:
        """Feed every text after every one of some prompts. A text's last token predicts nothing and is not fed."""
        fed = np.tile([len(text) - 1 for text in texts], len(prompts))
        starts = np.cumsum(fed) - fed
        flat = np.concatenate([np.asarray(text, dtype=np.int64) for text in texts])
        offsets = np.tile(np.cumsum([0, *(len(text) for text in texts[:-1])]), len(prompts))
        steps_S = np.arange(fed.sum()) - np.repeat(starts, fed)
        source_S = steps_S + np.repeat(offsets, fed)
        after_S = np.repeat(np.repeat(self._after[prompts], len(texts)), fed)
        each = int(fed.sum()) // len(prompts)
        spans = [
            PrefixSpan(n * each, (n + 1) * each, int(self._starts[p]), int(self._starts[p] + self._lengths[p]))
            for n, p in enumerate(prompts)
        ]
        features_SD = self._row.features(fed, spans, flat[source_S], steps_S + after_S)
        return Continuations(features_SD, torch.from_numpy(flat[source_S + 1]).to(features_SD.device), fed)


class _Row(Protocol):
    """Computes rows of texts: first the prompts, whose keys and values it stores, then continuations of them."""

    window: int
    """The shortest attention window that a layer has asked for; not applied."""

    def features(self, lengths_B: Counts, spans: Sequence[PrefixSpan], ids_S: Counts, positions_S: Counts) -> Tensor:
        """[S, D] of a row of texts with these lengths; spans say which prompts they continue, none for the prompts themselves. Positions are [3, S]
        where images have places of their own."""
        ...


class _RegistryRow:
    """Through the module, whose layers ask transformers' registry for their attention."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.window = 2**31

    def features(self, lengths_B: Counts, spans: Sequence[PrefixSpan], ids_S: Counts, positions_S: Counts) -> Tensor:
        policy, device = self._policy, self._policy.device
        starts_B = np.cumsum(lengths_B) - lengths_B
        longest = int(lengths_B.max())
        pieces_BT = starts_B[:, None] + np.minimum(np.arange(longest), lengths_B[:, None] - 1)
        steps_S = np.arange(lengths_B.sum()) - np.repeat(starts_B, lengths_B)
        padded_index_S = steps_S + np.repeat(np.arange(len(lengths_B)) * longest, lengths_B)
        pieces, padded_index, ids, positions = (
            torch.from_numpy(array).to(device) for array in (pieces_BT, padded_index_S, ids_S, positions_S)
        )
        current = Pass(pieces, padded_index, spans, self._stored, is_even=bool((lengths_B == longest).all()))
        with attending(language_part(policy.module), current):  # not of a vision tower
            features_SD: Tensor = policy.features(input_ids=ids[None], position_ids=positions[..., None, :], use_cache=False)[0]
        if not self._stored:
            raise NotShared(f"{type(policy.module).__name__} does not ask for an attention function")
        self.window = min(self.window, current.window)
        return features_SD


class _KernelRow:
    """Through the family's forward pass, by one kernel; for CUDA devices."""

    def __init__(self, backbone: LlamaBackbone) -> None:
        self._backbone = backbone
        self._stored: list[tuple[Tensor, Tensor]] = []
        self.window = 2**31

    def features(self, lengths_B: Counts, spans: Sequence[PrefixSpan], ids_S: Counts, positions_S: Counts) -> Tensor:
        from tether.models.fast.kernels.attention import text_attention

        ends_B = np.cumsum(lengths_B)
        # A text continues the prompt of the span that it ends in.
        prefixes = np.array([(span.prefix_start, span.prefix_stop) for span in spans], dtype=np.int32).reshape(-1, 2)
        of_text = np.searchsorted([span.stop for span in spans], ends_B)
        device = self._backbone.model.device
        ids, positions, starts_B1, prefixes_B2 = (
            torch.from_numpy(array).to(device)
            for array in (ids_S, positions_S, np.concatenate([[0], ends_B]).astype(np.int32), prefixes[of_text] if spans else prefixes)
        )

        def attend(layer: int, query_SHD: Tensor, key_SKD: Tensor, value_SKD: Tensor) -> Tensor:
            if not spans:
                self._stored.append((key_SKD.contiguous(), value_SKD.contiguous()))
            prefix = (*self._stored[layer], prefixes_B2) if spans else None
            return text_attention(query_SHD, key_SKD, value_SKD, starts_B1, int(lengths_B.max()), self._backbone.scale, prefix)

        return self._backbone.features(ids, positions, attend)


class SharedReach(NamedTuple):
    """How far shared prefixes are exact for a model."""

    tokens: int | None
    """Tokens of prompt and text together up to which they are; None where they never are."""
    reason: str
    """Why they are not, or why they are slow."""


def shares_prefix(policy: Policy) -> SharedReach:
    """Find out whether a model computes with a shared prefix what it computes plainly."""

    def probe() -> SharedReach:
        found, raised = attempt(lambda: _probe(policy))
        return SharedReach(None, raised) if found is None else found

    return policy.once("shared prefix", probe)


@torch.inference_mode()
def _probe(policy: Policy) -> SharedReach:
    lengths = (*PROBE_PROMPT_LENGTHS, *PROBE_TEXT_LENGTHS)
    pieces = [piece.tolist() for piece in probe_ids(policy.module, sum(lengths))[0].split(lengths)]
    prompts, texts = pieces[: len(PROBE_PROMPT_LENGTHS)], pieces[len(PROBE_PROMPT_LENGTHS) :]
    prefix = SharedPrefix(policy, prompts)
    found_SD = prefix.extend(range(len(prompts)), texts).features_SD

    def plainly() -> Tensor:
        plain = []
        for prompt in prompts:
            for text in texts:
                ids_1T = torch.tensor([[*prompt, *text[:-1]]], device=policy.device)
                plain.append(policy.features(input_ids=ids_1T, use_cache=False)[0, len(prompt) :])
        return torch.cat(plain)

    reason = disagreement_with(policy.module, found_SD, plainly, policy.dtype)
    if reason:
        return SharedReach(None, reason)
    slow = ""
    if _kernel_backbone(policy) is None:  # attention may be computed by its definition
        config = policy.config
        width = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
        slow = prefix_kernel(policy.device.type, policy.dtype, width, width).reason
    return SharedReach(attention_reach(policy, prefix.window), slow)


def attention_reach(policy: Policy, window: int) -> int:
    """How many tokens a text may have for its last one to see its first in every layer."""
    chunk = getattr(policy.config, "attention_chunk_size", None)
    reach = min(policy.max_positions, window, int(chunk or window))
    backbone = _kernel_backbone(policy)
    return reach if backbone is None else min(reach, backbone.num_positions)


def _kernel_backbone(policy: Policy) -> LlamaBackbone | None:
    """The forward pass that the kernel for CUDA devices serves."""
    return policy.backbone if policy.device.type == "cuda" else None
