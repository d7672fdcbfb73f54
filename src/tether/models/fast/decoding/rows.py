"""Rows with a key/value cache, and the two forward passes that fill them: the module's own code, padded, or the Llama family's, flat.

`RowCache` owns one growing buffer per layer, [rows, heads, positions, width]. `CachedDecoder` feeds new tokens to some rows of it (a prompt,
an observation or a single sampled token are the same call) and returns features, from which `logits` are made only where they are wanted.
Rows that are a contiguous range are read without a copy; moving and copying rows is the caller's business. The weights are the module's own:
there is nothing to synchronise after an update.

`PaddedPass` serves any causal language model; transformers' attention repeats the keys of grouped heads and reads a mask. `GroupedPass`
serves the Llama family and does neither: the queries that share a key head are neighbours in one text, for which the attention kernel
reads its keys once, and texts of a prompt are fed one behind the other, each attending to its own row only. What rows of a step begin with (all of
them with instructions, the members of a group with their prompt) is read once for these rows: reading the cache is much of what a step of a small
model costs on a CPU.

Shape legend: B rows of a call, N texts that are fed, S tokens of them all, T of one or of the longest, L positions visible, D width of the
model, V vocabulary, H query heads, K key heads, G queries per key head, W width of a head, P sets of rows that hold the same, M rows of such a set.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from mmap import mmap
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tether.core.errors import BadInput
from tether.models.fast.backbone import Attend, LlamaBackbone
from tether.models.fast.decoding.places import Places
from tether.models.fast.prefix_attention import prefix_kernel
from tether.models.policy import Policy
from tether.models.probing import disagreement_with, probe_ids, reason_against
from tether.models.vision import PlacesOf

PROBE_TOKENS = 6
LEAST_COMMON, LEAST_ROWS = 64, 4
"""Positions, and rows of a set on average, from which on it is faster to read what rows have in common apart from the rest."""

_kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class RowCache:
    """The key/value buffers, in the shape of a transformers cache: `update` writes the new positions and returns what is visible."""

    is_compileable = False

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows: slice | Tensor = slice(0, 0)
        self._targets = torch.empty(0), torch.empty(0)
        self._inside_BT: Tensor | None = None
        self._visible = 0
        self.places = Places(num_rows)

    def place(self, rows: slice | Tensor, positions_BT: Tensor, visible: int, inside_BT: Tensor | None = None) -> None:
        """Say where the next forward pass writes, and how far it sees; tokens that are not `inside` are padding and not written."""
        rows_B = torch.arange(rows.start, rows.stop, device=positions_BT.device) if isinstance(rows, slice) else rows
        rows_BT = rows_B[:, None].expand_as(positions_BT)
        self._targets = (rows_BT, positions_BT) if inside_BT is None else (rows_BT[inside_BT], positions_BT[inside_BT])
        self._rows, self._visible, self._inside_BT = rows, visible, inside_BT
        if visible > self.capacity:
            self.resize(self.num_rows, max(visible, 2 * self.capacity, initial_positions(positions_BT.device)), self.capacity)

    def resize(self, num_rows: int, capacity: int, filled: int) -> None:
        """Make rows and positions more or fewer; those that there are before and after keep what they hold in their first `filled` positions."""
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):  # one at a time: the old one is gone before the next is made
                resized = _zeros_like(buffer, (num_rows, buffer.shape[1], capacity, buffer.shape[3]))
                rows, kept = min(num_rows, len(buffer)), min(capacity, filled)
                resized[:rows, :, :kept] = buffer[:rows, :, :kept]
                buffers[layer] = resized
        self.places.resize(num_rows, capacity)
        self.num_rows, self.capacity = num_rows, capacity

    def layer(self, index: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer; the first states that pass through it, [B, heads, T, width], show its shape."""
        if index == len(self.keys):
            for buffers, states in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(_zeros_like(states, (self.num_rows, states.shape[1], self.capacity, states.shape[3])))
        return self.keys[index], self.values[index]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers: [B, heads, T, width] in, [B, heads, L, width] out."""
        keys, values = self.layer(layer_idx, key_states, value_states)
        rows, positions = self._targets
        for buffer, states in ((keys, key_states), (values, value_states)):
            new = states.transpose(1, 2)
            buffer[rows, :, positions] = new if self._inside_BT is None else new[self._inside_BT]
        return keys[:, :, : self._visible][self._rows], values[:, :, : self._visible][self._rows]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given explicitly

    def copy_row(self, source: int, target: slice | int, length: int) -> None:
        """Overwrite rows with the first positions of another one."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]
        self.places.copy(source, target, length)

    def swap_rows(self, first: int, second: int, length: int) -> None:
        """Exchange the first positions of two rows."""
        for buffer in (*self.keys, *self.values):
            kept = buffer[first, :, :length].clone()
            buffer[first, :, :length] = buffer[second, :, :length]
            buffer[second, :, :length] = kept
        self.places.swap(first, second, length)

    @property
    def position_bytes(self) -> int:
        """What one position of one row takes; known once something has been fed."""
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in (*self.keys, *self.values))


