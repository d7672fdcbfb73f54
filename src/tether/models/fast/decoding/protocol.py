"""What an engine asks of a decoder: slots that hold conversations, prompts fed into them, tokens sampled from them.

A slot holds the keys and values of one conversation. The engine passes the length of each conversation in every call; a decoder keeps no
lengths. Positions past that length are unused and are overwritten: a response that ended before the last token sampled for it needs no
repair. Samples follow uniforms that the caller passes, so they depend neither on the batch nor on how many tokens are sampled in one call.

A decoder can guess what a conversation says next from what it was fed and has sampled (drafts.py), and sample several tokens in the time of one.

Shape legend: B slots of a call, K tokens sampled for each.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tether.core.protocols import Sampling

NO_SHARING: Mapping[int, int] = MappingProxyType({})


class PrefillRequest(NamedTuple):
    """Tokens for one slot, or for several empty ones with the same prompt, for which they are computed once."""

    slots: tuple[int, ...]
    start: int
    """Positions that are filled already; 0 where there are several slots."""
    tokens: Sequence[int]


class SampleOutput(NamedTuple):
    """Tokens sampled, and their log-probs at the sampling temperature, before any token was excluded."""

    ids_BK: npt.NDArray[np.int64]
    logprobs_BK: npt.NDArray[np.float32]
    counts_B: npt.NDArray[np.int32] | None = None
    """How many of the K tokens of each slot were sampled; None for all."""


Sampled = Callable[[], SampleOutput]
"""Waits for what a call samples. The next call to the decoder comes after it, but for a `prefill` where the decoder `prefills_beside`."""


class DraftPlan(NamedTuple):
    """How drafts are verified in one call."""

    rounds: int
    """Drafts of a slot, one after the other."""
    tokens: int
    """Of each."""

    @property
    def most_sampled(self) -> int:
        """Tokens that a slot gets if all drafts are right: one is sampled behind each."""
        return self.rounds * (1 + self.tokens)


class Decoder(Protocol):
    """Slots with a key/value cache over one model."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """How long a conversation may get."""
        ...

    @property
    def capacity(self) -> int:
        """How long a conversation may get that has the cache to itself: `max_positions`, or what the memory holds."""
        ...

    @property
    def cache_used(self) -> float:
        """The share of the cache that slots hold, also those of ended conversations that were kept. Any thread may ask."""
        ...

    @property
    def tokens_per_call(self) -> int:
        """How many tokens `decode` should sample at once: one on a CPU, several where waiting for the device costs more than a few
        superfluous tokens."""
        ...

    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int] = NO_SHARING) -> bool:
        """Make room for so many positions in each of these slots. False: memory does not suffice, and nothing has changed.

        `alike` names, for slots that are still empty, the slot that they will be fed together with; positions are then those of the
        request, because each slot has its own positions after them.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget what a slot holds and give its memory back."""
        ...

    def adopt(self, slot: int, source: int, length: int) -> int:
        """Let an empty slot begin with the first positions of another, which are filled and stay as they are. How many of them it has now: all, or
        fewer where memory does not suffice."""
        ...

    @property
    def tokens_copied(self) -> int:
        """Tokens of all prefilled requests so far that were not computed, because another slot begins with them."""
        ...

    @property
    def prefills_beside(self) -> bool:
        """Whether a call with drafts takes in what is prefilled: `prefill` may then be called before a `speculate` was waited for."""
        ...

    def prefill(self, requests: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> Sampled:
        """Feed tokens and sample the one that follows, for every slot in the order in which the requests name them; room is reserved.

        Where it was called before a `speculate` was waited for, that is waited for first.
        """
        ...

    def decode(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> Sampled:
        """Sample K more tokens for each slot, whose last sampled token has not been fed yet and goes to position `starts`; room is reserved.

        A decoder on a GPU returns while the device still computes, and the caller may do other work before it asks for the result.
        """
        ...

    def start_drafts(self, most_tokens: int) -> None:
        """A run begins that drafts at most so many tokens, copied from what is fed and sampled from now on and from nothing before."""
        ...

    def draft_plan(self, num_slots: int) -> DraftPlan | None:
        """How to draft for so many slots at once; None where that would not save time."""
        ...

    def speculate(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        plan: DraftPlan,
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> Sampled:
        """Like `decode`, but each step feeds a draft too, and samples behind every token of it; K is what the plan can sample at most.

        What was sampled counts as far as the draft before it is what was sampled: the same tokens as without drafts, from the same uniforms.
        """
        ...
