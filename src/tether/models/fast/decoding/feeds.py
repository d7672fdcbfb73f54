"""Texts that are fed to slots of a paged cache: what a pass over them reads, laid out by the host and sent to the device.

A feed is one piece of memory, so that it takes one copy, and one that is recorded is filled up to its size. For a model that sees there is more: the
places of patches, and what enters the layers, image features in the places of their patches. They are embedded before the pass, which
is thereby the same with and without images.

Shape legend: B texts, S tokens of all of them, N blocks of them, X pages of a slot, D width of the model.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tether.core.images import IMAGE_IDS
from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.decoding.pages import Pages
from tether.models.fast.decoding.places import Places
from tether.models.fast.decoding.protocol import PrefillRequest
from tether.models.fast.kernels.attention import ALIGNED, block_tokens, num_blocks, text_blocks
from tether.models.hardware import sent
from tether.models.vision import Embedded


class Feed(NamedTuple):
    """The tokens of some texts, one text after another, and where their keys and values go. Numbers are int32; all on the device."""

    ids_S: Tensor
    """0 for what is not a word."""
    rows_S: Tensor
    """Of which text a token is; tokens that fill up the feed belong to the row behind the last text, whose table is page 0."""
    positions_S: Tensor
    last_B: Tensor
    """Where the last token of each text stands."""
    lengths_B: Tensor
    starts_B1: Tensor
    blocks_N2: Tensor
    """Which tokens each program of attention takes (kernels/attention.py)."""
    places_3S: Tensor
    """In time, height and width; nothing where positions are plain."""
    tables_BX: Tensor
    embedded: Embedded | None
    """What enters the layers, of a model that sees; else that is made of the ids."""


class Feeds:
    """Lays out feeds, and remembers the places of what follows them."""

    def __init__(self, backbone: LlamaBackbone, pages: Pages, max_positions: int, device: torch.device) -> None:
        self._vision, self._pages, self._device = backbone.vision, pages, device
        self._block = block_tokens(backbone.num_heads, backbone.num_kv_heads)
        self._shared: list[Tensor] = []
        self.places = Places(len(pages.tables), max_positions) if backbone.sections else None

    def sent(self, values: npt.NDArray[Any]) -> Tensor:
        """On the device, whole numbers as int32."""
        values = values.astype(np.int32, copy=False) if values.dtype.kind == "i" else values
        return sent(torch.from_numpy(values), self._device)

    def inputs(self, requests: Sequence[PrefillRequest], size: tuple[int, int]) -> list[Tensor]:
        """What a pass over these requests reads, filled up to so many tokens and texts; `read` names its parts."""
        tokens = [np.asarray(request.tokens) for request in requests]
        ids_S = np.concatenate([*tokens, np.zeros(size[0] - sum(map(len, tokens)), dtype=np.int64)])
        if self._vision is None:
            return [self.sent(self.layout(requests, ids_S, size[1]))]
        flat = self.sent(self.layout(requests, np.where(ids_S < IMAGE_IDS, ids_S, 0), size[1]))
        states_SD, deep = self._vision.embed(sent(torch.from_numpy(ids_S), self._device), ids_S[ids_S >= IMAGE_IDS].tolist())
        return [flat, states_SD, *(deep or [torch.zeros_like(states_SD) for _ in range(self._vision.num_deep)])]

    def recorded(self, size: tuple[int, int], most_tokens: int) -> list[Tensor]:
        """What a recorded pass of this size reads, empty. All share the memory of what enters the layers, which is for so many tokens."""
        flat, *states = self.inputs([], size)
        if len(self._shared) != len(states):
            self._shared = [states_SD.new_zeros(most_tokens, states_SD.shape[1]) for states_SD in states]
        return [flat, *(shared[: size[0]] for shared in self._shared)]

    def layout(self, requests: Sequence[PrefillRequest], ids_S: npt.NDArray[np.int64], num_texts: int) -> npt.NDArray[np.int32]:
        """The numbers of a feed: the tokens of the requests, then what fills it up."""
        new = np.array([len(request.tokens) for request in requests], dtype=np.int64)
        starts = np.array([request.start for request in requests], dtype=np.int64)
        ends, num_tokens = np.cumsum(new), len(ids_S)
        fill = num_tokens - int(new.sum())
        unused = [0] * (num_texts - len(requests))
        parts = [
            ids_S,
            np.concatenate([np.repeat(np.arange(len(requests)), new), np.full(fill, num_texts)]),
            np.concatenate(
                [np.arange(num_tokens - fill) - np.repeat(ends - new, new) + np.repeat(starts, new), np.zeros(fill, dtype=np.int64)]
            ),
            [*(ends - 1), *unused],
            [*(starts + new), *unused],
            [0, *ends, *(int(new.sum()) for _ in unused)],
            text_blocks(new, num_blocks(num_tokens, num_texts, self._block), self._block).ravel(),
            self._placed(requests, fill).ravel(),
        ]
        tables = self._pages.rows([request.slots[0] for request in requests], num_texts + 1).ravel()
        return np.concatenate([*(np.pad(part, (0, -len(part) % ALIGNED)) for part in map(np.asarray, parts)), tables]).astype(np.int32)

    def _placed(self, requests: Sequence[PrefillRequest], fill: int) -> npt.NDArray[np.int64]:
        """[3, S], or nothing."""
        if self._vision is None or self.places is None:
            return np.zeros(0, dtype=np.int64)
        slots = [request.slots for request in requests]
        starts, texts = [request.start for request in requests], [request.tokens for request in requests]
        placed_3T = self.places.of_texts(self._vision.places, [leader for leader, *_ in slots], starts, texts)
        for (leader, *followers), text in zip(slots, texts, strict=True):
            self.places.copy(leader, followers, len(text))
        return np.pad(placed_3T, ((0, 0), (0, fill)))

    def read(self, inputs: Sequence[Tensor], size: tuple[int, int]) -> Feed:
        """The parts of a feed, which lie one behind the other, each from a multiple of ALIGNED on."""
        flat, *embedded = inputs
        num_tokens, num_texts = size
        blocks = 2 * num_blocks(num_tokens, num_texts, self._block)
        placed = 0 if self.places is None else 3 * num_tokens
        sizes = (num_tokens, num_tokens, num_tokens, num_texts, num_texts, num_texts + 1, blocks, placed)
        room = [-(-size // ALIGNED) * ALIGNED for size in sizes]
        *parts, tables = flat.split([*room, flat.numel() - sum(room)])
        ids_S, rows_S, positions_S, last_B, lengths_B, starts_B1, blocks_2N, places = (
            part[:size] for part, size in zip(parts, sizes, strict=True)
        )
        return Feed(
            ids_S,
            rows_S,
            positions_S,
            last_B,
            lengths_B,
            starts_B1,
            blocks_2N.view(-1, 2),
            places.view(3, placed // 3),
            tables.view(num_texts + 1, -1),
            Embedded(embedded[0], tuple(embedded[1:])) if embedded else None,
        )
