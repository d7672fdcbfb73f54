"""Prompts computed once, and passes over everything that may follow them.

`SharedPrefix` feeds the prompts of a block through the model, keeps the keys and values of every layer, and then feeds continuations:
all pairs of some of its prompts and some texts in one row. How they see what they may see, and nothing else, is for one of two: a kernel over
the family's forward pass on a CUDA device (kernels/text_attention.py), and models/prefix_attention.py for all other models.
`shares_prefix` finds out whether a model computes in this way what it computes plainly.

Shape legend: S tokens of a row, B texts in it, T tokens of the longest, D width of the features.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tether.models.decoding.cached import max_positions
from tether.models.family.backbone import LlamaBackbone
from tether.models.policy import Policy
from tether.models.prefix_attention import NotShared, Pass, Span, attending
from tether.models.probing import agree

Ids = Sequence[int]
Counts = npt.NDArray[np.int64]
PROBE_PROMPTS = ((1, 2, 3, 4, 5), (6, 7, 8))
PROBE_TEXTS = ((9, 10, 11, 12), (13, 14))


class Continuations(NamedTuple):
    """What one pass computed."""

    features_SD: Tensor
    targets_S: Tensor
    """The token that each feature predicts: the text's tokens from the second on."""
    lengths: npt.NDArray[np.int64]
    """How many tokens of the row belong to each pair, prompts in the outer and texts in the inner order."""


class SharedPrefix:
    """A block of prompts whose keys and values are stored."""

    def __init__(self, split: Policy, prompts: Sequence[Ids]) -> None:
        self._lengths = np.array([len(prompt) for prompt in prompts])
        self._starts = np.cumsum(self._lengths) - self._lengths
        ids = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
        positions = np.arange(len(ids)) - np.repeat(self._starts, self._lengths)
        self._row: _Row = (
            _KernelRow(split.backbone) if split.backbone is not None and split.module.device.type == "cuda" else _RegistryRow(split)
        )
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
        after_S = np.repeat(np.repeat(self._lengths[prompts], len(texts)), fed)
        each = int(fed.sum()) // len(prompts)
        spans = [
            Span(n * each, (n + 1) * each, int(self._starts[p]), int(self._starts[p] + self._lengths[p])) for n, p in enumerate(prompts)
        ]
        features_SD = self._row.features(fed, spans, flat[source_S], steps_S + after_S)
        return Continuations(features_SD, torch.from_numpy(flat[source_S + 1]).to(features_SD.device), fed)


class _Row(Protocol):
    """Computes rows of texts: first the prompts, whose keys and values it stores, then continuations of them."""

    window: int
    """The shortest attention window that a layer has asked for; not applied."""

    def features(self, lengths_B: Counts, spans: Sequence[Span], ids_S: Counts, positions_S: Counts) -> Tensor:
        """[S, D] of a row of texts with these lengths; spans say which prompts they continue, none for the prompts themselves."""
        ...


class _RegistryRow:
    """Through the module, whose layers ask transformers' registry for their attention."""

    def __init__(self, split: Policy) -> None:
        self._split = split
        self._stored: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self.window = 2**31

    def features(self, lengths_B: Counts, spans: Sequence[Span], ids_S: Counts, positions_S: Counts) -> Tensor:
        split, device = self._split, self._split.module.device
        starts_B = np.cumsum(lengths_B) - lengths_B
        longest = int(lengths_B.max())
        pieces_BT = starts_B[:, None] + np.minimum(np.arange(longest), lengths_B[:, None] - 1)
        steps_S = np.arange(lengths_B.sum()) - np.repeat(starts_B, lengths_B)
        places_S = steps_S + np.repeat(np.arange(len(lengths_B)) * longest, lengths_B)
        pieces, places, ids, positions = (torch.from_numpy(array).to(device) for array in (pieces_BT, places_S, ids_S, positions_S))
        current = Pass(pieces, places, spans, self._stored, is_even=bool((lengths_B == longest).all()))
        with attending(split.module, current):
            features_SD: Tensor = split.features(input_ids=ids[None], position_ids=positions[None], use_cache=False)[0]
        if not self._stored:
            raise NotShared(f"{type(split.module).__name__} does not ask for an attention function")
        self.window = min(self.window, current.window)
        return features_SD


class _KernelRow:
    """Through the family's forward pass, by one kernel; for CUDA devices."""

    def __init__(self, backbone: LlamaBackbone) -> None:
        self._backbone = backbone
        self._stored: list[tuple[Tensor, Tensor]] = []
        self.window = 2**31

    def features(self, lengths_B: Counts, spans: Sequence[Span], ids_S: Counts, positions_S: Counts) -> Tensor:
        from tether.models.kernels.text_attention import text_attention

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


def attention_reach(model: PreTrainedModel, window: int) -> int:
    """How many tokens a text may have for its last one to see its first in every layer."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    return min(max_positions(model), window, int(chunk or window))


@torch.inference_mode()
def shares_prefix(split: Policy) -> int | None:
    """The number of tokens up to which a shared prefix gives what plain passes give; None where it never does."""
    vocabulary = int(split.module.config.get_text_config().vocab_size)
    prompts, texts = ([[token % vocabulary for token in ids] for ids in group] for group in (PROBE_PROMPTS, PROBE_TEXTS))
    try:
        prefix = SharedPrefix(split, prompts)
        found_SV = split.logits(prefix.extend(range(len(prompts)), texts).features_SD).float()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # however a model says that it does not fit
        return None
    plain = []
    for prompt in prompts:
        for text in texts:
            ids_1T = torch.tensor([[*prompt, *text[:-1]]], device=split.module.device)
            plain.append(split.features(input_ids=ids_1T, use_cache=False)[0, len(prompt) :])
    expected_SV = split.logits(torch.cat(plain)).float()
    agrees = agree(found_SV, expected_SV, split.module.dtype)
    return attention_reach(split.module, prefix.window) if agrees else None
