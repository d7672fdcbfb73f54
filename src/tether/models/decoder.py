"""Cached decoding over any Hugging Face causal language model: rows with a key/value cache that lives as long as its conversation.

`CachedDecoder` owns one growing buffer per layer, [rows, heads, positions, width], and hands the model views of it: `extend`
feeds new tokens to some rows (a prompt, an observation or a single sampled token are the same call) and returns features, from
which `logits` are made only where they are wanted. Rows are moved and copied by the caller, so that the rows in use are always a contiguous range and are read without a copy.
The weights are the module's own: there is nothing to synchronise after an update.

Shape legend: B rows of this call, T new tokens, L positions visible, D width, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.models.head import SplitModel, probe_ids

INITIAL_POSITIONS = 256
PROBE_TOKENS = 6


class SlotCache:
    """The key/value buffers, in the shape of a transformers cache: `update` writes the new positions and returns what is visible."""

    is_compileable = False

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.capacity = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._rows: slice = slice(0, 0)
        self._positions_BT = torch.empty(0)
        self._row_index_B1 = torch.empty(0)
        self._visible = 0

    def place(self, rows: slice, positions_BT: Tensor, visible: int) -> None:
        """Say where the next forward pass writes, and how far it sees."""
        self._rows, self._positions_BT, self._visible = rows, positions_BT, visible
        self._row_index_B1 = torch.arange(rows.start, rows.stop, device=positions_BT.device)[:, None]
        if visible > self.capacity:
            self._grow(max(visible, 2 * self.capacity, INITIAL_POSITIONS))

    def _grow(self, capacity: int) -> None:
        self.keys = [self._enlarged(buffer, capacity) for buffer in self.keys]
        self.values = [self._enlarged(buffer, capacity) for buffer in self.values]
        self.capacity = capacity

    @staticmethod
    def _enlarged(buffer: Tensor, capacity: int) -> Tensor:
        rows, heads, filled, width = buffer.shape
        larger = buffer.new_zeros(rows, heads, capacity, width)
        larger[:, :, :filled] = buffer
        return larger

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Called by the model's attention layers: [B, heads, T, width] in, [B, heads, L, width] out."""
        if layer_idx == len(self.keys):  # the first pass through a layer shows its shape
            for buffers, states in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(states.new_zeros(self.num_rows, states.shape[1], self.capacity, states.shape[3]))
        for buffer, states in ((self.keys[layer_idx], key_states), (self.values[layer_idx], value_states)):
            buffer[self._row_index_B1, :, self._positions_BT] = states.transpose(1, 2)
        return self.keys[layer_idx][self._rows, :, : self._visible], self.values[layer_idx][self._rows, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # positions are always given explicitly

    def copy_row(self, source: int, target: slice, length: int) -> None:
        """Overwrite rows with the first positions of another one."""
        for buffer in (*self.keys, *self.values):
            buffer[target, :, :length] = buffer[source, :, :length]

    def swap_rows(self, first: int, second: int, length: int) -> None:
        """Exchange the first positions of two rows."""
        for buffer in (*self.keys, *self.values):
            kept = buffer[first, :, :length].clone()
            buffer[first, :, :length] = buffer[second, :, :length]
            buffer[second, :, :length] = kept


def max_positions(model: PreTrainedModel) -> int:
    """How long a conversation may get: the model's positions, or its attention window, inside which full attention is the same thing."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 2**31)
    window = getattr(model.config, "sliding_window", None)
    return min(positions, int(window)) if window and getattr(model.config, "use_sliding_window", True) else positions


class CachedDecoder:
    """A model with a slot cache: feed tokens to rows, get features and logits."""

    def __init__(self, model: PreTrainedModel, num_rows: int, split: SplitModel | None = None) -> None:
        self.split = split or SplitModel(model)
        self.max_positions = max_positions(model)
        self.model = model
        self.cache = SlotCache(num_rows)

    @torch.inference_mode()
    def extend(self, rows: slice, ids_BT: Tensor, starts_B: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Feed `ids_BT` to `rows`, row b continuing at position starts_B[b]; returns the features of every fed position.

        Rows may be padded on the right with any id: what padding writes lies beyond the row's true length and is overwritten later.
        `lengths_B` says how many tokens of each row are no padding (all, if not given): only those count against the model's positions.
        """
        num_new = ids_BT.shape[1]
        positions_BT = starts_B[:, None] + torch.arange(num_new, device=ids_BT.device)
        visible = int(starts_B.max()) + num_new
        longest = visible if lengths_B is None else int((starts_B + lengths_B).max())
        if longest > self.max_positions:
            raise BadInput(
                f"a conversation of {longest} tokens exceeds the model's {self.max_positions} positions; lower rollout.max_context"
            )
        self.cache.place(rows, positions_BT, visible)
        hidden = torch.arange(visible, device=ids_BT.device) > positions_BT[:, :, None]
        mask = torch.zeros(hidden.shape, dtype=self.model.dtype, device=ids_BT.device)
        mask.masked_fill_(hidden, torch.finfo(mask.dtype).min)
        return self.split.features(
            input_ids=ids_BT,
            position_ids=positions_BT.clamp(max=self.max_positions - 1),
            attention_mask=mask[:, None],
            past_key_values=self.cache,
            use_cache=True,
        )

    @torch.inference_mode()
    def logits(self, features: Tensor) -> Tensor:
        """[..., V] in float32 from a selection of features."""
        return self.split.logits(features).float()


@torch.inference_mode()
def decodes_with_cache(model: PreTrainedModel, split: SplitModel) -> bool:
    """Whether feeding a text in two pieces gives what feeding it whole gives; not so for recurrent models and some attention biases."""
    ids_1T = probe_ids(model, PROBE_TOKENS)
    half = torch.tensor([PROBE_TOKENS // 2], device=model.device)
    decoder = CachedDecoder(model, 1, split)
    whole = decoder.logits(split.features(input_ids=ids_1T, use_cache=False))
    try:
        first = decoder.extend(slice(0, 1), ids_1T[:, :half], torch.zeros_like(half))
        second = decoder.extend(slice(0, 1), ids_1T[:, half:], half)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # however a model says that it cannot take such a cache
        return False
    # Against the largest logit: what rounding does to one of them depends on the size of all.
    slack = (1e-3 if model.dtype == torch.float32 else 2e-2) * max(1.0, float(whole.abs().max()))
    return bool((whole - decoder.logits(torch.cat([first, second], dim=1))).abs().max() <= slack)
