"""Forward passes of the Llama family over a paged cache: texts that are fed, new tokens that are decoded, and both at once.

Texts are fed flat, one behind the other, each with any number of new tokens. A step of decoding has one new token for every row, or a few, whose
positions, places in the cache and attention are one kernel. Both at once cost little more than the larger of the two: the weights are read
once, the products are one, and the two kinds of attention, neither of which fills the device, run at the same time on two streams.

Shape legend: B texts or rows, S tokens of all of them, X pages of a slot, D width of the model, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tether.models.fast.backbone import Attend, FeedForward, LlamaBackbone
from tether.models.fast.decoding.feeds import Feed
from tether.models.fast.kernels.attention import attend_new_tokens, paged_attention
from tether.models.fast.kernels.pointwise import rotate_and_store
from tether.models.fast.linear_logprobs import float32_product
from tether.models.vision import Embedded

T = TypeVar("T")

LITTLE_MEMORY = 4 << 30
"""Bytes: with less left, memory that torch keeps is given back before a graph is recorded, which has memory of its own."""


class NewTokens(NamedTuple):
    """A new token of each of some rows, or a few. All int32, on the device."""

    ids_S: Tensor
    tables_BX: Tensor
    lengths_B: Tensor
    """Positions filled once they are fed."""
    ragged: tuple[Tensor, Tensor, int] | None = None
    """Where each row's begin, how many they are, and how many at most; None: one each. Tokens of no row may stand behind the last."""
    shifts_B: Tensor | None = None
    """How far their rotary places lie from their positions, behind images; None: nowhere."""


