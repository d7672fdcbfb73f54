"""Continuous batching: the rows of one run of the native engine, and the moves on them.

Every conversation owns a slot of a decoder while it lives, so a turn computes only its new tokens. A row is a conversation in its slot. It
waits while it has tokens to prefill (its prompt, or the observation after a response) and decodes afterwards. Waiting rows are prefilled
together, once they are an eighth of all rows, since a call costs much the same for few rows as for many; with drafts (below) on a GPU, by the next
call that decodes, which takes them in. Members of a group that wait with the same new prompt compute it once. A finished conversation frees its slot
immediately (a server keeps it, and lets others begin with what any slot holds: kept_slots.py); one that resets its context keeps its slot and clears the cache in it.

Complete responses are delivered to their conversations (parsed, given to the environment, the next prompt tokenised) while the device
decodes the other rows. Slow environments run meanwhile too; their answers are collected when rows are prefilled, always at the same point of
the run, so the order of everything follows from the conversations alone. Same seeds, same run.

A decoder may draw several tokens in one call. Tokens past the end of a response are dropped, and the uniforms they used stay with the
conversation, so a trajectory does not depend on how many tokens a call draws.

Where a step takes much the same time for one token of a row as for several, the decoder can guess the next tokens of each (`speculative_tokens`,
see models/fast/decoding/drafts.py): a step feeds a guess and samples behind each of its tokens, and what was sampled counts as far as the guess
agrees with it. The tokens are those that would have been sampled one by one, from the same uniforms.

Every row carries its own sampling, so that a server (rollout/serving) can put requests of different clients into one batch. Rows whose
sampling is the same, budgets aside, are sampled in one call; in training that is every row.

When memory runs out, the row admitted last gives up its slot and goes to the front of the queue with all its tokens. It is computed again
once another row has finished. That changes no trajectory, rounding apart.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tether.core.enums import FinishReason
from tether.core.errors import BadInput, DivergedModel
from tether.core.protocols import ContextReset, Conversation, EngineStatistics, PromptFuture, PromptTokens, Sampling
from tether.core.types import Completion
from tether.models.fast.decoding.drafts import DraftPause
from tether.models.fast.decoding.protocol import Decoder, DraftPlan, PrefillRequest, Sampled
from tether.rollout.engines.kept_slots import LEAST_SHARED, KeptSlots
from tether.rollout.engines.stop_rule import StopRule

FEED_SHARE = 8
"""Waiting rows are prefilled once they are this fraction (1 / FEED_SHARE) of all rows."""
UNIFORMS_AT_ONCE = 64
"""Drawn for a conversation at once: a generator is called less often."""

T = TypeVar("T")


class Admission(NamedTuple):
    """A conversation that waits for a slot, and how its responses are sampled."""

    conversation: Conversation
    sampling: Sampling
    on_progress: Callable[[], None] | None = None
    """Called after every few sampled tokens, before the response is complete. What it raises ends the whole run."""


@dataclass(slots=True)
class _Row:
    """One conversation. Invariant: it decodes while all its tokens but the last sampled one are in its slot, and waits otherwise."""

    conversation: Conversation
    sampling: Sampling
    on_progress: Callable[[], None] | None = None
    kind: Sampling = field(init=False)
    """The sampling without its budget: rows of one kind are sampled in one call."""
    slot: int = -1
    admitted: int = -1
    """Its place in the order of admission."""
    tokens: list[int] = field(default_factory=list)
    """The conversation: what was fed, what was sampled, and what waits to be fed."""
    filled: int = 0
    """How many of them are in the slot."""
    lost: int = 0
    """How many were in the slot when the row was evicted."""
    logprobs: list[float] = field(default_factory=list)
    """Of the response so far, which is the end of `tokens`."""
    pending: PromptFuture | None = None
    """Waits for the environment; set until its answer is collected."""
    ahead: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Uniforms that were drawn and not used: a few ahead, and those of tokens that were dropped. They are used in order."""

    def __post_init__(self) -> None:
        self.kind = _kind(self.sampling)

    @property
    def room(self) -> int:
        """How many tokens the response may still get."""
        return self.sampling.max_tokens - len(self.logprobs)

    @property
    def unfed(self) -> list[int]:
        return self.tokens[self.filled :]

    def uniforms(self, count: int) -> npt.NDArray[np.float32]:
        """The next uniforms of the conversation. The caller removes the ones it used from `ahead`."""
        if len(self.ahead) < count:
            more = self.conversation.uniforms.random(max(count, UNIFORMS_AT_ONCE), dtype=np.float32)
            self.ahead = np.concatenate([self.ahead, more]) if len(self.ahead) else more
        return self.ahead[:count]


