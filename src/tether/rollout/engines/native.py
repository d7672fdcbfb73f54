"""The native engine: many dialogues decoded in one batch, on the learner's own weights.

Every dialogue has a row in the cache for as long as it lives, so a turn only computes what is new. The rows are kept in three
contiguous zones, which makes every read of the cache a view:

    0 ... decoding ... | ... waiting ... | free

A row waits when it has tokens to be fed (its prompt, or the observation after a response) and moves to decoding once they are.
Waiting rows are fed together, once they are an eighth of all rows: a call costs much the same for few rows as for many, so single rows
are not fed one by one, and no dialogue waits for the slowest of its turn. Members of a group that wait with the same new prompt compute
it once. A finished dialogue frees its row at once for the next one; one that begins anew keeps its row and forgets what is in it.
Environments that take their time work while others decode and are asked for their answers only when rows are fed, always at the same
point of the run: the order of all this follows from the dialogues alone. Same seeds, same run.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.core.errors import BadInput, DivergedModel
from tether.core.protocols import Anew, Dialogue, Feed, Pending, Sampling
from tether.core.types import Completion
from tether.models.decoder import CachedDecoder, decodes_with_cache
from tether.models.head import SplitModel
from tether.rollout.engines.sampling import StopRule, draw

PREFILL_TOKENS = 8192
"""Padded tokens of one prefill call; keeps memory flat."""

FEED_SHARE = 8
"""Waiting rows are fed once they are one in so many."""


@dataclass(slots=True)
class _Row:
    """One dialogue in the cache."""

    dialogue: Dialogue
    feed: tuple[int, ...]
    """Tokens waiting to be fed; empty while decoding, or while the environment has not answered."""
    pending: Pending | None = None
    """Asks the environment for its answer; set while it has not been asked."""
    length: int = 0
    """Positions of the cache that are filled."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def is_new(self) -> bool:
        return self.length == 0


class NativeEngine:
    """Samples responses with the model it is given; `max_rows` dialogues live at a time, the others queue."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, max_rows: int = 128) -> None:
        self._model = model
        self._split = SplitModel(model)
        if not decodes_with_cache(model, self._split):
            raise BadInput(
                f"models of type '{model.config.model_type}' cannot be decoded with a key/value cache of this engine; "
                "use a transformer with causal attention such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )
        self._stop = StopRule(tokenizer)
        self._max_rows = max_rows

    def sync(self) -> None:
        """Nothing to do: these are the learner's own tensors."""

    @torch.inference_mode()
    def run(self, dialogues: Sequence[Dialogue], sampling: Sampling, on_finished: Callable[[], None] | None = None) -> None:
        """Drive every dialogue to its end."""
        decoder = CachedDecoder(self._model, min(self._max_rows, max(1, len(dialogues))), self._split)
        batch = _Batch(decoder, self._stop, sampling, on_finished)
        queue = deque(dialogues)
        while queue or batch.rows:
            while queue and len(batch.rows) < batch.decoder.cache.num_rows:
                batch.admit(queue.popleft())
            if batch.num_waiting and (batch.num_waiting >= len(batch.rows) / FEED_SHARE or not batch.num_decoding):
                batch.settle_waiting()
                if batch.num_waiting:
                    batch.feed_waiting()
            elif batch.num_decoding:
                batch.decode_one()