class PagedPass:
    """The model over a cache of pages, [layers, 2, pages, heads, positions of a page, width]. All passes write keys and values of their tokens."""

    def __init__(
        self, backbone: LlamaBackbone, head: nn.Linear, cache: Tensor, num_rows: int, float8: Sequence[FeedForward] | None = None
    ) -> None:
        """`num_rows`: the most rows of a step; `float8`: what computes the MLPs in place of the model's own."""
        self._backbone, self._head, self._device, self._float8 = backbone, head, cache.device, float8
        self._layers = [(layer[0], layer[1]) for layer in cache]
        self._arrived = torch.zeros(num_rows * backbone.num_kv_heads, dtype=torch.int32, device=cache.device)
        self._pool: Any = None
        self._rehearsed: list[int] | None = None
        """Layers that are computed while a recording is rehearsed; None: all."""
        self._recording, self._second = (torch.cuda.Stream(cache.device) if cache.is_cuda else None for _ in range(2))

    def logits_of_feed(self, feed: Feed) -> Tensor:
        """[B, V] behind the last token of each text."""
        out = self._zeros_for(len(feed.ids_S))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._store_feed(layer, (query, key, value), feed)
            return self._attend_feed(layer, query, feed, out)

        features_SD = self._features(feed.embedded or Embedded(self._backbone.words(feed.ids_S)), attend)
        return float32_product(self._head, features_SD[feed.last_B])

    def logits_of_new(self, new: NewTokens) -> Tensor:
        """[S, V] behind every new token."""
        out = None if new.ragged is None else self._zeros_for(len(new.ids_S))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return self._attend_new(layer, (query, key, value), new, out)

        return float32_product(self._head, self._features(Embedded(self._backbone.words(new.ids_S)), attend))

    def logits_of_both(self, new: NewTokens, feed: Feed) -> tuple[Tensor, Tensor]:
        """What the other two give, by one pass."""
        num_new = len(new.ids_S)
        out = self._zeros_for(num_new + len(feed.ids_S))

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            self._store_feed(layer, (query[num_new:], key[num_new:], value[num_new:]), feed)
            with self._on_second_stream():
                self._attend_feed(layer, query[num_new:], feed, out[num_new:])
            # It follows a kernel that two streams wait for, and does not start early.
            self._attend_new(layer, (query[:num_new], key[:num_new], value[:num_new]), new, out[:num_new], chained=False)
            if self._second is not None:
                torch.cuda.current_stream(self._device).wait_stream(self._second)
            return out

        features_SD = self._features(self._embedded_both(new.ids_S, feed), attend)
        wanted_SD = torch.cat([features_SD[:num_new], features_SD[num_new:][feed.last_B]])
        logits = float32_product(self._head, wanted_SD)
        return logits[:num_new], logits[num_new:]

    def _embedded_both(self, ids_S: Tensor, feed: Feed) -> Embedded:
        """New tokens, then a feed."""
        words = self._backbone.words
        if feed.embedded is None:
            return Embedded(words(torch.cat([ids_S, feed.ids_S])))
        states_SD, deep = words(ids_S), feed.embedded.deep
        nothing_SD = torch.zeros_like(states_SD) if deep else states_SD
        return Embedded(torch.cat([states_SD, feed.embedded.states_SD]), tuple(torch.cat([nothing_SD, part]) for part in deep))

    def _features(self, embedded: Embedded, attend: Attend) -> Tensor:
        return self._backbone.features(
            embedded, None, attend, apply_positions=_leave_positions, float8=self._float8, layers=self._rehearsed
        )

    def _zeros_for(self, num_tokens: int) -> Tensor:
        """Where attention of all layers goes, one after the other; of tokens that only fill up a step nothing is ever written."""
        backbone, cache = self._backbone, self._layers[0][0]
        return torch.zeros(num_tokens, backbone.num_heads, backbone.head_dim, dtype=cache.dtype, device=self._device)

    def _store_feed(self, layer: int, states: tuple[Tensor, Tensor, Tensor], feed: Feed) -> None:
        axes_R = self._backbone.axes
        placed = None if axes_R is None else (feed.places_3S, axes_R)
        rotate_and_store(states, self._layers[layer], feed.positions_S, feed.rows_S, feed.tables_BX, self._backbone.angles, placed)

    def _attend_feed(self, layer: int, query: Tensor, feed: Feed, out: Tensor) -> Tensor:
        texts = feed.tables_BX, feed.starts_B1, feed.lengths_B, feed.blocks_N2
        return paged_attention(query, self._layers[layer], *texts, self._backbone.scale, out)

    def _attend_new(
        self, layer: int, states: tuple[Tensor, Tensor, Tensor], new: NewTokens, out: Tensor | None, *, chained: bool = True
    ) -> Tensor:
        backbone = self._backbone
        inputs = states, self._layers[layer], new.tables_BX, new.lengths_B, backbone.angles, backbone.scale, self._arrived
        return attend_new_tokens(*inputs, out, ragged=new.ragged, shifts_B=new.shifts_B, chained=chained)

    @contextmanager
    def _on_second_stream(self) -> Iterator[None]:
        """What is launched here waits for what was launched before, and runs beside what is launched next."""
        if self._second is None:
            yield
            return
        self._second.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._second):
            yield

    def forget_recordings(self) -> None:
        """All graphs are gone, and their memory with them."""
        self._pool = None

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of this work, and what the work returns: the same tensors after every replay. Graphs share their memory."""
        side = self._recording  # always the same one: the library keeps memory for each stream that it has worked on
        torch.cuda.synchronize(self._device)
        self._rehearsed = self._backbone.one_of_each
        try:
            with torch.cuda.stream(side):
                work()  # kernels are compiled, chosen and loaded before anything is recorded; all layers call the same ones
        finally:
            self._rehearsed = None
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not torch's context manager, which always gives back the memory that the learner would have to allocate again.
        if torch.cuda.mem_get_info(self._device)[0] < LITTLE_MEMORY:
            torch.cuda.empty_cache()
        with torch.cuda.stream(side):
            # Other threads, such as one that registers memory for checkpoints, may use the card meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return graph, result


def _leave_positions(layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Attention puts them in, since it also writes keys and values to the cache."""
    return query, key