class ContinuousBatch:
    """The rows of one run and the moves on them: admit, feed what waits, decode, evict."""

    def __init__(
        self,
        decoder: Decoder,
        stop: StopRule,
        statistics: EngineStatistics,
        cache: str,
        on_ended: Callable[[Conversation], None] | None,
        kept: KeptSlots | None,
        speculative_tokens: int,
    ) -> None:
        self._decoder, self._stop, self._statistics, self._cache = decoder, stop, statistics, cache
        self._on_ended = on_ended
        self._kept = kept
        self._speculative_tokens = speculative_tokens
        self._beside = speculative_tokens > 0 and decoder.prefills_beside
        """Whether rows are prefilled while others decode."""
        self._pause = DraftPause()
        if speculative_tokens and not kept:  # what was kept may be drafted from, too
            decoder.start_drafts(speculative_tokens)
        self._waiting: list[_Row] = []
        self._decoding: list[_Row] = []
        self._finished: list[tuple[_Row, FinishReason]] = []
        """Rows with a complete response that has not been delivered."""
        self._evicted: deque[_Row] = deque()
        self._slots_free = [slot for slot in reversed(range(decoder.num_slots)) if kept is None or slot not in kept]
        self._num_admitted = 0
        self._is_full = False
        """Memory ran out and no row has finished since."""

    def play(self, queue: deque[Admission]) -> None:
        """Drive every conversation to its end."""
        while queue or self._evicted or self._num_rows:
            self._is_full = self._is_full and self._num_rows > 0
            if not self._decoding:
                self._deliver_finished()
            while (queue or self._evicted) and (self._slots_free or self._kept) and not self._is_full:
                self._admit(queue)
            if self._waiting and (not self._decoding or (not self._beside and self._many_wait(self._num_rows))):
                self._collect_answers()
                self._prefill_waiting()
            elif self._decoding:
                self._decode()

    def _many_wait(self, num_rows: int) -> bool:
        """Whether it is worth a call, or the time of an environment that is still running, to prefill them."""
        return len(self._waiting) >= num_rows / FEED_SHARE

    @property
    def _num_rows(self) -> int:
        return len(self._waiting) + len(self._decoding) + len(self._finished)

    def _admit(self, queue: deque[Admission]) -> None:
        """Admit the next conversation. Evicted ones go first. A conversation without a prompt finishes immediately."""
        if self._evicted:
            row = self._evicted.popleft()
        else:
            row = _Row(*queue.popleft())
            feed = row.conversation.begin()
            if feed is None:
                self._notify_ended(row)
                return
            if callable(feed):
                row.pending = feed
            else:
                row.tokens = list(feed)
        if not self._continues_kept(row):
            row.slot = self._slots_free.pop()
        row.admitted = self._num_admitted
        self._num_admitted += 1
        self._waiting.append(row)

    def _continues_kept(self, row: _Row) -> bool:
        """Whether a row continues all of a conversation that has ended, and has its slot. Otherwise a slot is free for it."""
        if not self._kept:
            return False
        slot = self._kept.continued(row.tokens)
        if slot >= 0:
            row.slot = slot
            self._skip(row, self._kept.take(slot))
            return True
        if not self._slots_free and not self._give_up_kept(but=self._kept.find(row.tokens).slot):
            self._give_up_kept()
        return False

    def _skip(self, row: _Row, length: int) -> None:
        """The slot of a row holds so many of its tokens, which need not be computed."""
        row.filled, row.lost = length, max(0, row.lost - length)
        self._statistics.shared_tokens += length

    def _give_up_kept(self, but: int = -1) -> bool:
        """Free the slot of the conversation that ended longest ago, if one was kept, `but` excepted."""
        slot = None if self._kept is None else self._kept.give_up(but)
        if slot is None:
            return False
        self._decoder.release(slot)
        self._slots_free.append(slot)
        return True

    # ---------------------------------------------------------------------------------------------------------- the moves

    def _collect_answers(self) -> None:
        """Collect the answers of environments that are still running; a conversation that ends now frees its slot."""
        asked, self._waiting = self._waiting, []
        for row in asked:
            if row.pending is None:
                self._waiting.append(row)
            else:
                feed, row.pending = row.pending(), None
                self._next_prompt(row, feed)

    def _prefill_waiting(self) -> None:
        """Prefill every waiting row and sample its next token; it decodes from then on."""
        for row in self._waiting:
            self._check_length(len(row.tokens))
        while self._waiting:
            later = self._share_beginnings(self._waiting)
            while not self._reserve_prompts(groups := _same_prompts([row for row in self._waiting if row.slot not in later])):
                if not self._give_up_kept():
                    self._evict()
            self._waiting = [row for row in self._waiting if row.slot in later]
            for call in self._prefill(groups):
                self._accept(*call)

    def _share_beginnings(self, rows: list[_Row]) -> set[int]:
        """Let rows that begin take over what slots hold of their prompts. The slots of those that begin like one which is computed first."""
        if self._kept is None:
            return set()
        self._kept.take_back()
        later, alone = set[int](), set[object]()
        for row in rows:
            if not row.filled:
                found = self._kept.find(row.tokens)
                if found.promised - found.length >= LEAST_SHARED and _prompt_key(row) not in alone:
                    later.add(row.slot)
                    continue
                if found.length >= LEAST_SHARED:
                    self._adopt(row, found.slot, found.length)
            if not row.filled:
                alone.add(_prompt_key(row))  # the same prompt again is computed with it (_same_prompts)
            self._kept.promise(row.slot, row.tokens)
        return later

    def _adopt(self, row: _Row, source: int, length: int) -> None:
        while not (shared := self._decoder.adopt(row.slot, source, length)) and self._give_up_kept(but=source):
            pass
        self._skip(row, shared)

    def _prefill_beside(self, num_decoding: int) -> list[tuple[list[_Row], Sampling, Sampled]]:
        """Prefill rows that wait while so many others decode, if there is room for them.

        Rows whose environment is still running are left out until there are many: to wait for them would keep the rows that decode waiting, too.
        """
        if self._many_wait(self._num_rows + num_decoding):
            self._collect_answers()
        ready = [row for row in self._waiting if row.pending is None]
        for row in ready:
            self._check_length(len(row.tokens))
        later = self._share_beginnings(ready)
        groups = _same_prompts([row for row in ready if row.slot not in later])
        if not ready or not self._reserve_prompts(groups):
            return []
        self._waiting = [row for row in self._waiting if row.pending is not None or row.slot in later]
        return list(self._prefill(groups))

    def _reserve_prompts(self, groups: list[list[_Row]]) -> bool:
        return self._decoder.reserve(
            {row.slot: len(row.tokens) for members in groups for row in members},
            {row.slot: members[0].slot for members in groups for row in members[1:]},
        )

    def _prefill(self, groups: list[list[_Row]]) -> Iterator[tuple[list[_Row], Sampling, Sampled]]:
        """Rows of a kind, that kind, and what is sampled for them."""
        for members in groups:
            num_new = len(members[0].unfed)
            self._statistics.fed_tokens += num_new
            self._statistics.shared_tokens += num_new * (len(members) - 1)
            self._statistics.recomputed_tokens += members[0].lost
            for row in members:
                row.lost = 0
        for kind, alike in _by_kind(groups, lambda members: members[0].kind):
            requests = [PrefillRequest(tuple(row.slot for row in members), members[0].filled, members[0].unfed) for members in alike]
            rows = [row for members in alike for row in members]
            num_copied = self._decoder.tokens_copied
            sampled = self._decoder.prefill(requests, kind, np.concatenate([row.uniforms(1) for row in rows]))
            num_copied = self._decoder.tokens_copied - num_copied
            self._statistics.fed_tokens -= num_copied
            self._statistics.shared_tokens += num_copied
            if self._kept is not None:
                for row in rows:
                    self._kept.hold(row.slot)
            yield rows, kind, sampled

    def _decode(self) -> None:
        """Feed the last sampled token of every decoding row, and a draft where that is worth it, and sample its next tokens."""
        plan = self._draft_plan()
        most = self._decoder.tokens_per_call
        num_tokens = plan.most_sampled if plan else self._tokens_at_once(most)
        while not self._decoder.reserve({row.slot: row.filled + num_tokens for row in self._decoding}):
            if self._give_up_kept():
                continue
            if num_tokens > 1:
                plan, most = None, min(most, num_tokens // 2)
            elif self._finished:
                self._deliver_finished()  # some may free their memory
            else:
                self._evict()
            num_tokens = self._tokens_at_once(most)
        rows, self._decoding = self._decoding, []
        for kind, alike in _by_kind(rows, lambda row: row.kind):
            uniforms_BK = np.stack([row.uniforms(num_tokens) for row in alike])
            slots, starts, last_ids = zip(*[(row.slot, row.filled, row.tokens[-1]) for row in alike], strict=True)
            self._statistics.decode_calls += 1
            if plan is None:
                sampled = self._decoder.decode(slots, starts, last_ids, kind, uniforms_BK)
            else:
                sampled = self._decoder.speculate(slots, starts, last_ids, plan, kind, uniforms_BK)
            self._deliver_finished()  # while the device decodes
            beside = self._prefill_beside(len(rows)) if self._beside else []
            self._accept(alike, kind, sampled, plan)
            for call in beside:
                self._accept(*call)

    def _draft_plan(self) -> DraftPlan | None:
        """How the next call drafts; None where it does not."""
        if not self._speculative_tokens or not self._decoding or self._pause.applies():
            return None
        plan = self._decoder.draft_plan(len(self._decoding))
        if plan is None:
            return None
        rounds = min(plan.rounds, self._positions_left() // (1 + plan.tokens))
        return plan._replace(rounds=rounds) if rounds else None

    def _evict(self) -> None:
        """Free the slot of the row admitted last. It keeps its tokens and goes to the front of the queue.

        The last one, because the rows before it have more of their work in the cache, and because the order stays the same on every run.
        """
        row = max((*self._waiting, *self._decoding), key=lambda row: row.admitted)
        if self._num_rows == 1:
            raise BadInput(
                f"a conversation of {len(row.tokens)} tokens does not fit into the key/value cache ({self._cache}); "
                "raise rollout.cache_gb, or lower rollout.max_context"
            )
        (self._decoding if row in self._decoding else self._waiting).remove(row)
        self._free_slot(row)
        self._is_full = True
        self._statistics.evictions += row.filled > 0
        row.lost, row.filled = row.filled or row.lost, 0
        self._evicted.appendleft(row)

    # ---------------------------------------------------------------------------------------------------- before the calls

    def _tokens_at_once(self, most: int) -> int:
        """How many tokens to draw for every decoding row: no more than the longest can still use, and than fit before the last position."""
        if not self._decoding:
            return most
        return min(most, self._positions_left(), max(row.room for row in self._decoding))

    def _positions_left(self) -> int:
        """Behind the longest row that decodes."""
        longest = max(row.filled for row in self._decoding)
        self._check_length(longest + 1)
        return self._decoder.max_positions - longest

    def _check_length(self, num_tokens: int) -> None:
        if num_tokens > self._decoder.max_positions:
            raise BadInput(
                f"a conversation of {num_tokens} tokens exceeds the {self._decoder.max_positions} positions that it may have; "
                "lower rollout.max_context"
            )

    # ----------------------------------------------------------------------------------------------------- after the calls

    def _accept(self, rows: list[_Row], kind: Sampling, call: Sampled, plan: DraftPlan | None = None) -> None:
        """Append what a call sampled to its rows, up to the end of a response; complete responses wait to be delivered."""
        sampled = call()
        if plan is not None and sampled.counts_B is not None:
            num_drafts = len(rows) * plan.rounds
            num_right = int(sampled.counts_B.sum()) - num_drafts  # one token is sampled behind every draft
            self._statistics.drafts += num_drafts
            self._statistics.accepted_tokens += num_right
            self._pause.count(num_drafts, num_right)
        is_sampled_BK = True if sampled.counts_B is None else np.arange(sampled.ids_BK.shape[1]) < sampled.counts_B[:, None]
        if not np.isfinite(sampled.logprobs_BK, where=is_sampled_BK, out=np.ones(sampled.ids_BK.shape, dtype=np.bool_)).all():
            raise DivergedModel(
                "the model's log-probs are not finite: its weights have diverged; move the last checkpoints away, resume from an earlier one, "
                "or start again with a lower learner.learning_rate"
            )
        candidates_BK = self._stop.candidates(sampled.ids_BK, kind)
        candidates: dict[int, list[int]] = {}
        for b, k in np.argwhere(candidates_BK).tolist():
            candidates.setdefault(b, []).append(k)
        counts = [sampled.ids_BK.shape[1]] * len(rows) if sampled.counts_B is None else sampled.counts_B.tolist()
        num_used = 0
        sampled_rows = zip(rows, sampled.ids_BK.tolist(), sampled.logprobs_BK.tolist(), counts, strict=True)
        for b, (row, ids, logprobs, count) in enumerate(sampled_rows):
            if b not in candidates and count < row.room:  # most rows of most calls
                used, reason = count, None
            else:
                used, reason = self._end_of_response(row, ids[:count], candidates.get(b, []))
            row.tokens += ids[:used]
            row.logprobs += logprobs[:used]
            row.ahead = row.ahead[used:]
            row.filled = len(row.tokens) - 1
            num_used += used
            if row.on_progress is not None:
                row.on_progress()
            if reason is None:
                self._decoding.append(row)
            else:
                self._finished.append((row, reason))
        self._statistics.sampled_tokens += num_used
        self._statistics.dropped_tokens += sum(counts) - num_used

    def _end_of_response(self, row: _Row, ids: list[int], candidates: list[int]) -> tuple[int, FinishReason | None]:
        """How many of these new tokens belong to the response, and why it ends with them, if it does; only `candidates` can end it."""
        num_before, room = len(row.logprobs), row.room
        candidates = [index for index in candidates if index < min(room, len(ids))]
        num_tail = min(num_before, StopRule.tail_tokens(row.sampling)) if candidates else 0
        for index in candidates:
            tail = row.tokens[len(row.tokens) - num_tail :] + ids[: index + 1]
            reason = self._stop.finished(tail, row.sampling, row.conversation.closing_tags, num_before - num_tail)
            if reason is not None:
                return index + 1, reason
        return (room, FinishReason.LENGTH) if len(ids) >= room else (len(ids), None)

    def _deliver_finished(self) -> None:
        """Deliver complete responses to their conversations. A row then waits with its next prompt, or frees its slot."""
        finished, self._finished = self._finished, []
        for row, reason in finished:
            answer = row.conversation.receive(Completion(tuple(row.tokens[-len(row.logprobs) :]), tuple(row.logprobs), reason))
            if callable(answer):
                row.pending = answer
                self._waiting.append(row)
            else:
                self._next_prompt(row, answer)

    def _next_prompt(self, row: _Row, feed: PromptTokens) -> None:
        """Take the next prompt of a row, for which it waits; None frees its slot."""
        if feed is None:
            self._end(row)
            self._notify_ended(row)
            return
        if isinstance(feed, ContextReset):
            self._release(row)
            row.tokens, row.filled, row.lost = [], 0, 0
        row.tokens += feed
        row.logprobs = []
        self._waiting.append(row)

    def _end(self, row: _Row) -> None:
        """The conversation is over: its slot is kept for one that continues it, or freed."""
        if self._kept is None or not row.filled:
            self._free_slot(row)
        else:
            self._kept.keep(row.slot, row.tokens[: row.filled])
            self._is_full = False

    def _free_slot(self, row: _Row) -> None:
        self._release(row)
        self._slots_free.append(row.slot)

    def _release(self, row: _Row) -> None:
        self._decoder.release(row.slot)
        if self._kept is not None:
            self._kept.drop(row.slot)
        self._is_full = False

    def _notify_ended(self, row: _Row) -> None:
        if self._on_ended is not None:
            self._on_ended(row.conversation)


@lru_cache(maxsize=1024)
def _kind(sampling: Sampling) -> Sampling:
    """The sampling without its budget; equal ones are the same object, which makes them quick to compare."""
    return replace(sampling, max_tokens=0)


def _same_prompts(waiting: list[_Row]) -> list[list[_Row]]:
    """Rows that wait, grouped by equal new prompts of one prefix key: a group is computed once."""
    groups: dict[object, list[_Row]] = {}
    for row in waiting:
        groups.setdefault(row.admitted if row.filled else _prompt_key(row), []).append(row)
    return list(groups.values())


def _prompt_key(row: _Row) -> object:
    return row.conversation.prefix_key, row.kind, tuple(row.tokens)


def _by_kind(things: list[T], kind: Callable[[T], Sampling]) -> list[tuple[Sampling, list[T]]]:
    """The things of each kind, kinds in the order in which they first appear: nearly always a single kind."""
    if things and all(kind(thing) is kind(things[0]) for thing in things):
        return [(kind(things[0]), things)]
    parts: list[tuple[Sampling, list[T]]] = []
    for thing in things:
        wanted = kind(thing)
        alike = next((alike for found, alike in parts if found is wanted or found == wanted), None)
        if alike is None:
            parts.append((wanted, alike := []))
        alike.append(thing)
    return parts