class _Batch:
    """The rows of one run and the two moves on them: feed what waits, decode one token."""

    def __init__(self, decoder: CachedDecoder, stop: StopRule, sampling: Sampling, on_finished: Callable[[], None] | None) -> None:
        self.decoder = decoder
        self.rows: list[_Row] = []
        """Decoding rows first, then waiting ones; the index is the row of the cache."""
        self.num_decoding = 0
        self._stop = stop
        self._sampling = sampling
        self._on_finished = on_finished
        self._device = decoder.model.device

    @property
    def num_waiting(self) -> int:
        return len(self.rows) - self.num_decoding

    def admit(self, dialogue: Dialogue) -> None:
        """Begin a dialogue in the first free row; one that has nothing to say is finished at once."""
        feed = dialogue.begin()
        if feed is None:
            self._announce()
        else:
            self.rows.append(_Row(dialogue, (), feed) if callable(feed) else _Row(dialogue, feed))

    def settle_waiting(self) -> None:
        """Ask the environments that are still at work for their answers; a dialogue that ends with it frees its row."""
        for index in reversed(range(self.num_decoding, len(self.rows))):  # from the end: a leaving row is replaced by a settled one
            row = self.rows[index]
            if row.pending is not None:
                feed, row.pending = row.pending(), None
                self._give(index, feed)

    def feed_waiting(self) -> None:
        """Prefill every waiting row, sample its first token, and let it decode."""
        start, leaders = self.num_decoding, self._sort_waiting()
        logits = [self._prefill(range(first, last)) for first, last in self._chunks(leaders)]
        leader_logits_BV = torch.cat(logits)
        source = self._copy_to_followers(leaders)
        self.num_decoding = len(self.rows)
        self._sample(range(start, len(self.rows)), leader_logits_BV[torch.tensor(source, device=self._device)])

    def decode_one(self) -> None:
        """Feed the last sampled token of every decoding row and sample the next."""
        rows = self.rows[: self.num_decoding]
        ids_B1 = torch.tensor([[row.ids[-1]] for row in rows], device=self._device)
        starts_B = torch.tensor([row.length for row in rows], device=self._device)
        features_B1D = self.decoder.extend(slice(0, len(rows)), ids_B1, starts_B)
        for row in rows:
            row.length += 1
        self._sample(range(len(rows)), self.decoder.logits(features_B1D[:, 0]))

    def _sort_waiting(self) -> list[int]:
        """Bring the waiting rows that must be computed to the front; behind them, members whose leader computes the same prompt.

        Returns the indices of the former.
        """
        seen: set[tuple[int, tuple[int, ...]]] = set()
        end_of_leaders = self.num_decoding
        for index in range(self.num_decoding, len(self.rows)):
            row = self.rows[index]
            key = (row.dialogue.prefix_key, row.feed)
            if row.is_new and key in seen:
                continue
            if row.is_new:
                seen.add(key)
            self._swap(end_of_leaders, index)
            end_of_leaders += 1
        return list(range(self.num_decoding, end_of_leaders))

    def _chunks(self, leaders: list[int]) -> list[tuple[int, int]]:
        """Consecutive leaders whose padded size stays within the budget of one call."""
        chunks, first = [], leaders[0]
        widest = 0
        for index in leaders:
            widest = max(widest, len(self.rows[index].feed))
            if index > first and (index - first + 1) * widest > PREFILL_TOKENS:
                chunks.append((first, index))
                first, widest = index, len(self.rows[index].feed)
        chunks.append((first, leaders[-1] + 1))
        return chunks

    def _prefill(self, indices: range) -> Tensor:
        """Feed the waiting tokens of consecutive rows; logits of each row's last one."""
        rows = [self.rows[index] for index in indices]
        longest = max(len(row.feed) for row in rows)
        ids_BT = torch.zeros(len(rows), longest, dtype=torch.long)
        for b, row in enumerate(rows):
            ids_BT[b, : len(row.feed)] = torch.tensor(row.feed)
        starts_B = torch.tensor([row.length for row in rows], device=self._device)
        lengths_B = torch.tensor([len(row.feed) for row in rows], device=self._device)
        features_BTD = self.decoder.extend(slice(indices.start, indices.stop), ids_BT.to(self._device), starts_B, lengths_B)
        for row in rows:
            row.length += len(row.feed)
        return self.decoder.logits(features_BTD[torch.arange(len(rows), device=self._device), lengths_B - 1])

    def _copy_to_followers(self, leaders: list[int]) -> list[int]:
        """Copy each leader's prompt cache to the members that share it; returns, for every waiting row, the leader to sample from."""
        leader_of = {(self.rows[index].dialogue.prefix_key, self.rows[index].feed): index for index in leaders}
        source = [index - leaders[0] for index in leaders]
        for index in range(leaders[-1] + 1, len(self.rows)):
            row = self.rows[index]
            leader = leader_of[(row.dialogue.prefix_key, row.feed)]
            row.length = self.rows[leader].length
            self.decoder.cache.copy_row(leader, slice(index, index + 1), row.length)
            source.append(leader - leaders[0])
        return source

    def _sample(self, indices: range, logits_BV: Tensor) -> None:
        """Draw one token for each row; hand over the responses it completes."""
        rows = [self.rows[index] for index in indices]
        uniforms_B = torch.tensor([row.dialogue.uniforms.random(dtype=np.float32) for row in rows], device=self._device)
        ids_B, logprobs_B = draw(logits_BV, self._sampling.temperature, uniforms_B)
        logprobs = logprobs_B.tolist()
        if not all(map(math.isfinite, logprobs)):
            raise DivergedModel(
                "the model's log-probs are not finite: its weights have diverged; move the last checkpoints away, resume from an earlier one, "
                "or start again with a lower learner.learning_rate"
            )
        for row, token, logprob in zip(rows, ids_B.tolist(), logprobs, strict=True):
            row.feed = ()
            row.ids.append(token)
            row.logprobs.append(logprob)
        for index in reversed(indices):  # from the end: leaving rows swap with later ones, which are settled by then
            row = self.rows[index]
            reason = self._stop.finished(row.ids, self._sampling.max_tokens, row.dialogue.closing_tags)
            if reason is not None:
                self._respond(index, Completion(tuple(row.ids), tuple(row.logprobs), reason))

    def _respond(self, index: int, completion: Completion) -> None:
        """Give a response to its dialogue; the row then waits with what comes next, or is freed."""
        row = self.rows[index]
        answer = row.dialogue.receive(completion)
        self.num_decoding -= 1
        self._swap(index, self.num_decoding)
        if callable(answer):
            row.pending = answer
        else:
            self._give(self.num_decoding, answer)

    def _give(self, index: int, feed: Feed) -> None:
        """What comes next for a waiting row: tokens to be fed, or nothing, which frees it."""
        row = self.rows[index]
        if feed is None:
            self._swap(index, len(self.rows) - 1)
            self.rows.pop()
            self._announce()
            return
        if isinstance(feed, Anew):
            row.feed, row.length = feed, 0
        else:  # the last sampled token was never fed: it goes in front of the new ones
            row.feed = (*row.ids[-1:], *feed)
        row.ids, row.logprobs = [], []

    def _swap(self, first: int, second: int) -> None:
        if first != second:
            length = max(self.rows[first].length, self.rows[second].length)
            self.rows[first], self.rows[second] = self.rows[second], self.rows[first]
            self.decoder.cache.swap_rows(first, second, length)

    def _announce(self) -> None:
        if self._on_finished is not None:
            self._on_finished()
