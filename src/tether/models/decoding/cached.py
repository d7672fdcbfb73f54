"""Cached decoding over any Hugging Face causal language model: rows with a key/value cache that lives as long as its conversation.

`CachedDecoder` owns one growing buffer per layer, [rows, heads, positions, width], and hands the model views of it: `extend`
feeds new tokens to some rows (a prompt, an observation or a single sampled token are the same call) and returns features, from
which `logits` are made only where they are wanted. Rows that are a contiguous range are read without a copy; moving and copying rows is
the caller's business. The weights are the module's own: there is nothing to synchronise after an update.

Shape legend: B rows of this call, T new tokens, L positions visible, D width, V vocabulary.
"""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.models.policy import Policy
from tether.models.probing import probe_ids

INITIAL_POSITIONS = 256
PROBE_TOKENS = 6


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

    def place(self, rows: slice | Tensor, positions_BT: Tensor, visible: int, inside_BT: Tensor | None = None) -> None:
        """Say where the next forward pass writes, and how far it sees; tokens that are not `inside` are padding and not written."""
        rows_B = torch.arange(rows.start, rows.stop, device=positions_BT.device) if isinstance(rows, slice) else rows
        rows_BT = rows_B[:, None].expand_as(positions_BT)
        self._targets = (rows_BT, positions_BT) if inside_BT is None else (rows_BT[inside_BT], positions_BT[inside_BT])
        self._rows, self._visible, self._inside_BT = rows, visible, inside_BT
        if visible > self.capacity:
            self.resize(self.num_rows, max(visible, 2 * self.capacity, INITIAL_POSITIONS))

    def resize(self, num_rows: int, capacity: int) -> None:
        """Make rows and positions more or fewer; those that there are before and after keep what they hold."""
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):  # one at a time: the old one is gone before the next is made
                resized = buffer.new_zeros(num_rows, buffer.shape[1], capacity, buffer.shape[3])
                rows, filled = min(num_rows, len(buffer)), min(capacity, buffer.shape[2])
                resized[:rows, :, :filled] = buffer[:rows, :, :filled]
                buffers[layer] = resized
        self.num_rows, self.capacity = num_rows, capacity

    def layer(self, index: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer; the first states that pass through it, [B, heads, T, width], show its shape."""
        if index == len(self.keys):
            for buffers, states in ((self.keys, key_states), (self.values, value_states)):
                buffers.append(states.new_zeros(self.num_rows, states.shape[1], self.capacity, states.shape[3]))
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

    def swap_rows(self, first: int, second: int, length: int) -> None:
        """Exchange the first positions of two rows."""
        for buffer in (*self.keys, *self.values):
            kept = buffer[first, :, :length].clone()
            buffer[first, :, :length] = buffer[second, :, :length]
            buffer[second, :, :length] = kept

    @property
    def position_bytes(self) -> int:
        """What one position of one row takes; known once something has been fed."""
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in (*self.keys, *self.values))


def max_positions(model: PreTrainedModel) -> int:
    """How long a conversation may get: the model's positions, or its attention window, inside which full attention is the same thing."""
    positions = int(getattr(model.config, "max_position_embeddings", 0) or 2**31)
    window = getattr(model.config, "sliding_window", None)
    return min(positions, int(window)) if window and getattr(model.config, "use_sliding_window", True) else positions


class CachedDecoder:
    """A model with a cache of rows: feed tokens to rows, get features and logits."""

    def __init__(self, model: PreTrainedModel, num_rows: int, split: Policy | None = None) -> None:
        self.split = split or Policy(model)
        self.max_positions = max_positions(model)
        self.model = model
        self.cache = RowCache(num_rows)

    @torch.inference_mode()
    def extend(self, rows: slice | Tensor, ids_BT: Tensor, starts_B: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Feed `ids_BT` to `rows`, row b continuing at position starts_B[b]; returns the features of every fed position.

        Rows may be padded on the right with any id. `lengths_B` says how many tokens of each row are no padding (all, if not given): only
        those are written and count against the model's positions.
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
def decodes_with_cache(model: PreTrainedModel, split: Policy) -> bool:
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
