"""How tokens go through a model into rows of a cache: by the model's own code, padded, or by the family's forward pass, flat.

The padded way serves any causal language model; transformers' attention repeats the keys of grouped heads and reads a mask. The flat way
serves the Llama family and does neither: the queries that share a key head are taken for neighbours in one text, which the attention
kernel reads its keys once for, and texts of a prompt are fed one behind the other, each attending to its own row only.

Shape legend: B rows that decode, N texts that are fed, S tokens of them all, T of one or of the longest, L positions visible, D width of the
model, H query heads, K key heads, G queries per key head, W width of a head.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from tether.models.decoding.cached import CachedDecoder, RowCache
from tether.models.family.backbone import Attend, LlamaBackbone
from tether.models.policy import Policy


class RowPass(Protocol):
    """Feeds rows of its cache."""

    pads: bool
    """Whether texts of one call are padded to the longest of them."""
    cache: RowCache

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Feed a text to each of these rows, from its start on; the features [N, D] of their last tokens."""
        ...

    def step(self, ids_B: Tensor, starts: Sequence[int]) -> Tensor:
        """Feed one token to each of the first rows; their features [B, D]."""
        ...


class PaddedPass:
    """Any causal language model of transformers, through its own attention."""

    pads = True

    def __init__(self, model: PreTrainedModel, split: Policy) -> None:
        self._decoder = CachedDecoder(model, 0, split)
        self._device = model.device
        self.cache = self._decoder.cache

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        ids_NT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for n, text in enumerate(texts):
            ids_NT[n, : len(text)] = torch.tensor(text)
        rows_N, starts_N, lengths_N = (torch.tensor(x, device=self._device) for x in (rows, starts, [len(text) for text in texts]))
        features_NTD = self._decoder.extend(rows_N, ids_NT.to(self._device), starts_N, lengths_N)
        return features_NTD[torch.arange(len(texts), device=self._device), lengths_N - 1]

    def step(self, ids_B: Tensor, starts: Sequence[int]) -> Tensor:
        return self._decoder.extend(slice(0, len(ids_B)), ids_B[:, None], torch.tensor(starts, device=self._device))[:, 0]


class GroupedPass:
    """The Llama family, through its flat forward pass."""

    pads = False

    def __init__(self, backbone: LlamaBackbone) -> None:
        self._backbone = backbone
        self._device = backbone.model.device
        self.cache = RowCache(0)

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        ids_S, positions_S = (
            torch.tensor([x for part in parts for x in part], device=self._device)
            for parts in (texts, [range(start, start + len(text)) for start, text in zip(starts, texts, strict=True)])
        )
        ends = list(accumulate(len(text) for text in texts))
        features_SD = self._backbone.features(ids_S, positions_S, self._to_texts(rows, starts, ends))
        return features_SD[torch.tensor(ends, device=self._device) - 1]

    def step(self, ids_B: Tensor, starts: Sequence[int]) -> Tensor:
        starts_B = torch.tensor(starts, device=self._device)
        return self._backbone.features(ids_B, starts_B, self._to_rows(starts_B, max(starts) + 1, min(starts) == max(starts)))

    def _to_texts(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Attend:
        """Attention of each text to itself and to what its row holds before it."""
        backbone = self._backbone
        texts = list(zip(rows, starts, [0, *ends], ends, strict=False))
        # A text that begins its row needs no mask: the kernel knows that case.
        seen = [self._causal(start, end - first) if start else None for _, start, first, end in texts]

        def attend(layer: int, query_SHW: Tensor, key_SKW: Tensor, value_SKW: Tensor) -> Tensor:
            keys, values = self.cache.layer(layer, key_SKW.transpose(0, 1)[None], value_SKW.transpose(0, 1)[None])
            out_SHW = torch.empty_like(query_SHW)
            for (row, start, first, end), seen_TL in zip(texts, seen, strict=True):
                length = start + end - first
                keys[row, :, start:length] = key_SKW[first:end].transpose(0, 1)
                values[row, :, start:length] = value_SKW[first:end].transpose(0, 1)
                query_GKTW = query_SHW[first:end].unflatten(1, (backbone.num_kv_heads, -1)).permute(2, 1, 0, 3)
                key_GKLW, value_GKLW = (buffer[row, :, :length].expand(len(query_GKTW), -1, -1, -1) for buffer in (keys, values))
                mixed_GKTW = scaled_dot_product_attention(
                    query_GKTW, key_GKLW, value_GKLW, attn_mask=seen_TL, is_causal=seen_TL is None, scale=backbone.scale
                )
                out_SHW[first:end] = mixed_GKTW.permute(2, 1, 0, 3).flatten(1, 2)
            return out_SHW

        return attend

    def _to_rows(self, starts_B: Tensor, visible: int, all_alike: bool) -> Attend:
        """Attention of one new token per row to its row; a mask only where lengths differ."""
        backbone, rows_B = self._backbone, torch.arange(len(starts_B), device=self._device)
        seen_B11L = None if all_alike else torch.arange(visible, device=self._device) <= starts_B[:, None, None, None]

        def attend(layer: int, query_BHW: Tensor, key_BKW: Tensor, value_BKW: Tensor) -> Tensor:
            keys, values = self.cache.layer(layer, key_BKW[:, :, None], value_BKW[:, :, None])
            keys[rows_B, :, starts_B], values[rows_B, :, starts_B] = key_BKW, value_BKW
            query_BKGW = query_BHW.unflatten(1, (backbone.num_kv_heads, -1))
            key_BKLW, value_BKLW = (buffer[: len(rows_B), :, :visible] for buffer in (keys, values))
            return scaled_dot_product_attention(query_BKGW, key_BKLW, value_BKLW, attn_mask=seen_B11L, scale=backbone.scale).flatten(1, 2)

        return attend

    def _causal(self, start: int, num_new: int) -> Tensor:
        """[T, L]: what each of the tokens after a start sees."""
        positions_L = torch.arange(start + num_new, device=self._device)
        return positions_L <= positions_L[start:, None]
