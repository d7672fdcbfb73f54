"""A decoder over contiguous rows: slots are mapped to rows of one buffer per layer, and rows that decode together lie together.

A model reads a range of rows as a view, so the rows of a step are moved to the front first; few change from one step to the next. Feeding
needs no order: rows are few then and the pass is long. Texts are fed in parts of bounded size, sorted by length where they are padded.
What several slots begin with is computed once and copied: a prompt for the members of its group, and for all prompts the instructions and examples
that all of them begin with. A step reads these once, a prompt for its group and instructions for all rows.

Memory: all rows are as long as the longest conversation needs. Rows and positions together stay within a budget; positions grow by
doubling inside it, and where the longest conversation needs more, there are fewer rows. When the last slot is released, all memory goes
back.

Shape legend: B rows that decode, K tokens sampled for each, S tokens fed to all of them, D width of the model.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tether.core.images import IMAGE_IDS
from tether.core.protocols import Sampling
from tether.models.fast.backbone import LlamaBackbone
from tether.models.fast.decoding.drafts import Drafts
from tether.models.fast.decoding.protocol import NO_SHARING, DraftPlan, PrefillRequest, Sampled, SampleOutput
from tether.models.fast.decoding.rows import LEAST_COMMON, Common, GroupedPass, PaddedPass, RowPass, initial_positions, position_bytes
from tether.models.fast.decoding.sampling import sample
from tether.models.policy import Policy

PREFILL_TOKENS = 8192
"""Tokens of one pass over prompts, padding included; keeps memory flat."""


class ContiguousDecoder:
    """A Decoder over any causal language model; the family's forward pass makes it faster where there is one."""

    tokens_per_call = 1
    prefills_beside = False
    most_drafted_rows = 1
    """A CPU computes the second token of a row in the time of the first only while hardly any row is there."""

    def __init__(
        self,
        policy: Policy,
        num_slots: int,
        *,
        backbone: LlamaBackbone | None = None,
        most_positions: int | None = None,
        budget: int | None = None,
    ) -> None:
        """`budget` is in bytes, None for no limit; conversations are as long as the model allows, or `most_positions`."""
        self.num_slots = num_slots
        self.max_positions = min(policy.max_positions, most_positions or policy.max_positions)
        if backbone is not None:
            self.max_positions = min(self.max_positions, backbone.num_positions)
        self._policy, self._device = policy, policy.device
        self._pass: RowPass = PaddedPass(policy) if backbone is None else GroupedPass(backbone, policy.places)
        self._cache = self._pass.cache
        self._limit = None if budget is None else budget // position_bytes(policy)
        """Positions of all rows together."""
        self.capacity = self.max_positions if self._limit is None else min(self.max_positions, self._limit)
        self._row: dict[int, int] = {}
        """Of every slot that is in use."""
        self._slot_at: dict[int, int] = {}
        """The slot of every row that is in use."""
        self._reserved: dict[int, int] = {}
        self._filled: dict[int, int] = {}
        """Positions of a slot that may hold something."""
        self._beginning: list[int] = []
        """The tokens that all filled slots begin with."""
        self._prompt: dict[int, PrefillRequest] = {}
        """What a slot was first fed, the same object for slots that were fed together."""
        self.tokens_copied = 0
        self._drafts: Drafts | None = None
        self._most_drafted = 0

    @property
    def cache_used(self) -> float:
        reserved = list(self._reserved.values())  # another thread may change it
        return len(reserved) * max(reserved, default=0) / (self.num_slots * self.max_positions if self._limit is None else self._limit)

    @torch.inference_mode()
    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int] = NO_SHARING) -> bool:
        """Slots that share a prompt have rows of their own here."""
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
        """The last one gives all memory back."""
        if slot in self._row:
            del self._slot_at[self._row.pop(slot)], self._reserved[slot]
            self._filled.pop(slot, None)
            self._prompt.pop(slot, None)
        if not self._row:
            self._cache.keys.clear()
            self._cache.values.clear()
            self._cache.resize(0, 0, 0)

    @torch.inference_mode()
    def adopt(self, slot: int, source: int, length: int) -> int:
        """By a copy, which takes no time beside computing them."""
        if not self.reserve({slot: length}):
            return 0
        self._cache.copy_row(self._row[source], self._row[slot], length)
        self._filled[slot] = length
        self._beginning = self._beginning[:length]
        if self._drafts is not None:
            self._drafts.adopt(slot, source, length)
        return length

    @torch.inference_mode()
    def prefill(self, requests: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> Sampled:
        order, features = [], []
        left = self._begin(requests)
        for part in self._parts(left):
            texts = [left[n] for n in part]
            rows = [self._row[request.slots[0]] for request in texts]
            features_SD = self._pass.feed(rows, [request.start for request in texts], [request.tokens for request in texts])
            features.append(features_SD[torch.tensor([len(request.tokens) for request in texts], device=self._device).cumsum(0) - 1])
            order += part
        for request in requests:
            filled = request.start + len(request.tokens)
            for slot in request.slots:
                if slot != request.slots[0]:
                    self._cache.copy_row(self._row[request.slots[0]], self._row[slot], filled)
                self._filled[slot] = filled
                if not request.start:
                    self._prompt[slot] = request
                if self._drafts is not None:
                    self._drafts.write(slot, request.start, request.tokens)
        place = {n: index for index, n in enumerate(order)}
        source_B = torch.tensor([place[n] for n, request in enumerate(requests) for _ in request.slots], device=self._device)
        output = self._output([self._sample(torch.cat(features)[source_B], sampling, uniforms_B)])
        return lambda: output

    @torch.inference_mode()
    def decode(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> Sampled:
        self._bring_to_front(slots)
        place = {slot: index for index, slot in enumerate(slots)}
        order = np.array([place[self._slot_at[row]] for row in range(len(slots))])
        ids_B = torch.tensor([last_ids[index] for index in order], device=self._device)
        common = self._common(len(slots), min(starts))
        sampled = []
        for k in range(uniforms_BK.shape[1]):
            features_BD = self._pass.step(ids_B, [starts[index] + k for index in order], common)
            ids_B, logprobs_B = self._sample(features_BD, sampling, uniforms_BK[order, k])
            sampled.append((ids_B, logprobs_B))
        for slot, start in zip(slots, starts, strict=True):
            self._filled[slot] = start + uniforms_BK.shape[1]
        in_rows = self._output(sampled)
        back = np.argsort(order)
        output = SampleOutput(in_rows.ids_BK[back], in_rows.logprobs_BK[back])
        if self._drafts is not None:
            for slot, start, last_id, ids in zip(slots, starts, last_ids, output.ids_BK.tolist(), strict=True):
                self._drafts.write(slot, start, [last_id, *ids])
        return lambda: output

    def start_drafts(self, most_tokens: int) -> None:
        self._drafts, self._most_drafted = Drafts(), most_tokens

    def draft_plan(self, num_slots: int) -> DraftPlan | None:
        return DraftPlan(1, self._most_drafted) if num_slots <= self.most_drafted_rows else None

    @torch.inference_mode()
    def speculate(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        plan: DraftPlan,
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> Sampled:
        """Drafts are as long as the plan says; what none is known for is filled up with zeros."""
        assert self._drafts is not None and plan.rounds == 1
        for slot, start, last_id in zip(slots, starts, last_ids, strict=True):
            self._drafts.write(slot, start, [last_id])
        guesses = [list(takewhile(lambda token: token < IMAGE_IDS, self._drafts.guess(slot, plan.tokens))) for slot in slots]
        fed_BK = np.array([[last_id, *guess, *[0] * (plan.tokens - len(guess))] for last_id, guess in zip(last_ids, guesses, strict=True)])
        features_SD = self._pass.feed([self._row[slot] for slot in slots], starts, fed_BK.tolist())
        sampled = self._sample(features_SD, sampling, uniforms_BK.ravel())
        ids_BK, logprobs_BK = (x_S.cpu().numpy().reshape(fed_BK.shape) for x_S in sampled)
        counts_B = 1 + np.cumprod(ids_BK[:, :-1] == fed_BK[:, 1:], axis=1).sum(axis=1, dtype=np.int32)
        for slot, start, ids, count in zip(slots, starts, ids_BK.tolist(), counts_B.tolist(), strict=True):
            self._filled[slot] = start + fed_BK.shape[1]
            self._drafts.write(slot, start + 1, ids[:count])
        output = SampleOutput(ids_BK, logprobs_BK, counts_B)
        return lambda: output

    # ---------------------------------------------------------------------------------------------------------- sampling

    def _sample(self, features_BD: Tensor, sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> tuple[Tensor, Tensor]:
        never = () if self._policy.vision is None else self._policy.vision.never_sampled
        return sample(self._policy.logits(features_BD).float(), sampling, torch.from_numpy(uniforms_B).to(self._device), never)

    @staticmethod
    def _output(samples: list[tuple[Tensor, Tensor]]) -> SampleOutput:
        ids_BK, logprobs_BK = (torch.stack(list(parts), dim=1).cpu().numpy() for parts in zip(*samples, strict=True))
        return SampleOutput(ids_BK, logprobs_BK)

    # ----------------------------------------------------------------------------------------------------------- request

    def _begin(self, requests: Sequence[PrefillRequest]) -> Sequence[PrefillRequest]:
        """Let new conversations begin with what all slots begin with; returns what is left to feed, at least one token of each."""
        new = [request for request in requests if request.start == 0]
        if not new:
            return requests
        source = next(iter(self._filled), None)
        beginning = list(new[0].tokens) if source is None else self._beginning
        for request in new:
            alike = takewhile(lambda pair: pair[0] == pair[1], zip(beginning, request.tokens, strict=False))
            beginning = [token for token, _ in alike]
        self._beginning = beginning
        length = min(len(beginning), *(len(request.tokens) - 1 for request in new))
        if length < LEAST_COMMON or (source is None and len(new) == 1):
            return requests
        if source is None:
            source = new[0].slots[0]
            self._pass.feed([self._row[source]], [0], [beginning[:length]])
            self.tokens_copied -= length
        for request in new:
            if request.slots[0] != source:
                self._cache.copy_row(self._row[source], self._row[request.slots[0]], length)
        self.tokens_copied += length * len(new)
        return [request if request.start else PrefillRequest(request.slots, length, request.tokens[length:]) for request in requests]

    def _parts(self, requests: Sequence[PrefillRequest]) -> list[list[int]]:
        """Feedings by number, in parts that one pass takes."""
        lengths = [len(request.tokens) for request in requests]
        numbers = sorted(range(len(requests)), key=lengths.__getitem__) if self._pass.pads else range(len(requests))
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

    # -------------------------------------------------------------------------------------------------------------- rows

    def _common(self, num_rows: int, shortest: int) -> list[Common]:
        """What the first rows have in common: all of them, and those that were fed one prompt together."""
        sets: dict[int, list[int]] = {}
        stop = shortest
        for row in range(num_rows):
            prompt = self._prompt.get(self._slot_at[row])
            alike = sets.setdefault(-1 - row if prompt is None else id(prompt), [])
            alike.append(row)
            if prompt is not None and len(alike) > 1:
                stop = min(stop, len(prompt.tokens))
        return [Common(len(self._beginning), [range(num_rows)]), Common(stop, list(sets.values()))]

    def _resize(self, longest: int) -> None:
        """As many rows as there are slots, or as the budget leaves where each holds `longest` positions; the rest goes into positions."""
        limit = self.num_slots * self.max_positions if self._limit is None else self._limit
        num_rows = min(self.num_slots, limit // longest)
        generous = min(max(2 * self._cache.capacity, initial_positions(self._device)), limit // num_rows, self.max_positions)
        free = [row for row in range(num_rows) if row not in self._slot_at]
        for row in sorted(row for row in self._slot_at if row >= num_rows):
            self._move(row, free.pop())
        self._cache.resize(num_rows, max(longest, generous), max(self._filled.values(), default=0))

    def _bring_to_front(self, slots: Sequence[int]) -> None:
        """Move the rows of these slots to the first rows, in any order."""
        wanted = set(slots)
        outside = [slot for slot in slots if self._row[slot] >= len(slots)]
        rows = [row for row in range(len(slots)) if self._slot_at.get(row) not in wanted]
        for slot, row in zip(outside, rows, strict=True):
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
