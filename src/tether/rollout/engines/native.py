"""The native engine: many dialogues decoded in one batch, on the learner's own weights.

Every dialogue has a slot of a decoder for as long as it lives, so a turn only computes what is new. A row (a dialogue in its slot) waits
when it has tokens to be fed (its prompt, or the observation after a response) and decodes once they are. Waiting rows are fed together, once
they are an eighth of all rows: a call costs much the same for few rows as for many, so single rows are not fed one by one, and no
dialogue waits for the slowest of its turn. Members of a group that wait with the same new prompt compute it once. A finished dialogue
frees its slot at once for the next one; one that begins anew keeps its slot and forgets what is in it. Environments that take their time
work while others decode and are asked for their answers only when rows are fed, always at the same point of the run: the order of all
this follows from the dialogues alone. Same seeds, same run.

A decoder may draw several tokens in one call. Those behind the end of a response are dropped, and the uniforms they used stay with the
dialogue, so a trajectory does not depend on how many were drawn at once.

When memory runs out, the row that came last gives its slot back and stands first in the queue, with all its tokens. It is computed again once
another row has finished. Trajectories do not change by that, rounding apart.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.core.enums import FinishReason
from tether.core.errors import BadInput, DivergedModel
from tether.core.protocols import ContextReset, Conversation, PromptFuture, PromptTokens, Sampling
from tether.core.types import Completion
from tether.models.fast.decoding.choose import DecoderChoice
from tether.models.fast.decoding.protocol import Decoder, PrefillRequest, SampleOutput
from tether.models.policy import Policy
from tether.rollout.engines.stopping import TAIL_TOKENS, StopRule

FEED_SHARE = 8
"""Waiting rows are fed once they are one in so many."""


@dataclass(slots=True)
class EngineStatistics:
    """What a run of the engine did."""

    sampled_tokens: int = 0
    """Tokens of responses."""
    fed_tokens: int = 0
    """Tokens of prompts and observations that were computed."""
    shared_tokens: int = 0
    """Tokens of prompts that were not, because another member of the group had computed them."""
    dropped_tokens: int = 0
    """Tokens drawn behind the end of a response."""
    evictions: int = 0
    """How often a row lost what was in its slot because memory ran out."""
    recomputed_tokens: int = 0
    """Of the fed tokens, those that had been lost."""
    decode_calls: int = 0


@dataclass(slots=True)
class _Row:
    """One dialogue. It decodes while all its tokens but the last sampled one are in its slot, and waits otherwise."""

    conversation: Conversation
    slot: int = -1
    admitted: int = -1
    """Its place in the order of admission."""
    tokens: list[int] = field(default_factory=list)
    """The conversation: what was fed, what was sampled, and what waits to be fed."""
    filled: int = 0
    """How many of them are in the slot."""
    lost: int = 0
    """How many were when the slot was taken from it."""
    logprobs: list[float] = field(default_factory=list)
    """Of the response so far, which is the last of the tokens."""
    pending: PromptFuture | None = None
    """Asks the environment for its answer; set while it has not been asked."""
    ahead: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Uniforms taken from the dialogue for tokens that were not used."""

    @property
    def unfed(self) -> list[int]:
        return self.tokens[self.filled :]

    def uniforms(self, count: int) -> npt.NDArray[np.float32]:
        """The next uniforms of the dialogue; those that are used up are cut off `ahead`."""
        if len(self.ahead) < count:
            more = self.conversation.uniforms.random(count - len(self.ahead), dtype=np.float32)
            self.ahead = np.concatenate([self.ahead, more]) if len(self.ahead) else more
        return self.ahead[:count]


class NativeEngine:
    """Samples responses with the model it is given; `max_rows` dialogues live at a time, the others queue."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_rows: int = 128,
        max_context: int | None = None,
        cache_gb: float | None = None,
    ) -> None:
        """Conversations get as long as the model allows, or `max_context`; the cache takes `cache_gb`, or half of the memory that is free."""
        self._choice = DecoderChoice(Policy(model))
        self._decoder: Decoder | None = None
        self._stop = StopRule(tokenizer)
        self._max_rows, self._max_context, self._cache_gb = max_rows, max_context, cache_gb
        self.statistics = EngineStatistics()
        """Of the last run."""

    @property
    def backend(self) -> str:
        """Which decoder serves the model: paged, contiguous, or generic for an architecture that only its own code can compute."""
        return self._choice.backend

    def sync(self) -> None:
        """Nothing to do: these are the learner's own tensors."""

    def free(self) -> None:
        """Give the memory of the cache back; the next run takes it anew."""
        self._decoder = None

    def run(self, conversations: Sequence[Conversation], sampling: Sampling, on_finished: Callable[[], None] | None = None) -> None:
        """Drive every dialogue to its end."""
        self.statistics = EngineStatistics()
        decoder = self._decoder_for(min(self._max_rows, max(1, len(conversations))))
        cache = "half of the free memory" if self._cache_gb is None else f"rollout.cache_gb={self._cache_gb:g}"
        batch = _Batch(decoder, self._stop, sampling, self.statistics, cache, on_finished)
        try:
            batch.play(deque(conversations))
        except BaseException:
            self.free()  # slots are still taken, and may hold anything
            raise

    def _decoder_for(self, num_slots: int) -> Decoder:
        if self._decoder is None or self._decoder.num_slots < num_slots:
            self.free()
            budget = None if self._cache_gb is None else int(self._cache_gb * 2**30)
            self._decoder = self._choice.make(num_slots, self._max_context, budget)
        return self._decoder


