"""How much of a minibatch goes through the model at once, and what gives way when memory does not suffice.

Whether activations are kept or computed again is decided once, before the first update, from the memory that is free then, unless a setting
says it: micro-batches get smaller first, as long as they keep a card busy, because computing everything again costs a third more. Where an update runs out of memory all the same, its micro-batches get half as many tokens, again and again down to the longest
sequence of the minibatch; then activations are computed again. What gave way stays so for the rest of the run: memory that was short once
will be short again.
"""

from collections.abc import Sequence

from tether.models.fast.linear_logprobs import LOGIT_BYTES
from tether.models.hardware import available_memory
from tether.models.policy import Policy
from tether.models.recompute import can_recompute, kept_bytes

ENOUGH_TOKENS = 4096
"""A micro-batch of so many keeps any card busy; fewer are not chosen in order to keep activations."""
MARGIN = 1.3
"""An estimate of activations is taken this much larger: memory is held in blocks, and layers need some while they compute."""


class MicroBudget:
    """Tokens per micro-batch, and whether activations are computed again."""

    def __init__(self, tokens: int, recompute: bool | None) -> None:
        """`recompute` None: to be decided (`decide`)."""
        self.tokens = tokens
        self._recompute = recompute
        self.retries = 0
        """How often something gave way in this step."""

    @property
    def recompute(self) -> bool:
        return bool(self._recompute)

    def decide(self, policies: Sequence[Policy], bytes_to_come: int, packing: bool) -> None:
        """Settle whether activations are kept, where that is open.

        Args:
            splits: the models that are trained, one after the other.
            bytes_to_come: what optimisers will take beside the activations.
            packing: whether models may compute flat rows.
        """
        if self._recompute is None:
            free = available_memory(policies[0].module.device)
            room = None if free is None else free - bytes_to_come
            fewer = self.tokens
            while not _fits(policies, fewer, packing, room) and fewer // 2 >= ENOUGH_TOKENS:
                fewer //= 2
            if _fits(policies, fewer, packing, room):
                self.tokens, self._recompute = fewer, False
            else:
                self._recompute = all(_recomputes(split) for split in policies)

    def give_way(self, policies: Sequence[Policy], lengths: Sequence[int]) -> bool:
        """Ask for less memory for a minibatch with sequences of these lengths; False where there is nothing left to give up."""
        longest = max(lengths)
        if self.tokens > longest:
            self.tokens = max(longest, min(self.tokens, sum(lengths)) // 2)
        elif not self.recompute and all(_recomputes(split) for split in policies):
            self._recompute = True
        else:
            return False
        self.retries += 1
        return True


def _fits(policies: Sequence[Policy], tokens: int, packing: bool, room: int | None) -> bool:
    return room is None or max(_needed(split, tokens, packing) for split in policies) <= room


def _needed(split: Policy, tokens: int, packing: bool) -> int:
    """Memory of one micro-batch with its activations kept."""
    device_type = split.module.device.type
    logits = 2 * LOGIT_BYTES.get(device_type, LOGIT_BYTES["cpu"])
    fused = packing and split.backbone is not None and device_type == "cuda"
    return int(MARGIN * kept_bytes(split.module, tokens, fused=fused)) + logits


def _recomputes(split: Policy) -> bool:
    return split.backbone is not None or can_recompute(split.module)
