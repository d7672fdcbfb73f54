"""Prompts computed once, and passes over everything that may follow them.

`SharedPrefix` feeds the prompts of a block through the model, keeps the keys and values of every layer, and then feeds continuations:
all pairs of some of its prompts and some texts in one row (models/prefix_attention.py says how they see what they may see, and nothing
else). `shares_prefix` finds out whether a model computes in this way what it computes plainly.

Shape legend: S tokens of a row, B texts in it, T tokens of the longest, D width of the features.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.models.decoder import max_positions
from tether.models.head import SplitModel
from tether.models.prefix_attention import NotShared, Pass, Span, attending

Ids = Sequence[int]
PROBE_PROMPTS = ((1, 2, 3, 4, 5), (6, 7, 8))
PROBE_TEXTS = ((9, 10, 11, 12), (13, 14))
EXACT, HALF = 1e-3, 0.05
"""Differences that are taken for rounding: of the largest logit in float32, of their root mean square in half precision."""


class Continuations(NamedTuple):
    """What one pass computed."""

    features_SD: Tensor
    targets_S: Tensor
    """The token that each feature predicts: the text's tokens from the second on."""
    lengths: npt.NDArray[np.int64]
    """How many tokens of the row belong to each pair, prompts in the outer and texts in the inner order."""


class SharedPrefix:
    """A block of prompts whose keys and values are stored."""

    def __init__(self, split: SplitModel, prompts: Sequence[Ids]) -> None:
        self._split = split
        self._lengths = np.array([len(prompt) for prompt in prompts])
        self._starts = np.cumsum(self._lengths) - self._lengths
        ids = np.concatenate([np.asarray(prompt, dtype=np.int64) for prompt in prompts])
        positions = np.arange(len(ids)) - np.repeat(self._starts, self._lengths)
        read = _pass_over(self._lengths, split.model.device)
        features_SD = _features(split, read, ids, positions)
        self._stored = read.stored
        self.window = read.window
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
        written = _pass_over(fed, self._split.model.device, spans, self._stored)
        features_SD = _features(self._split, written, flat[source_S], steps_S + after_S)
        return Continuations(features_SD, torch.from_numpy(flat[source_S + 1]).to(features_SD.device), fed)


def _pass_over(lengths_B: npt.NDArray[np.int64], device: torch.device, spans: Sequence[Span] = (), stored: dict | None = None) -> Pass:
    """The layout of a row of texts with these lengths."""
    starts_B = np.cumsum(lengths_B) - lengths_B
    longest = int(lengths_B.max())
    pieces_BT = starts_B[:, None] + np.minimum(np.arange(longest), lengths_B[:, None] - 1)
    steps_S = np.arange(lengths_B.sum()) - np.repeat(starts_B, lengths_B)
    places_S = steps_S + np.repeat(np.arange(len(lengths_B)) * longest, lengths_B)
    pieces, places = torch.from_numpy(pieces_BT).to(device), torch.from_numpy(places_S).to(device)
    return Pass(pieces, places, spans, {} if stored is None else stored, is_even=bool((lengths_B == longest).all()))


def _features(split: SplitModel, current: Pass, ids_S: npt.NDArray[np.int64], positions_S: npt.NDArray[np.int64]) -> Tensor:
    device = split.model.device
    ids_1S, positions_1S = (torch.from_numpy(array)[None].to(device) for array in (ids_S, positions_S))
    with attending(split.model, current):
        features_SD: Tensor = split.features(input_ids=ids_1S, position_ids=positions_1S, use_cache=False)[0]
    if not current.stored:
        raise NotShared(f"{type(split.model).__name__} does not ask for an attention function")
    return features_SD


def attention_reach(model: PreTrainedModel, window: int) -> int:
    """How many tokens a text may have for its last one to see its first in every layer."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    return min(max_positions(model), window, int(chunk or window))


@torch.inference_mode()
def shares_prefix(split: SplitModel) -> int | None:
    """The number of tokens up to which a shared prefix gives what plain passes give; None where it never does."""
    vocabulary = int(split.model.config.get_text_config().vocab_size)
    prompts, texts = ([[token % vocabulary for token in ids] for ids in group] for group in (PROBE_PROMPTS, PROBE_TEXTS))
    try:
        prefix = SharedPrefix(split, prompts)
        found_SV = split.logits(prefix.extend(range(len(prompts)), texts).features_SD).float()
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError):  # however a model says that it does not fit
        return None
    plain = []
    for prompt in prompts:
        for text in texts:
            ids_1T = torch.tensor([[*prompt, *text[:-1]]], device=split.model.device)
            plain.append(split.features(input_ids=ids_1T, use_cache=False)[0, len(prompt) :])
    expected_SV = split.logits(torch.cat(plain)).float()
    agrees = _agree(found_SV, expected_SV, split.model.dtype)
    return attention_reach(split.model, prefix.window) if agrees else None


def _agree(found_SV: Tensor, expected_SV: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways of computing the same logits differ by rounding only."""
    difference_SV = found_SV - expected_SV
    if dtype in (torch.float32, torch.float64):
        # Against the largest logit: what rounding does to one of them depends on the size of all.
        return bool(difference_SV.abs().max() <= EXACT * max(1.0, float(expected_SV.abs().max())))
    # In half precision the largest of a hundred thousand errors says little: it grows with depth and vocabulary, and wrong attention is wrong
    # nearly everywhere.
    return bool(difference_SV.square().mean().sqrt() <= HALF * expected_SV.square().mean().sqrt())
