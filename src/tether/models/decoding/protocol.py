"""What an engine asks of a decoder: slots that hold conversations, prompts fed into them, tokens drawn from them.

A slot holds the keys and values of one conversation. The engine knows how long each conversation is and says so in every call; a decoder
keeps no lengths. Whatever lies in a slot behind the length that is named is rubbish and is written over: a response that ended before the
last token drawn for it needs no repair. Draws follow uniforms that the caller brings, so they depend neither on the batch nor on how many
tokens are drawn in one call.

Shape legend: B slots of a call, K tokens drawn for each.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from tether.core.protocols import Sampling

NOBODY: Mapping[int, int] = MappingProxyType({})


class PrefillRequest(NamedTuple):
    """Tokens for one slot, or for several empty ones that begin alike and for which they are computed once."""

    slots: tuple[int, ...]
    start: int
    """Positions that are filled already; 0 where there are several slots."""
    tokens: Sequence[int]


class SampleOutput(NamedTuple):
    """Tokens drawn, and their log-probs at the sampling temperature, before any token was excluded."""

    ids_BK: npt.NDArray[np.int64]
    logprobs_BK: npt.NDArray[np.float32]


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
        """How many tokens `decode` should draw at once: one on a CPU, several where waiting for the device costs more than a few tokens too many."""
        ...

    def reserve(self, positions: Mapping[int, int], alike: Mapping[int, int] = NOBODY) -> bool:
        """Make room for so many positions in each of these slots. False: memory does not suffice, and nothing has changed.

        `alike` names, for slots that are still empty, the slot that they will be fed together with; positions are then just those of the
        Feeding, because what lies behind them is each one's own.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget what a slot holds and give its memory back."""
        ...

    def prefill(self, feedings: Sequence[PrefillRequest], sampling: Sampling, uniforms_B: npt.NDArray[np.float32]) -> SampleOutput:
        """Feed tokens and draw the one that follows, for every slot in the order in which the feedings name them; room is reserved."""
        ...

    def decode(
        self,
        slots: Sequence[int],
        starts: Sequence[int],
        last_ids: Sequence[int],
        sampling: Sampling,
        uniforms_BK: npt.NDArray[np.float32],
    ) -> SampleOutput:
        """Draw K more tokens for each slot, whose last drawn token has not been fed yet and goes to position `starts`; room is reserved."""
        ...
