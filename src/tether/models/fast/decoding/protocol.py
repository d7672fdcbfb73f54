"""What an engine asks of a decoder: slots that hold conversations, prompts fed into them, tokens sampled from them.

A slot holds the keys and values of one conversation. The engine passes the length of each conversation in every call; a decoder keeps no
lengths. Positions past that length are unused and are overwritten: a response that ended before the last token sampled for it needs no
repair. Samples follow uniforms that the caller passes, so they depend neither on the batch nor on how many tokens are sampled in one call.

Shape legend: B slots of a call, K tokens sampled for each, T tokens fed to each and sampled behind.
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


Sampled = Callable[[], SampleOutput]
"""Waits for what a call samples. The next call to the decoder comes after it."""


class Decoder(Protocol):
    """Slots with a key/value cache over one model."""

    @property
    def num_slots(self) -> int: ...

    @property
    def max_positions(self) -> int:
        """How long a conversation may get."""
        ...

    @property
    def tokens_per_call(self) -> int:
        """How many tokens `decode` should sample at once: one on a CPU, several where waiting for the device costs more than a few
        superfluous tokens."""
        ...

    @property
    def most_drafted_rows(self) -> int:
        """For how many slots at once `verify` takes less time than the steps that it can save."""
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

    def prefill(self, requests: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> SampleOutput:
        """Feed tokens and sample the one that follows, for every slot in the order in which the requests name them; room is reserved."""
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

    def verify(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        fed_BT: npt.NDArray[np.int64],
        sampling: Sampling,
        uniforms_BT: npt.NDArray[np.float32],
    ) -> Sampled:
        """Feed each slot its last sampled token, which goes to position `starts`, and a draft of the tokens behind it; sample behind each of them.

        What is sampled behind a token counts as far as the draft before it is what was sampled. The caller compares; room is reserved.
        """
        ...