def initial_positions(device: torch.device) -> int:
    """The capacity that a cache begins with. More positions cost nothing in main memory until they are written, and growing copies what is filled."""
    return 1024 if device.type == "cpu" else 256


def _zeros_like(states: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Zeros of the type and on the device of some states. In main memory the system gives them page by page when something is first written there,
    where torch would write them all and NumPy ask for pages so large that they would be written too; few rows come near the capacity."""
    if states.device.type != "cpu":
        return states.new_zeros(shape)
    memory = mmap(-1, math.prod(shape) * states.element_size())
    return torch.frombuffer(memory, dtype=states.dtype).view(shape)


class CachedDecoder:
    """A model with a cache of rows: feed tokens to rows, get features and logits."""

    def __init__(self, policy: Policy, num_rows: int) -> None:
        self.policy = policy
        self.max_positions = policy.max_positions
        self.cache = RowCache(num_rows)

    @torch.inference_mode()
    def extend(
        self, rows: slice | Tensor, ids_BT: Tensor, starts_B: Tensor, lengths_B: Tensor | None = None, places: Tensor | None = None
    ) -> Tensor:
        """Feed `ids_BT` to `rows`, row b continuing at position starts_B[b]; returns the features of every fed position.

        Rows may be padded on the right with any id. `lengths_B` says how many tokens of each row are no padding (all, if not given): only
        those are written and count against the model's positions. `places`, [B, T] or [3, B, T], are the rotary positions where they are not
        those of the tokens.
        """
        new_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
        positions_BT = starts_B[:, None] + new_T
        visible = int(starts_B.max()) + len(new_T) if lengths_B is None else int((starts_B + lengths_B).max())
        if visible > self.max_positions:
            raise BadInput(
                f"a conversation of {visible} tokens exceeds the model's {self.max_positions} positions; lower rollout.max_context"
            )
        self.cache.place(rows, positions_BT, visible, None if lengths_B is None else new_T < lengths_B[:, None])
        hidden = torch.arange(visible, device=ids_BT.device) > positions_BT[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.policy.dtype, device=ids_BT.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return self.policy.features(
            input_ids=ids_BT,
            position_ids=positions_BT.clamp(max=self.max_positions - 1) if places is None else places,
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """[..., V] in float32 from a selection of features."""
        return self.policy.logits(features).float()


def decodes_with_cache(policy: Policy) -> str:
    """Why feeding a text in two pieces does not give what feeding it whole gives; "" where it does.

    It does not for recurrent models and some attention biases.
    """
    return policy.once("cache", lambda: reason_against(lambda: _pieces_disagree(policy)))


@torch.inference_mode()
def _pieces_disagree(policy: Policy) -> str:
    ids_1T = probe_ids(policy.module, PROBE_TOKENS)
    half = torch.tensor([PROBE_TOKENS // 2], device=policy.device)
    decoder = CachedDecoder(policy, 1)

    def whole() -> Tensor:
        return policy.features(input_ids=ids_1T, use_cache=False)

    first = decoder.extend(slice(0, 1), ids_1T[:, :half], torch.zeros_like(half))
    second = decoder.extend(slice(0, 1), ids_1T[:, half:], half)
    return disagreement_with(policy.module, torch.cat([first, second], dim=1), whole, policy.dtype)


def position_bytes(policy: Policy) -> int:
    """What one position of one conversation takes in the cache of a model: seen from one that is fed a token."""

    @torch.inference_mode()
    def measure() -> int:
        probe = CachedDecoder(policy, 1)
        probe.extend(slice(0, 1), probe_ids(policy.module, 1), torch.zeros(1, dtype=torch.long, device=policy.device))
        return probe.cache.position_bytes

    return policy.once("position bytes", measure)


class Common(NamedTuple):
    """What rows of a step have in common."""

    stop: int
    """No row of the step is shorter."""
    sets: Sequence[Sequence[int]]
    """Rows, each in one set. Those of a set hold the same in all positions before `stop`."""


class _Stack(NamedTuple):
    """Sets of equal size whose first rows are evenly spaced, so that one call of the kernel reads them without a copy."""

    rows: slice
    """The first row of each set."""
    size: int
    """Rows of a set."""


class RowPass(Protocol):
    """Feeds rows of its cache."""

    pads: bool
    """Whether texts of one call are padded to the longest of them."""
    cache: RowCache

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """Feed a text to each of these rows, from its start on; the features [S, D] of all their tokens, one text after another."""
        ...

    def step(self, ids_B: Tensor, starts: Sequence[int], common: Sequence[Common] = ()) -> Tensor:
        """Feed one token to each of the first rows; their features [B, D]. The sets in `common` become smaller, and longer alike."""
        ...


class PaddedPass:
    """Any causal language model of transformers, through its own attention."""

    pads = True

    def __init__(self, policy: Policy) -> None:
        self._decoder = CachedDecoder(policy, 0)
        self._device = policy.device
        self._places = policy.places
        self.cache = self._decoder.cache

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        ids_NT = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
        for n, text in enumerate(texts):
            ids_NT[n, : len(text)] = torch.tensor(text)
        rows_N, starts_N, lengths_N = (torch.tensor(x, device=self._device) for x in (rows, starts, [len(text) for text in texts]))
        places: Tensor | None = None
        if self._places is not None:
            flat_3S = torch.from_numpy(self.cache.places.of_texts(self._places, rows, starts, texts))
            parts = flat_3S.split([len(text) for text in texts], dim=1)
            places = torch.nn.utils.rnn.pad_sequence([part.T for part in parts], batch_first=True).permute(2, 0, 1).to(self._device)
        features_NTD = self._decoder.extend(rows_N, ids_NT.to(self._device), starts_N, lengths_N, places)
        return features_NTD[torch.arange(ids_NT.shape[1], device=self._device) < lengths_N[:, None]]

    def step(self, ids_B: Tensor, starts: Sequence[int], common: Sequence[Common] = ()) -> Tensor:
        places: Tensor | None = None
        if self._places is not None:
            places = torch.from_numpy(self.cache.places.of_words(range(len(starts)), starts)).to(self._device)[:, None]
        starts_B = torch.tensor(starts, device=self._device)
        return self._decoder.extend(slice(0, len(ids_B)), ids_B[:, None], starts_B, places=places)[:, 0]


class GroupedPass:
    """The Llama family, through its flat forward pass."""

    pads = False

    def __init__(self, backbone: LlamaBackbone, places: PlacesOf | None = None) -> None:
        self._backbone = backbone
        self._device = backbone.model.device
        self._places = places
        self.cache = RowCache(0)

    def feed(self, rows: Sequence[int], starts: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        ids_S, positions_S = (
            torch.tensor([x for part in parts for x in part], device=self._device)
            for parts in (texts, [range(start, start + len(text)) for start, text in zip(starts, texts, strict=True)])
        )
        ends = list(accumulate(len(text) for text in texts))
        if self._places is not None:
            positions_S = torch.from_numpy(self.cache.places.of_texts(self._places, rows, starts, texts)).to(self._device)
        return self._backbone.features(ids_S, positions_S, self._to_texts(rows, starts, ends))

    def step(self, ids_B: Tensor, starts: Sequence[int], common: Sequence[Common] = ()) -> Tensor:
        starts_B = torch.tensor(starts, device=self._device)
        places_B = starts_B
        if self._places is not None:
            places_B = torch.from_numpy(self.cache.places.of_words(range(len(starts)), starts)).to(self._device)
        parts: list[_CommonPart] = []
        for stop, sets in common if self._splits() else ():
            start = parts[-1].stop if parts else 0
            if stop - start >= LEAST_COMMON and len(starts) >= LEAST_ROWS * len(sets):
                parts.append(_CommonPart(self.cache, self._backbone.scale, start, stop, sets))
        return self._backbone.features(ids_B, places_B, self._to_rows(starts_B, max(starts) + 1, min(starts) == max(starts), parts))

    def _splits(self) -> bool:
        """Whether attention can be computed in two parts, here by torch's kernel for CPUs, which takes a mask."""
        backbone = self._backbone
        return self._device.type == "cpu" and not prefix_kernel("cpu", backbone.model.dtype, backbone.head_dim, backbone.head_dim).reason

    def _to_texts(self, rows: Sequence[int], starts: Sequence[int], ends: Sequence[int]) -> Attend:
        """Attention of each text to itself and to what its row holds before it."""
        backbone = self._backbone
        texts = list(zip(rows, starts, [0, *ends], ends, strict=False))
        # A text that begins its row needs no mask: the kernel knows that case.
        positions_L = torch.arange(max(start + end - first for _, start, first, end in texts), device=self._device)
        seen = [
            positions_L[: start + end - first] <= positions_L[start : start + end - first, None] if start else None
            for _, start, first, end in texts
        ]

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

    def _to_rows(self, starts_B: Tensor, visible: int, all_alike: bool, parts: Sequence["_CommonPart"]) -> Attend:
        """Attention of one new token per row to its row; a mask only where lengths differ. What rows have in common comes in parts of its own; the
        log-sum-exp of each part merges them into the softmax over all."""
        backbone, rows_B = self._backbone, torch.arange(len(starts_B), device=self._device)
        begin = parts[-1].stop if parts else 0
        mask_B11L: Tensor | None = None
        if not all_alike:
            mask_B11L = torch.arange(begin, visible, device=self._device) <= starts_B[:, None, None, None]
            if parts:  # the kernel adds its mask
                mask_B11L = torch.zeros(mask_B11L.shape, dtype=backbone.model.dtype).masked_fill_(~mask_B11L, -torch.inf)

        def attend(layer: int, query_BHW: Tensor, key_BKW: Tensor, value_BKW: Tensor) -> Tensor:
            keys, values = self.cache.layer(layer, key_BKW[:, :, None], value_BKW[:, :, None])
            keys[rows_B, :, starts_B], values[rows_B, :, starts_B] = key_BKW, value_BKW
            query_BKGW = query_BHW.unflatten(1, (backbone.num_kv_heads, -1))
            key_BKLW, value_BKLW = (buffer[: len(rows_B), :, begin:visible] for buffer in (keys, values))
            if not parts:
                mixed_BKGW = scaled_dot_product_attention(query_BKGW, key_BKLW, value_BKLW, attn_mask=mask_B11L, scale=backbone.scale)
                return mixed_BKGW.flatten(1, 2)
            mixed_BKGW, sums_BKG = _kernel(query_BKGW, key_BKLW, value_BKLW, attn_mask=mask_B11L, scale=backbone.scale)
            for part in parts:
                common_BKGW, common_BKG = part.attend(layer, query_BKGW)
                share_BKG1 = torch.sigmoid(common_BKG - sums_BKG)[..., None]
                mixed_BKGW = torch.lerp(mixed_BKGW.float(), common_BKGW.float(), share_BKG1.float())
                if part is not parts[-1]:
                    sums_BKG = torch.logaddexp(sums_BKG, common_BKG)
            return mixed_BKGW.to(query_BHW.dtype).flatten(1, 2)

        return attend


class _CommonPart:
    """Attention of a step to positions which rows have in common, read once for the rows of a set: their queries are folded into one text."""

    def __init__(self, cache: RowCache, scale: float, start: int, stop: int, sets: Sequence[Sequence[int]]) -> None:
        self.start, self.stop = start, stop
        self._cache, self._scale = cache, scale
        ordered = sorted(sets, key=lambda rows: (len(rows), rows[0]))
        order = [row for rows in ordered for row in rows]
        self._is_sorted = order == sorted(order)
        self._order_B = torch.tensor(order)
        self._back_B = self._order_B.argsort()
        self._stacks: list[_Stack] = []
        for rows in ordered:
            self._add(rows[0], len(rows))

    def _add(self, first: int, size: int) -> None:
        if self._stacks and self._stacks[-1].size == size:
            rows = self._stacks[-1].rows
            num_sets = len(range(rows.start, rows.stop, rows.step))
            step = first - rows.start if num_sets == 1 else rows.step
            if first == rows.start + num_sets * step:
                self._stacks[-1] = _Stack(slice(rows.start, first + 1, step), size)
                return
        self._stacks.append(_Stack(slice(first, first + 1, 1), size))

    def attend(self, layer: int, query_BKGW: Tensor) -> tuple[Tensor, Tensor]:
        """What the positions give [B, K, G, W], and the log-sum-exp of the scores [B, K, G]."""
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        query_BKGW = query_BKGW if self._is_sorted else query_BKGW[self._order_B]
        mixed, sums, first = [], [], 0
        for rows, size in self._stacks:
            key_PKLW, value_PKLW = (buffer[rows, :, self.start : self.stop] for buffer in (keys, values))
            query_PMKGW = query_BKGW[first : first + len(key_PKLW) * size].unflatten(0, (-1, size))
            folded_PKNW = query_PMKGW.transpose(1, 2).flatten(2, 3)
            out_PKNW, sums_PKN = _kernel(folded_PKNW, key_PKLW, value_PKLW, scale=self._scale)
            mixed.append(out_PKNW.unflatten(2, (size, -1)).transpose(1, 2).flatten(0, 1))
            sums.append(sums_PKN.unflatten(2, (size, -1)).transpose(1, 2).flatten(0, 1))
            first += len(query_PMKGW) * size
        mixed_BKGW, sums_BKG = (x[0] if len(x) == 1 else torch.cat(x) for x in (mixed, sums))
        return (mixed_BKGW, sums_BKG) if self._is_sorted else (mixed_BKGW[self._back_B], sums_BKG[self._back_B])
