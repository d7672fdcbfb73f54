"""The native engine: continuous batching of many conversations on the learner's own weights (continuous_batch.py says how), or with its MLPs in
float8 (models/fast/float8.py).

A server keeps the slots of conversations that have ended (`keeps_slots`): a request computes only what no slot holds of its beginning
(kept_slots.py). These slots are given up first where slots or memory are needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tether.core.errors import BadInput
from tether.core.protocols import Conversation, EngineCapabilities, EngineStatistics, FollowUp, Sampling
from tether.models.fast.decoding.protocol import Decoder
from tether.models.fast_path import decoder_for
from tether.models.policy import Policy
from tether.rollout.engines.continuous_batch import Admission, ContinuousBatch
from tether.rollout.engines.kept_slots import KeptSlots
from tether.rollout.engines.stop_rule import StopRule

if TYPE_CHECKING:
    from tether.models.fast.float8 import Float8Mlps


class NativeEngine:
    """Samples with a policy; at most `max_rows` conversations live at a time, the others queue."""

    def __init__(
        self,
        policy: Policy,
        *,
        max_rows: int = 128,
        max_context: int | None = None,
        cache_gb: float | None = None,
        keeps_slots: bool = False,
        speculative_tokens: int = 0,
        precision: Literal["fp8"] | None = None,
    ) -> None:
        """Conversations get as long as the model allows, or `max_context`; the cache takes `cache_gb`, or half of the memory that is free.

        `speculative_tokens`: how many tokens of a row are guessed at most; 0 for none.

        `precision`: fp8 decodes with a copy of the MLPs in float8, which `sync` refreshes; None: with the learner's own weights.

        `keeps_slots`: what conversations, also ended ones, have in the cache serves those that begin with it. Then `forget` must be called before the weights change.
        """
        if policy.tokenizer is None:
            raise BadInput("the native engine needs a policy with its tokenizer; build it as Policy(model, tokenizer)")
        self._choice = decoder_for(policy)
        if precision is not None:
            self._choice.check_float8()
        self.capabilities = EngineCapabilities(
            per_conversation_uniforms=True, prefix_sharing=True, weight_sync=True, logprobs=True, shares_weights=precision is None
        )
        self._decoder: Decoder | None = None
        self._precision = precision
        self._float8: Float8Mlps | None = None
        self._stop = StopRule(policy.tokenizer, policy.end_of_turn_ids)
        self._max_rows, self._max_context, self._cache_gb = max_rows, max_context, cache_gb
        self._kept = KeptSlots() if keeps_slots else None
        self._speculative_tokens = speculative_tokens
        self.statistics = EngineStatistics()
        """Of the last run."""

    @property
    def backend(self) -> str:
        """Which decoder serves the model: paged, contiguous, or generic for an architecture that only its own code can compute."""
        return self._choice.backend if self._precision is None else f"{self._choice.backend}, {self._precision}"

    @property
    def capacity(self) -> int:
        """The most tokens of a conversation that has the cache to itself. Allocates the cache, as a run would."""
        return self._decoder_for(self._max_rows).capacity

    @property
    def cache_used(self) -> float:
        """The share of the cache that is taken; any thread may ask."""
        decoder = self._decoder
        return 0.0 if decoder is None else decoder.cache_used

    def sync(self, version: int | None = None) -> dict[str, float]:
        """Refresh what is a copy; the other weights are the learner's own tensors."""
        if self._float8 is not None:
            self._float8.refresh()
        return {}

    def free(self) -> None:
        """Release the memory of the cache; the next run allocates it again."""
        self._decoder = self._float8 = None
        if self._kept is not None:
            self._kept = KeptSlots()

    def forget(self) -> None:
        """Give up what was kept of ended conversations: the weights change."""
        while self._kept is not None and (slot := self._kept.give_up()) is not None:
            assert self._decoder is not None  # whose slots they are
            self._decoder.release(slot)

    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[], None] | None = None,
        follow_up: FollowUp | None = None,
    ) -> None:
        """Drive every conversation to its end; what follows one is admitted as soon as there is a slot."""
        queue = deque(Admission(conversation, sampling) for conversation in conversations)

        def on_ended(conversation: Conversation) -> None:
            if on_finished is not None:
                on_finished()
            if follow_up is not None:
                queue.extend(Admission(more, sampling) for more in follow_up(conversation))

        num_open = len(queue) if follow_up is None else follow_up.num_open
        self.play(queue, on_ended, num_slots=min(self._max_rows, max(1, num_open)))

    def play(
        self, queue: deque[Admission], on_ended: Callable[[Conversation], None] | None = None, *, num_slots: int | None = None
    ) -> None:
        """Drive every conversation of a queue to its end, each with its own sampling.

        Another thread may append to the queue meanwhile: new conversations are admitted between two calls of the decoder, beside those that
        decode. Returns when the queue is empty and every conversation has ended. `num_slots`: None for as many as the engine has rows.
        """
        self.statistics = EngineStatistics()
        decoder = self._decoder_for(num_slots or self._max_rows)
        cache = "half of the free memory" if self._cache_gb is None else f"rollout.cache_gb={self._cache_gb:g}"
        batch = ContinuousBatch(decoder, self._stop, self.statistics, cache, on_ended, self._kept, self._speculative_tokens)
        try:
            batch.play(queue)
        except BaseException:
            self.free()  # slots are still taken, and may hold anything
            raise

    def _decoder_for(self, num_slots: int) -> Decoder:
        if self._decoder is None or self._decoder.num_slots < num_slots:
            self.free()
            budget = None if self._cache_gb is None else int(self._cache_gb * 2**30)
            self._float8 = None if self._precision is None else self._choice.float8()
            mlps = None if self._float8 is None else self._float8.layers
            self._decoder = self._choice.make(num_slots, self._max_context, budget, mlps)
        return self._decoder


def build(
    name: str,
    policy: Policy,
    *,
    max_rows: int,
    max_context: int | None,
    cache_gb: float | None,
    speculative_tokens: int,
    precision: Literal["fp8"] | None,
    keeps_slots: bool,
    **_: Any,
) -> NativeEngine:
    """The engine by its name (registry.py)."""
    return NativeEngine(
        policy,
        max_rows=max_rows,
        max_context=max_context,
        cache_gb=cache_gb,
        speculative_tokens=speculative_tokens,
        precision=precision,
        keeps_slots=keeps_slots,
    )
