"""Decoding of the Llama family on a CUDA device: a paged cache, kernels that read each conversation's true length, steps that are replayed.

A step of decoding (embedding, layers, head, sampling, recording) is recorded once for a few batch sizes as a CUDA graph and replayed for every
token; rows that fill up a batch to its size write to page 0, which no slot owns. Several tokens in a row are sampled on the device before the
host looks at them. Prompts and observations are fed flat, one text after another; slots that begin alike share full pages. Small
feeds (a few conversations that come back from their environment) are filled up to one of a few sizes and replayed too: launched one by one, their
kernels would take longer than the device needs for them. Drafts (kernels/drafts.py) are made and verified by a step with a few tokens a row, several
times before the host looks; the last of these steps also takes in such a feed, which costs about half of what it costs apart. The weights are the
learner's: an update in place is seen by the next replay, and where parameters have moved the graphs are recorded again; MLPs may be a copy in float8
(fast/float8.py), which is refreshed in place.

Shape legend: B slots of a call, K tokens sampled for each, S tokens fed, X pages of a slot, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from tether.core.images import IMAGE_IDS
from tether.core.protocols import Sampling
from tether.models.fast.backbone import FeedForward, LlamaBackbone
from tether.models.fast.decoding.feeds import Feed, Feeds
from tether.models.fast.decoding.paged_pass import NewTokens, PagedPass
from tether.models.fast.decoding.pages import Pages
from tether.models.fast.decoding.protocol import NO_SHARING, DraftPlan, PrefillRequest, Sampled, SampleOutput
from tether.models.fast.decoding.sampling import sample
from tether.models.fast.kernels.drafts import DraftState, TextTable
from tether.models.fast.kernels.logits import DecodeState, sample_step
from tether.models.fast.kernels.warm_up import warm_up_drafts

PAGE = 64
TOKENS_PER_CALL = 8
"""Tokens sampled before the host looks: a response that ends wastes half of them, looking costs a tenth of a millisecond."""
PREFILL_TOKENS = 16384
"""Tokens of one pass over prompts; enough to keep the card busy, few enough to keep memory flat."""
BATCH_SIZES = (1, 4, 16, 32, 64, 96, 128, 192, 256, 384, 512)
"""Of recorded steps; larger batches go up in steps of the last."""


FEED_SIZES = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, PREFILL_TOKENS)
"""Tokens of recorded feeds."""
MOST_FED, MOST_PRODUCTS = 2048, 6e12
"""Feeds beyond so many tokens are recorded up to so many tokens x weights of the layers; larger ones keep the device busy while they are launched. So
the first prompts of a step and what comes back from most rows at once are replayed, 4,096 tokens of a model of 1.5B."""
MOST_TEXTS = 256
"""That a recorded feed has room for."""
MIXED_SIZES = (128, 256, 384, 512, 640, 768, 1024)
"""Tokens of feeds that a step with drafts takes in; larger ones take less time apart. Each is recorded for every number of rows."""
MIXED_PER_ROW = 128
"""The most tokens of such a feed for each row of the step: the others seldom wait for so few rows."""
TOKENS_PER_TEXT = 16
"""A recorded feed has room for one text per so many of its tokens; an observation is longer."""
DRAFTED_TOKENS = 256
"""Tokens of a step with drafts: so many take 1.2 to 1.5 times as long as a step without. Rows share them."""
LONGEST_DRAFTS = ((16, 15), (64, 7), (128, 3))
"""Tokens of a draft by the most rows: attention computes with room for the longest in every row. More rows have none."""
DRAFT_ROUNDS = 3
"""Drafts of a row that are verified before the host looks."""


class _DraftCall(NamedTuple):
    """A call with drafts whose last round is not launched yet: it can take in what comes back from the environments meanwhile."""

    state: DraftState
    step: partial[None]
    sampling: Sampling


class PagedDecoder:
    """A Decoder over a paged cache; see the module's text."""

    prefills_beside = True
    tokens_copied = 0
    """What a group shares is counted by the engine; nothing else is copied."""

    def __init__(
        self,
        backbone: LlamaBackbone,
        head: nn.Linear,
        num_slots: int,
        max_positions: int,
        budget: int,
        float8: Sequence[FeedForward] | None = None,
    ) -> None:
        """`budget` is in bytes; the cache takes what `num_slots` conversations of the full length need, if that is less. `float8`: what computes the
        MLPs in place of the model's own."""
        weight = head.weight
        size = (backbone.num_kv_heads, PAGE, backbone.head_dim)
        page_bytes = 2 * backbone.num_layers * int(np.prod(size)) * weight.element_size()
        num_pages = min(num_slots * -(-max_positions // PAGE), budget // page_bytes) + 1
        self.num_slots, self.max_positions, self.tokens_per_call = num_slots, max_positions, TOKENS_PER_CALL
        self.cache_bytes = num_pages * page_bytes
        self.capacity = min(max_positions, (num_pages - 1) * PAGE)  # page 0 belongs to nobody
        self._backbone, self._device = backbone, weight.device
        self._pages = Pages(num_pages, num_slots, PAGE, max_positions)
        self._feeds = Feeds(backbone, self._pages, max_positions, weight.device)
        self._never = () if backbone.vision is None else backbone.vision.never_sampled
        self._never_N = torch.tensor(self._never, dtype=torch.int32, device=weight.device) if self._never else None
        self._cache = torch.zeros(backbone.num_layers, 2, num_pages, *size, dtype=weight.dtype, device=weight.device)
        self._pass = PagedPass(backbone, head, self._cache, _batch_size(num_slots), float8)
        self._state = DecodeState(_batch_size(num_slots), TOKENS_PER_CALL, weight.device)
        self._tables_BX = torch.zeros(_batch_size(num_slots), self._pages.tables.shape[1], dtype=torch.int32, device=weight.device)
        self._shifts_B = torch.zeros(_batch_size(num_slots), dtype=torch.int32, device=weight.device) if backbone.sections else None
        """How far the rotary places of a call's rows lie from their positions."""
        self._graphs: dict[tuple[int, Sampling], torch.cuda.CUDAGraph] = {}
        self._fed: dict[tuple[int, int], tuple[list[Tensor], torch.cuda.CUDAGraph, Tensor]] = {}
        """Recorded feeds by their sizes: inputs, graph, logits."""
        self._texts: TextTable | None = None
        self._most_drafted = 0
        self._drafted: dict[tuple[int, int, Sampling], tuple[DraftState, partial[None]]] = {}
        """Recorded steps with drafts, by rows and tokens that may be fed to each."""
        self._mixed: dict[tuple[int, int, int, Sampling], tuple[list[Tensor], DecodeState, partial[None]]] = {}
        """The same steps with a feed: what is fed, what is sampled behind it."""
        self._open_call: _DraftCall | None = None
        num_weights = sum(parameter.numel() for layer in backbone.layers for parameter in layer.module.parameters())
        self._feed_sizes = [size for size in FEED_SIZES if size <= MOST_FED or size * num_weights <= MOST_PRODUCTS]
        self._most_recorded = max((*self._feed_sizes, *MIXED_SIZES))
        self._parameters = list(backbone.model.parameters())  # to walk over the modules takes a millisecond
        self._addresses: list[int] = []

    @property
    def cache_used(self) -> float:
        return 1 - self._pages.num_free / (self._cache.shape[2] - 1)

    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int] = NO_SHARING) -> bool:
        return self._pages.reserve(positions, alike)

    def release(self, slot: int) -> None:
        self._pages.release(slot)

    @torch.inference_mode()
    def adopt(self, slot: int, source: int, length: int) -> int:
        shared, copy = self._pages.adopt(slot, source, length)
        if copy is not None:
            self._cache[:, :, copy[1]] = self._cache[:, :, copy[0]]
        if self._feeds.places is not None:
            self._feeds.places.copy(source, slot, shared)
        if self._texts is not None:
            self._texts.copy(source, self._feeds.sent(np.array([slot])))
        return shared

    @torch.inference_mode()
    def prefill(self, requests: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> Sampled:
        if any(request.start == 0 for request in requests):  # a conversation begins; weights change between runs
            addresses = [parameter.data_ptr() for parameter in self._parameters]
            if addresses != self._addresses:  # what was recorded reads parameters where they no longer are
                self.forget_recordings()
                self._backbone.join()
                self._addresses = addresses
        call = self._open_call
        if call is not None and call.sampling == sampling and (size := _mixed_size(requests, len(call.state.slots_B))) is not None:
            return self._prefill_with(call, size, requests, uniforms_B)
        self._launch_last_round()
        leader_logits = [self._feed(part) for part in _parts(requests)]
        self._share([request for request in requests if len(request.slots) > 1])
        of_slot = [number for number, request in enumerate(requests) for _ in request.slots]
        logits_BV = torch.cat(leader_logits)[self._feeds.sent(np.array(of_slot))]
        ids_B, logprobs_B = sample(logits_BV, sampling, self._feeds.sent(uniforms_B), self._never)
        if self._texts is not None:
            self._learn_fed(self._texts, requests, ids_B)
        return lambda: SampleOutput(ids_B.cpu().numpy()[:, None], logprobs_B.float().cpu().numpy()[:, None])

    @torch.inference_mode()
    def decode(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> Sampled:
        num_rows, num_steps = uniforms_BK.shape
        size = _batch_size(num_rows)
        self._fill_state(slots, starts, last_ids, size)
        self._shift(slots, starts, num_steps, size)
        state = self._state
        state.uniforms_BK[:num_rows, :num_steps] = self._feeds.sent(uniforms_BK)
        state.rate_1.fill_(1 / (sampling.temperature or 1.0))
        step = self._recorded(size, sampling)
        for _ in range(num_steps):
            step()
        if self._texts is not None:
            self._learn_sampled(self._texts, slots, starts, last_ids, state.sampled_BK[:num_rows, :num_steps])

        def wait() -> SampleOutput:
            return SampleOutput(*(x_BK[:num_rows, :num_steps].cpu().numpy() for x_BK in (state.sampled_BK, state.logprobs_BK)))

        return wait

    def start_drafts(self, most_tokens: int) -> None:
        self._most_drafted = most_tokens
        if self._texts is not None:
            self._texts.forget()
            return
        self._texts = TextTable(self.num_slots, self.max_positions, self._device)
        if self._device.type == "cuda":
            plans = [(size, self.draft_plan(size)) for size in _batch_sizes(self.num_slots)]
            sizes = [(size, _num_fed(size, 1 + plan.tokens), 1 + plan.tokens) for size, plan in plans if plan is not None]
            warm_up_drafts(self._backbone, sizes)

    def draft_plan(self, num_slots: int) -> DraftPlan | None:
        longest = next((tokens for most_rows, tokens in LONGEST_DRAFTS if _batch_size(num_slots) <= most_rows), 0)
        return DraftPlan(DRAFT_ROUNDS, min(self._most_drafted, longest)) if longest else None

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
        assert self._texts is not None  # start_drafts made it
        num_rows, size = len(slots), _batch_size(len(slots))
        state, step = self._drafting(self._texts, size, 1 + plan.tokens, sampling)
        given = self._feeds.sent(state.given(self._pages.rows(slots, size), slots, starts, uniforms_BK, self._texts.unused_slot))
        self._shift(slots, starts, plan.most_sampled, size)
        state.memory[: len(given)] = given  # the last tokens are in the texts already, by whichever call has sampled them
        state.drawn.rate_1.fill_(1 / (sampling.temperature or 1.0))
        for _ in range(plan.rounds - 1):
            step()
        self._open_call = _DraftCall(state, step, sampling)

        def wait() -> SampleOutput:
            self._launch_last_round()
            return SampleOutput(*state.returned(num_rows))

        return wait

    def forget_recordings(self) -> None:
        """Whatever is asked for next is recorded anew."""
        for recorded in (self._graphs, self._fed, self._drafted, self._mixed):
            recorded.clear()
        self._pass.forget_recordings()

    # ------------------------------------------------------------------------------------------------------------ request

    def _feed(self, requests: Sequence[PrefillRequest]) -> Tensor:
        """One pass over the tokens of these requests; the logits behind the last token of each."""
        num_tokens, num_texts = sum(len(request.tokens) for request in requests), len(requests)
        recorded = _feed_size(num_tokens, num_texts, self._feed_sizes)
        size = recorded or (num_tokens, num_texts)
        inputs = self._feeds.inputs(requests, size)
        if recorded is None or self._device.type != "cuda":
            return self._pass.logits_of_feed(self._feeds.read(inputs, size))[:num_texts]
        return self._replayed(size, inputs)[:num_texts]

    def _replayed(self, size: tuple[int, int], inputs: Sequence[Tensor]) -> Tensor:
        """The logits of a feed of a recorded size."""
        if size not in self._fed:
            read = self._feeds.recorded(size, self._most_recorded)
            self._fed[size] = (read, *self._pass.record(partial(self._pass.logits_of_feed, self._feeds.read(read, size))))
        read, graph, logits_BV = self._fed[size]
        _copy(inputs, read)
        graph.replay()
        return logits_BV.clone()  # the next graph may use its memory

    def _share(self, requests: Sequence[PrefillRequest]) -> None:
        """Give the other slots of requests what their first ones have computed."""
        copies = [copy for slots, _, tokens in requests for copy in self._pages.share(slots[0], slots[1:], len(tokens))]
        if copies:
            sources, targets = self._feeds.sent(np.array(copies).T)
            self._cache[:, :, targets] = self._cache[:, :, sources]

    # ----------------------------------------------------------------------------------------------------------- decoding

    def _fill_state(self, slots: Sequence[int], starts: Sequence[int], last_ids: Sequence[int], size: int) -> None:
        """Put the rows of a call on the device; rows past `len(slots)` are unused."""
        state = self._state
        rows_3B = np.zeros((3, size), dtype=np.int32)
        rows_3B[:, : len(slots)] = last_ids, starts, starts
        rows_3B[2] += 1
        state.ids_B[:size], state.positions_B[:size], state.lengths_B[:size] = self._feeds.sent(rows_3B)
        self._tables_BX[:size] = self._feeds.sent(self._pages.rows(slots, size))
        state.step_1.zero_()

    def _shift(self, slots: Sequence[int], starts: Sequence[int], count: int, size: int) -> None:
        """Put the places of so many words for each slot on the device, where they are not their positions."""
        if self._feeds.places is not None and self._shifts_B is not None:
            shifts_B = np.zeros(size, dtype=np.int64)
            shifts_B[: len(slots)] = self._feeds.places.of_words(slots, starts, count) - np.asarray(starts)
            self._shifts_B[:size] = self._feeds.sent(shifts_B)

    def _new(self, ids_S: Tensor, tables_BX: Tensor, lengths_B: Tensor, ragged: tuple[Tensor, Tensor, int] | None = None) -> NewTokens:
        return NewTokens(ids_S, tables_BX, lengths_B, ragged, None if self._shifts_B is None else self._shifts_B[: len(lengths_B)])

    def _recorded(self, size: int, sampling: Sampling) -> "partial[None]":
        """A step for a batch size, to be called once a token; recorded when it is first asked for."""
        step = partial(self._step, size, sampling)
        if self._device.type != "cuda":
            return step
        key = size, _shape(sampling)
        if key not in self._graphs:
            self._graphs[key] = self._record(step)
        return partial(self._graphs[key].replay)

    def _record(self, step: "partial[None]") -> torch.cuda.CUDAGraph:
        """Record a step; what it does meanwhile to the state is undone."""
        state = self._state
        inputs = (state.ids_B, state.positions_B, state.lengths_B, state.step_1, self._tables_BX)
        saved = [tensor.clone() for tensor in inputs]
        # Recording runs the step twice on whatever the inputs hold: rows of page 0 let it write where no conversation is.
        for tensor, value in zip(inputs, (0, 0, 1, 0, 0), strict=True):
            tensor.fill_(value)
        graph, _ = self._pass.record(step)
        for tensor, values in zip(inputs, saved, strict=True):
            tensor.copy_(values)
        return graph

    def _step(self, size: int, sampling: Sampling) -> None:
        """Feed the last sampled token of every row and sample the next."""
        state = self._state
        new = self._new(state.ids_B[:size], self._tables_BX[:size], state.lengths_B[:size])
        self._sample(self._pass.logits_of_new(new), state, sampling)

    def _sample(self, logits_BV: Tensor, state: DecodeState, sampling: Sampling) -> None:
        """Sample a token for each row, record it, and move the rows on; by torch where tokens are excluded, since the kernel looks for no thresholds."""
        if not sampling.truncates or sampling.temperature == 0:
            sample_step(logits_BV, state, greedy=sampling.temperature == 0, never_N=self._never_N)
            return
        size = len(logits_BV)
        step_B1 = state.step_1.long().expand(size)[:, None]
        ids_B, logprobs_B = sample(logits_BV, sampling, state.uniforms_BK[:size].gather(1, step_B1)[:, 0], self._never)
        state.ids_B[:size] = ids_B
        state.sampled_BK[:size].scatter_(1, step_B1, ids_B[:, None])
        state.logprobs_BK[:size].scatter_(1, step_B1, logprobs_B[:, None])
        for counter in (state.positions_B[:size], state.lengths_B[:size], state.step_1):
            counter.add_(1)

    # ------------------------------------------------------------------------------------------------------------- drafts

    def _drafting(self, texts: TextTable, size: int, most_each: int, sampling: Sampling) -> tuple[DraftState, "partial[None]"]:
        """The state of rows to each of which so many tokens may be fed, and the step on it.

        When one is first asked for on a GPU, every step that a run may need is recorded, each also with every feed that it takes in: some three
        seconds in the first rollout, instead of a pause now and then in the first ten.
        """
        is_new = (size, most_each, _shape(sampling)) not in self._drafted
        drafting = self._one_drafting(texts, size, most_each, sampling)
        for other in _batch_sizes(self.num_slots) if is_new and self._device.type == "cuda" else ():
            if (plan := self.draft_plan(other)) is not None:
                call = _DraftCall(*self._one_drafting(texts, other, 1 + plan.tokens, sampling), sampling)
                for feed_size in _mixed_sizes(other):
                    self._mixing(texts, call, (feed_size, feed_size // TOKENS_PER_TEXT))
        return drafting

    def _one_drafting(self, texts: TextTable, size: int, most_each: int, sampling: Sampling) -> tuple[DraftState, "partial[None]"]:
        key = size, most_each, _shape(sampling)
        if key not in self._drafted:
            num_pages = self._pages.tables.shape[1]
            state = DraftState(size, most_each, DRAFT_ROUNDS, num_pages, self._device, _num_fed(size, most_each))
            step = partial(self._draft_step, texts, state, sampling)
            self._drafted[key] = state, self._recorded_drafts(texts, state, step) if self._device.type == "cuda" else step
        return self._drafted[key]

    def _recorded_drafts(self, texts: TextTable, state: DraftState, step: "partial[None]") -> "partial[None]":
        """A step on this state, whose rows are on page 0 meanwhile, where no conversation is."""
        state.memory.zero_()
        state.slots_B.fill_(texts.unused_slot)
        state.lengths_B.fill_(1)
        graph, _ = self._pass.record(step)
        return partial(graph.replay)

    def _drafted_tokens(self, state: DraftState) -> NewTokens:
        return self._new(state.fed_S, state.tables_BX, state.filled_B, (state.fed_starts_B, state.fed_counts_B, state.most_each))

    def _draft_step(self, texts: TextTable, state: DraftState, sampling: Sampling) -> None:
        """Feed the last sampled token of every row and a draft, sample behind each of them, and keep what the draft allows."""
        texts.guess(state)
        state.drawn.step_1.zero_()
        self._sample(self._pass.logits_of_new(self._drafted_tokens(state)), state.drawn, sampling)
        texts.accept(state)

    @torch.inference_mode()
    def _launch_last_round(self) -> None:
        """Of a call with drafts, if it was left open."""
        if self._open_call is not None:
            self._open_call.step()
            self._open_call = None

    def _prefill_with(
        self, call: _DraftCall, size: tuple[int, int], requests: Sequence[PrefillRequest], uniforms_B: npt.NDArray[np.float32]
    ) -> Sampled:
        """Launch the last round of a call together with a feed."""
        assert self._texts is not None
        inputs, fed, step = self._mixing(self._texts, call, size)
        _copy(self._feeds.inputs(requests, size), inputs)
        fed.uniforms_BK[: len(requests), 0] = self._feeds.sent(uniforms_B)
        fed.rate_1.fill_(1 / (call.sampling.temperature or 1.0))
        step()
        self._open_call = None
        self._learn_fed(self._texts, requests, fed.sampled_BK[: len(requests), 0])
        return lambda: SampleOutput(*(x_BK[: len(requests)].cpu().numpy() for x_BK in (fed.sampled_BK, fed.logprobs_BK)))

    def _mixing(self, texts: TextTable, call: _DraftCall, size: tuple[int, int]) -> tuple[list[Tensor], DecodeState, "partial[None]"]:
        """A step of a call with a feed of this size; recorded when it is first asked for."""
        state = call.state
        key = len(state.slots_B), state.most_each, size[0], _shape(call.sampling)
        if key not in self._mixed:
            inputs = self._feeds.recorded(size, self._most_recorded)
            fed = DecodeState(size[1], 1, self._device)
            step = partial(self._mixed_step, texts, state, self._feeds.read(inputs, size), fed, call.sampling)
            if self._device.type == "cuda":
                saved = state.memory.clone()  # the rounds before this one are under way
                step = self._recorded_drafts(texts, state, step)
                state.memory.copy_(saved)
            self._mixed[key] = inputs, fed, step
        return self._mixed[key]

    def _mixed_step(self, texts: TextTable, state: DraftState, feed: Feed, fed: DecodeState, sampling: Sampling) -> None:
        """A step with drafts for some rows that feeds others and samples behind what they were fed."""
        texts.guess(state)
        new_logits_SV, fed_logits_BV = self._pass.logits_of_both(self._drafted_tokens(state), feed)
        for logits, drawn in ((new_logits_SV, state.drawn), (fed_logits_BV, fed)):
            drawn.step_1.zero_()
            self._sample(logits, drawn, sampling)
        texts.accept(state)

    def _learn_fed(self, texts: TextTable, requests: Sequence[PrefillRequest], sampled_B: Tensor) -> None:
        """What was fed, and what was sampled behind it for every slot."""
        ids_S = np.concatenate([np.asarray(request.tokens) for request in requests])
        if self._never:
            ids_S = np.where(ids_S < IMAGE_IDS, ids_S, ~(ids_S & 0x7FFFFFFF))  # below zero: patches are recognised, and never drafted
        slots_S = np.concatenate([np.full(len(request.tokens), request.slots[0]) for request in requests])
        positions_S = np.concatenate([request.start + np.arange(len(request.tokens)) for request in requests])
        texts.learn(*self._feeds.sent(np.stack([ids_S, slots_S, positions_S])))
        for leader, *followers in (request.slots for request in requests):
            if followers:
                texts.copy(leader, self._feeds.sent(np.array(followers)))
        behind = [(slot, request.start + len(request.tokens)) for request in requests for slot in request.slots]
        texts.learn(sampled_B, *self._feeds.sent(np.array(behind).T))

    def _learn_sampled(
        self, texts: TextTable, slots: Sequence[int], starts: Sequence[int], last_ids: Sequence[int], sampled_BK: Tensor
    ) -> None:
        """What a call without drafts has sampled, and the token before it, which may not be known."""
        last_ids_B, slots_B, starts_B = self._feeds.sent(np.array([last_ids, slots, starts]))
        ids_BK = torch.cat([last_ids_B[:, None], sampled_BK], dim=1)
        numbers_K = torch.arange(ids_BK.shape[1], dtype=torch.int32, device=self._device)
        texts.learn(ids_BK.ravel(), slots_B.repeat_interleave(len(numbers_K)), (starts_B[:, None] + numbers_K).ravel())


def _num_fed(num_rows: int, most_each: int) -> int:
    """Tokens of a step with drafts."""
    return min(num_rows * most_each, max(DRAFTED_TOKENS, num_rows))


def _shape(sampling: Sampling) -> Sampling:
    """What is recorded for a sampling: its temperature is read from the state where nothing else shapes the distribution."""
    return replace(sampling, max_tokens=0, stop_ids=()) if sampling.truncates or sampling.temperature == 0 else Sampling(max_tokens=0)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


def _parts(requests: Sequence[PrefillRequest]) -> list[list[PrefillRequest]]:
    """Feedings in order, cut into passes by their tokens."""
    parts: list[list[PrefillRequest]] = [[]]
    tokens = 0
    for request in requests:
        if parts[-1] and tokens + len(request.tokens) > PREFILL_TOKENS:
            parts.append([])
            tokens = 0
        parts[-1].append(request)
        tokens += len(request.tokens)
    return parts


def _feed_size(num_tokens: int, num_texts: int, sizes: Sequence[int]) -> tuple[int, int] | None:
    """Of these sizes the smallest that holds so many tokens and texts, with the texts it has room for; None where none does."""
    return next(
        ((size, texts) for size in sizes if num_tokens <= size and num_texts <= (texts := min(size // TOKENS_PER_TEXT, MOST_TEXTS))),
        None,
    )


def _mixed_sizes(num_rows: int) -> list[int]:
    """Tokens of feeds that a step for so many rows with drafts takes in."""
    return [size for size in MIXED_SIZES if size <= MIXED_PER_ROW * num_rows]


def _mixed_size(requests: Sequence[PrefillRequest], num_rows: int) -> tuple[int, int] | None:
    """The sizes of a feed that such a step takes in; None where it is too large, or a prompt is shared."""
    if any(len(request.slots) > 1 for request in requests):
        return None
    return _feed_size(sum(len(request.tokens) for request in requests), len(requests), _mixed_sizes(num_rows))


def _batch_sizes(num_rows: int) -> list[int]:
    """The recorded sizes that a run with at most so many rows needs."""
    return [*(size for size in BATCH_SIZES if size < num_rows), _batch_size(num_rows)]


def _batch_size(num_rows: int) -> int:
    """The smallest recorded size that holds so many rows."""
    for size in BATCH_SIZES:
        if num_rows <= size:
            return size
    return -(-num_rows // BATCH_SIZES[-1]) * BATCH_SIZES[-1]