class _Batch:
    """The rows of one run and the moves on them: admit, feed what waits, decode, evict."""

    def __init__(
        self,
        decoder: Decoder,
        stop: StopRule,
        sampling: Sampling,
        statistics: EngineStatistics,
        cache: str,
        on_finished: Callable[[], None] | None,
    ) -> None:
        self._decoder, self._stop, self._sampling, self._statistics, self._cache = decoder, stop, sampling, statistics, cache
        self._on_finished = on_finished
        self._waiting: list[_Row] = []
        self._decoding: list[_Row] = []
        self._evicted: deque[_Row] = deque()
        self._free_slots = list(reversed(range(decoder.num_slots)))
        self._num_admitted = 0
        self._is_full = False
        """Memory ran out, and nobody has left since."""
        self._tail = max([TAIL_TOKENS, *map(len, sampling.stop_ids)])
        """How many tokens decide whether a response ends."""

    def play(self, queue: deque[Conversation]) -> None:
        """Drive every dialogue to its end."""
        while queue or self._evicted or self._num_rows:
            self._is_full = self._is_full and self._num_rows > 0
            while (queue or self._evicted) and self._free_slots and not self._is_full:
                self._admit(queue)
            if self._waiting and (len(self._waiting) >= self._num_rows / FEED_SHARE or not self._decoding):
                self._settle_waiting()
                self._feed_waiting()
            elif self._decoding:
                self._decode()

    @property
    def _num_rows(self) -> int:
        return len(self._waiting) + len(self._decoding)

    def _admit(self, queue: deque[Conversation]) -> None:
        """Give a slot to who stands first, those who had one before the others; a dialogue that has nothing to say is finished at once."""
        if self._evicted:
            row = self._evicted.popleft()
        else:
            row = _Row(queue.popleft())
            feed = row.conversation.begin()
            if feed is None:
                self._announce()
                return
            if callable(feed):
                row.pending = feed
            else:
                row.tokens = list(feed)
        row.slot, row.admitted = self._free_slots.pop(), self._num_admitted
        self._num_admitted += 1
        self._waiting.append(row)

    # ---------------------------------------------------------------------------------------------------------- the moves

    def _settle_waiting(self) -> None:
        """Ask the environments that are still at work for their answers; a dialogue that ends with it frees its slot."""
        asked, self._waiting = self._waiting, []
        for row in asked:
            if row.pending is None:
                self._waiting.append(row)
            else:
                feed, row.pending = row.pending(), None
                self._give(row, feed)

    def _feed_waiting(self) -> None:
        """Prefill every waiting row, sample its next token, and let it decode."""
        for row in self._waiting:
            self._check_length(len(row.tokens))
        groups = self._alike()
        while not self._decoder.reserve(
            {row.slot: len(row.tokens) for row in self._waiting},
            {row.slot: members[0].slot for members in groups for row in members[1:]},
        ):
            self._evict()
            groups = self._alike()
        self._waiting = []
        if not groups:
            return
        for members in groups:
            self._count_fed(members)
        feedings = [PrefillRequest(tuple(row.slot for row in members), members[0].filled, members[0].unfed) for members in groups]
        rows = [row for members in groups for row in members]
        self._take(rows, self._decoder.prefill(feedings, self._sampling, np.concatenate([row.uniforms(1) for row in rows])))

    def _decode(self) -> None:
        """Feed the last sampled token of every decoding row and sample the next ones."""
        most = self._decoder.tokens_per_call
        num_tokens = self._tokens_at_once(most)
        while not self._decoder.reserve({row.slot: row.filled + num_tokens for row in self._decoding}):
            if num_tokens > 1:
                most = num_tokens // 2
            else:
                self._evict()
            num_tokens = self._tokens_at_once(most)
        rows, self._decoding = self._decoding, []
        if rows:
            uniforms_BK = np.stack([row.uniforms(num_tokens) for row in rows])
            slots, starts, last_ids = zip(*[(row.slot, row.filled, row.tokens[-1]) for row in rows], strict=True)
            self._statistics.decode_calls += 1
            self._take(rows, self._decoder.decode(slots, starts, last_ids, self._sampling, uniforms_BK))

    def _evict(self) -> None:
        """Take the slot from the row that was admitted last; it keeps its tokens and stands first in the queue."""
        row = max((*self._waiting, *self._decoding), key=lambda row: row.admitted)
        if self._num_rows == 1:
            raise BadInput(
                f"a conversation of {len(row.tokens)} tokens does not fit into the key/value cache ({self._cache}); "
                "raise rollout.cache_gb, or lower rollout.max_context"
            )
        (self._decoding if row in self._decoding else self._waiting).remove(row)
        self._vacate(row)
        self._is_full = True
        self._statistics.evictions += row.filled > 0
        row.lost, row.filled = row.filled or row.lost, 0
        self._evicted.appendleft(row)

    # ---------------------------------------------------------------------------------------------------- before the calls

    def _alike(self) -> list[list[_Row]]:
        """The waiting rows, those together that begin with the same tokens of their group."""
        groups: dict[object, list[_Row]] = {}
        for row in self._waiting:
            key = row.admitted if row.filled else (row.conversation.prefix_key, tuple(row.tokens))
            groups.setdefault(key, []).append(row)
        return list(groups.values())

    def _count_fed(self, members: list[_Row]) -> None:
        num_new = len(members[0].unfed)
        self._statistics.fed_tokens += num_new
        self._statistics.shared_tokens += num_new * (len(members) - 1)
        self._statistics.recomputed_tokens += members[0].lost
        for row in members:
            row.lost = 0

    def _tokens_at_once(self, most: int) -> int:
        """How many tokens to draw for every decoding row: no more than one of them can use, and than fit into the shortest room."""
        if not self._decoding:
            return most
        room = self._decoder.max_positions - max(row.filled for row in self._decoding)
        self._check_length(self._decoder.max_positions - room + 1)
        return min(most, room, self._sampling.max_tokens - min(len(row.logprobs) for row in self._decoding))

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._decoder.max_positions:
            raise BadInput(
                f"a conversation of {num_tokens} tokens exceeds the {self._decoder.max_positions} positions that it may have; "
                "lower rollout.max_context"
            )

    # ----------------------------------------------------------------------------------------------------- after the calls

    def _take(self, rows: list[_Row], drawn: SampleOutput) -> None:
        """Give the drawn tokens to their rows, up to the end of a response, and hand over the responses that are complete."""
        if not np.isfinite(drawn.logprobs_BK).all():
            raise DivergedModel(
                "the model's log-probs are not finite: its weights have diverged; move the last checkpoints away, resume from an earlier one, "
                "or start again with a lower learner.learning_rate"
            )
        suspects_BK = self._stop.suspects(drawn.ids_BK, self._sampling)
        suspects: dict[int, list[int]] = {}
        for b, k in np.argwhere(suspects_BK).tolist():
            suspects.setdefault(b, []).append(k)
        for b, (row, ids, logprobs) in enumerate(zip(rows, drawn.ids_BK.tolist(), drawn.logprobs_BK.tolist(), strict=True)):
            used, reason = self._end_of_response(row, ids, suspects.get(b, []))
            row.tokens += ids[:used]
            row.logprobs += logprobs[:used]
            row.ahead = row.ahead[used:]
            row.filled = len(row.tokens) - 1
            self._statistics.sampled_tokens += used
            self._statistics.dropped_tokens += len(ids) - used
            if reason is None:
                self._decoding.append(row)
            else:
                self._respond(row, reason)

    def _end_of_response(self, row: _Row, ids: list[int], suspects: list[int]) -> tuple[int, FinishReason | None]:
        """How many of these new tokens belong to the response, and why it ends with them, if it does; only `suspects` can end it."""
        num_before = len(row.logprobs)
        room = self._sampling.max_tokens - num_before
        num_tail = min(num_before, self._tail)
        for index in suspects:
            if index < room:
                tail = row.tokens[len(row.tokens) - num_tail :] + ids[: index + 1]
                reason = self._stop.finished(tail, self._sampling, row.conversation.closing_tags, num_before - num_tail)
                if reason is not None:
                    return index + 1, reason
        return (room, FinishReason.LENGTH) if len(ids) >= room else (len(ids), None)

    def _respond(self, row: _Row, reason: FinishReason) -> None:
        """Give a response to its dialogue; the row then waits with what comes next, or is gone."""
        answer = row.conversation.receive(Completion(tuple(row.tokens[-len(row.logprobs) :]), tuple(row.logprobs), reason))
        if callable(answer):
            row.pending = answer
            self._waiting.append(row)
        else:
            self._give(row, answer)

    def _give(self, row: _Row, feed: PromptTokens) -> None:
        """What comes next for a row: tokens to be fed, for which it waits, or nothing, which frees its slot."""
        if feed is None:
            self._vacate(row)
            self._announce()
            return
        if isinstance(feed, ContextReset):
            self._decoder.release(row.slot)
            self._is_full = False
            row.tokens, row.filled, row.lost = [], 0, 0
        row.tokens += feed
        row.logprobs = []
        self._waiting.append(row)

    def _vacate(self, row: _Row) -> None:
        self._decoder.release(row.slot)
        self._free_slots.append(row.slot)
        self._is_full = False

    def _announce(self) -> None:
        if self._on_finished is not None:
            self._on_finished()
