"""Forward passes of the Llama family over a paged cache: texts that are fed, new tokens that are decoded, and both at once.

Texts are fed flat, one behind the other, each with any number of new tokens. A step of decoding has the same few new tokens for every row, whose
positions, places in the cache and attention are one kernel. Both at once cost little more than the larger of the two, because the weights are read
once and the products are one.

Shape legend: B texts or rows, S tokens of all of them, X pages of a slot, D width of the model, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.kernels.attention import ALIGNED, attend_new_tokens, paged_attention
from tether.models.fast.kernels.pointwise import rotate_and_store
from tether.models.fast.linear_logprobs import float32_product

T = TypeVar("T")

LITTLE_MEMORY = 4 << 30
"""Bytes: with less left, memory that torch keeps is given back before a graph is recorded, which has memory of its own."""


class Feed(NamedTuple):
    """The tokens of some texts, one text after another, and where their keys and values go. All int32, on the device."""

    ids_S: Tensor
    rows_S: Tensor
    """Of which text a token is; tokens that fill up the feed belong to the row behind the last text, whose table is page 0."""
    positions_S: Tensor
    last_B: Tensor
    """Where the last token of each text stands."""
    lengths_B: Tensor
    starts_B1: Tensor
    tables_BX: Tensor

    @classmethod
    def of(cls, flat: Tensor, num_tokens: int, num_texts: int) -> "Feed":
        """The parts of a feed, which lie one behind the other, each from a multiple of ALIGNED on."""
        sizes = (num_tokens, num_tokens, num_tokens, num_texts, num_texts, num_texts + 1)
        places = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        *parts, tables = flat.split([*places, flat.numel() - sum(places)])
        ids_S, rows_S, positions_S, last_B, lengths_B, starts_B1 = (part[:size] for part, size in zip(parts, sizes, strict=True))
        return cls(ids_S, rows_S, positions_S, last_B, lengths_B, starts_B1, tables.view(num_texts + 1, -1))


class NewTokens(NamedTuple):
    """A few new tokens of some rows, as many for each. All int32, on the device."""

    ids_S: Tensor
    tables_BX: Tensor
    lengths_B: Tensor
    """Positions filled once they are fed."""


class PagedPass:
    """The model over a cache of pages, [layers, 2, pages, heads, positions of a page, width]. All passes write keys and values of their tokens."""

    def __init__(self, backbone: LlamaBackbone, head: nn.Linear, cache: Tensor, num_rows: int) -> None:
        """`num_rows`: the most rows of a step."""
        self._backbone, self._head, self._device = backbone, head, cache.device
        self._layers = [(layer[0], layer[1]) for layer in cache]
        self._arrived = torch.zeros(num_rows * backbone.num_kv_heads, dtype=torch.int32, device=cache.device)
        self._pool: Any = None

    def logits_of_feed(self, feed: Feed, most_new: int) -> Tensor:
        """[B, V] behind the last token of each text; `most_new`: the most new tokens that one has."""
        backbone = self._backbone

        def apply_positions(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            rotate_and_store((query, key, value), self._layers[layer], feed.positions_S, feed.rows_S, feed.tables_BX, backbone.angles)
            return query, key

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend_feed(layer, query, feed, most_new)

        features_SD = backbone.features(feed.ids_S, feed.positions_S, attend, apply_positions=apply_positions)
        return float32_product(self._head, features_SD[feed.last_B])

    def logits_of_new(self, new: NewTokens) -> Tensor:
        """[S, V] behind every new token."""

        def leave(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            return query, key  # the kernel knows the positions by the lengths

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend_new(layer, (query, key, value), new)

        return float32_product(self._head, self._backbone.features(new.ids_S, new.ids_S, attend, apply_positions=leave))

    def logits_of_both(self, new: NewTokens, feed: Feed) -> tuple[Tensor, Tensor]:
        """What the other two give, by one pass."""
        backbone, num_new = self._backbone, len(new.ids_S)

        def apply_positions(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
            fed = query[num_new:], key[num_new:], value[num_new:]
            rotate_and_store(fed, self._layers[layer], feed.positions_S, feed.rows_S, feed.tables_BX, backbone.angles)
            return query, key

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = torch.zeros(query.shape, dtype=query.dtype, device=query.device)  # of tokens that fill up the feed nothing is written
            self._attend_new(layer, (query[:num_new], key[:num_new], value[:num_new]), new, out[:num_new])
            self._attend_feed(layer, query[num_new:], feed, len(feed.ids_S), out[num_new:])
            return out

        ids_S = torch.cat([new.ids_S, feed.ids_S])
        features_SD = backbone.features(ids_S, ids_S, attend, apply_positions=apply_positions)
        wanted_SD = torch.cat([features_SD[:num_new], features_SD[num_new:][feed.last_B]])
        logits = float32_product(self._head, wanted_SD)
        return logits[:num_new], logits[num_new:]

    def _attend_feed(self, layer: int, query: Tensor, feed: Feed, most_new: int, out: Tensor | None = None) -> Tensor:
        texts = feed.tables_BX, feed.starts_B1, feed.lengths_B
        return paged_attention(query, self._layers[layer], *texts, most_new, self._backbone.scale, out)

    def _attend_new(self, layer: int, states: tuple[Tensor, Tensor, Tensor], new: NewTokens, out: Tensor | None = None) -> Tensor:
        backbone, places = self._backbone, (new.tables_BX, new.lengths_B)
        return attend_new_tokens(states, self._layers[layer], *places, backbone.angles, backbone.scale, self._arrived, out)

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of this work, and what the work returns: the same tensors after every replay. Graphs share their memory."""
        torch.cuda.synchronize(self._device)
        side = torch.cuda.Stream(self._device)
        with torch.cuda.stream(side):
            work()  # kernels are compiled and chosen before anything is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not torch's context manager, which always gives back the memory that the learner would have to allocate again.
        if torch.cuda.mem_get_info(self._device)[0] < LITTLE_MEMORY:
            torch.cuda.empty_cache()
        with torch.cuda.stream(side):
            graph.capture_begin(pool=self._pool)
            try:
                result = work()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return graph, result
