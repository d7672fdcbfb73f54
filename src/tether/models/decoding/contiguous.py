"""A decoder over contiguous rows: slots are mapped to rows of one buffer per layer, and rows that decode together lie together.

A model reads a range of rows as a view, so the rows of a step are moved to the front first; few change from one step to the next. Feeding
needs no order: rows are few then and the pass is long. Texts are fed in parts of bounded size, sorted by length where they are padded.
Slots that begin alike are computed once and copied.

Memory: all rows are as long as the longest conversation needs. Rows and positions together stay within a budget; positions grow by
doubling inside it, and where the longest conversation needs more, there are fewer rows. When the last slot is released, all memory goes
back.

Shape legend: B rows that decode, K tokens drawn for each, D width of the model.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.core.protocols import Sampling
from tether.models.decoding.cached import INITIAL_POSITIONS, CachedDecoder, max_positions
from tether.models.decoding.drawing import draw
from tether.models.decoding.passes import GroupedPass, PaddedPass, RowPass
from tether.models.decoding.protocol import NOBODY, PrefillRequest, SampleOutput
from tether.models.family.backbone import LlamaBackbone
from tether.models.policy import Policy
from tether.models.probing import probe_ids

PREFILL_TOKENS = 8192
"""Tokens of one pass over prompts, padding included; keeps memory flat."""


class ContiguousDecoder:
    """A Decoder over any causal language model; the family's trunk makes it faster where there is one."""

    tokens_per_call = 1

    def __init__(
        self,
        model: PreTrainedModel,
        split: Policy,
        num_slots: int,
        *,
        backbone: LlamaBackbone | None = None,
        most_positions: int | None = None,
        budget: int | None = None,
    ) -> None:
        """`budget` is in bytes, None for no limit; conversations are as long as the model allows, or `most_positions`."""
        self.num_slots = num_slots
        self.max_positions = min(max_positions(model), most_positions or max_positions(model))
        self._split, self._device = split, model.device
        self._pass: RowPass = PaddedPass(model, split) if backbone is None else GroupedPass(backbone)
        self._cache = self._pass.cache
        self._limit = None if budget is None else budget // position_bytes(model, split)
        """Positions of all rows together."""
        self._row: dict[int, int] = {}
        """Of every slot that is in use."""
        self._slot_at: dict[int, int] = {}
        """The slot of every row that is in use."""
        self._reserved: dict[int, int] = {}
        self._filled: dict[int, int] = {}
        """Positions of a slot that may hold something."""

    @torch.inference_mode()
    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int] = NOBODY) -> bool:
        """Make room for so many positions in each of these slots. False: memory does not suffice, and nothing has changed.

        Slots that begin alike have rows of their own here all the same.
        """
        reserved = self._reserved | {slot: max(count, self._reserved.get(slot, 0)) for slot, count in positions.items()}
        longest = max(reserved.values(), default=0)
        if self._limit is not None and len(reserved) * longest > self._limit:
            return False
        if len(reserved) > self._cache.num_rows or longest > self._cache.capacity:
            self._resize(longest)
        for slot in reserved.keys() - self._row.keys():
            self._put(slot, next(row for row in range(self._cache.num_rows) if row not in self._slot_at))
        self._reserved = reserved
        return True

    def release(self, slot: int) -> None:
        """Forget what a slot holds; the last one gives all memory back."""
        if slot in self._row:
            del self._slot_at[self._row.pop(slot)], self._reserved[slot]
            self._filled.pop(slot, None)
        if not self._row:
            self._cache.keys.clear()
            self._cache.values.clear()
            self._cache.resize(0, 0)

    @torch.inference_mode()
    def prefill(self, feedings: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> SampleOutput:
        """Feed tokens and draw the one that follows, for every slot in the order in which the feedings name them; room is reserved."""
        order, features = [], []
        for part in self._parts(feedings):
            texts = [feedings[n] for n in part]
            rows = [self._row[feeding.slots[0]] for feeding in texts]
            features.append(self._pass.feed(rows, [feeding.start for feeding in texts], [feeding.tokens for feeding in texts]))
            order += part
        for feeding in feedings:
            self._copy_to_followers(feeding)
        place = {n: index for index, n in enumerate(order)}
        source_B = torch.tensor([place[n] for n, feeding in enumerate(feedings) for _ in feeding.slots], device=self._device)
        return self._drawn([self._draw(torch.cat(features)[source_B], sampling, uniforms_B)])

    @torch.inference_mode()
    def decode(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> SampleOutput:
        """Draw K more tokens for each slot, whose last drawn token has not been fed yet and goes to position `starts`; room is reserved."""
        self._bring_to_front(slots)
        place = {slot: index for index, slot in enumerate(slots)}
        order = np.array([place[self._slot_at[row]] for row in range(len(slots))])
        ids_B = torch.tensor([last_ids[index] for index in order], device=self._device)
        drawn = []
        for k in range(uniforms_BK.shape[1]):
            features_BD = self._pass.step(ids_B, [starts[index] + k for index in order])
            ids_B, logprobs_B = self._draw(features_BD, sampling, uniforms_BK[order, k])
            drawn.append((ids_B, logprobs_B))
        for slot, start in zip(slots, starts, strict=True):
            self._filled[slot] = start + uniforms_BK.shape[1]
        in_rows = self._drawn(drawn)
        back = np.argsort(order)
        return SampleOutput(in_rows.ids_BK[back], in_rows.logprobs_BK[back])

    # ----------------------------------------------------------------------------------------------------------- drawing

    def _draw(self, features_BD: Tensor, sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        return draw(self._split.logits(features_BD).float(), sampling, torch.from_numpy(uniforms_B).to(self._device))

    @staticmethod
    def _drawn(draws: list[tuple[Tensor, Tensor]]) -> SampleOutput:
        ids_BK, logprobs_BK = (torch.stack(list(parts), dim=1).cpu().numpy() for parts in zip(*draws, strict=True))
        return SampleOutput(ids_BK, logprobs_BK)

    # ----------------------------------------------------------------------------------------------------------- feeding

    def _parts(self, feedings: Sequence[PrefillRequest]) -> list[list[int]]:
        """Feedings by number, in parts that one pass takes."""
        lengths = [len(feeding.tokens) for feeding in feedings]
        numbers = sorted(range(len(feedings)), key=lengths.__getitem__) if self._pass.pads else range(len(feedings))
        parts: list[list[int]] = []
        tokens = 0
        for number in numbers:
            size = (len(parts[-1]) + 1) * lengths[number] if parts and self._pass.pads else tokens + lengths[number]
            if not parts or size > PREFILL_TOKENS:
                parts.append([])
                tokens = 0
            parts[-1].append(number)
            tokens += lengths[number]
        return parts

    def _copy_to_followers(self, feeding: PrefillRequest) -> None:
        leader, *followers = feeding.slots
        self._filled[leader] = feeding.start + len(feeding.tokens)
        for slot in followers:
            self._cache.copy_row(self._row[leader], self._row[slot], self._filled[leader])
            self._filled[slot] = self._filled[leader]

    # -------------------------------------------------------------------------------------------------------------- rows

    def _resize(self, longest: int) -> None:
        """As many rows as there are slots, or as the budget leaves where each holds `longest` positions; the rest goes into positions."""
        limit = self.num_slots * self.max_positions if self._limit is None else self._limit
        num_rows = min(self.num_slots, limit // longest)
        generous = min(max(2 * self._cache.capacity, INITIAL_POSITIONS), limit // num_rows, self.max_positions)
        free = [row for row in range(num_rows) if row not in self._slot_at]
        for row in sorted(row for row in self._slot_at if row >= num_rows):
            self._move(row, free.pop())
        self._cache.resize(num_rows, max(longest, generous))

    def _bring_to_front(self, slots: Sequence[int]) -> None:
        """Move the rows of these slots to the first rows, in any order."""
        wanted = set(slots)
        outside = [slot for slot in slots if self._row[slot] >= len(slots)]
        places = [row for row in range(len(slots)) if self._slot_at.get(row) not in wanted]
        for slot, row in zip(outside, places, strict=True):
            self._move(self._row[slot], row)

    def _move(self, source: int, target: int) -> None:
        """Bring what a row holds to another one, and what that one holds to the first."""
        slot, other = self._slot_at.pop(source), self._slot_at.pop(target, None)
        if other is None:
            self._cache.copy_row(source, target, self._filled.get(slot, 0))
        else:
            self._cache.swap_rows(source, target, max(self._filled.get(slot, 0), self._filled.get(other, 0)))
            self._put(other, source)
        self._put(slot, target)

    def _put(self, slot: int, row: int) -> None:
        self._row[slot], self._slot_at[row] = row, slot


@torch.inference_mode()
def position_bytes(model: PreTrainedModel, split: Policy) -> int:
    """What one position of one conversation takes in the cache of a model: seen from one that is fed a token."""
    probe = CachedDecoder(model, 1, split)
    probe.extend(slice(0, 1), probe_ids(model, 1), torch.zeros(1, dtype=torch.long, device=model.device))
    return probe.cache.position_bytes
