"""Which decoder serves a model: the paged one for the Llama family on a CUDA device, contiguous rows for everything else."""

from typing import Literal

from torch import nn

from tether.core.errors import BadInput
from tether.models.fast.decoding.contiguous import ContiguousDecoder
from tether.models.fast.decoding.protocol import Decoder
from tether.models.fast.decoding.rows import decodes_with_cache, position_bytes
from tether.models.hardware import available_memory
from tether.models.policy import Policy

MEMORY_SHARE = 0.5
"""What the cache takes of the memory that is free, unless configured."""


def decoder_for(policy: Policy) -> "DecoderChoice":
    """Which decoder serves a model, decided once; BadInput where none does."""
    return policy.once("decoder", lambda: DecoderChoice(policy))


class DecoderChoice:
    """How a model is decoded; decoders of any size are made from it."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._backbone = policy.backbone
        if self._backbone is None and (reason := decodes_with_cache(policy)):
            raise BadInput(
                f"models of type '{policy.model_type}' cannot be decoded with a key/value cache of this engine ({reason}); "
                "use a transformer with causal attention such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )

    @property
    def backend(self) -> Literal["paged", "contiguous", "generic"]:
        """paged, contiguous (the family's forward pass without pages), or generic (the model's own code)."""
        if self._backbone is None:
            return "generic"
        return "paged" if self._paged_head is not None else "contiguous"

    @property
    def reason(self) -> str:
        """Why a slower decoder than the device's fastest is used; "" where it is not. Without a GPU contiguous rows are the fastest."""
        if self._backbone is None:
            return self._policy.backbone_reason
        if self.backend == "contiguous" and self._policy.device.type == "cuda":
            return f"the head is a {type(self._policy.module.get_output_embeddings()).__name__}, the paged decoder needs a linear one"
        return ""

    @property
    def position_bytes(self) -> int:
        """What the cache holds for one position of one conversation, in bytes."""
        return position_bytes(self._policy)

    @property
    def _paged_head(self) -> nn.Linear | None:
        """The head of a model that the paged decoder can serve."""
        head = self._policy.module.get_output_embeddings()
        return head if self._backbone is not None and self._policy.device.type == "cuda" and type(head) is nn.Linear else None

    def make(self, num_slots: int, most_positions: int | None, budget: int | None) -> Decoder:
        """A decoder of so many slots whose cache stays within a budget in bytes; None: half of the memory that is free."""
        policy = self._policy
        if budget is None and (free := available_memory(policy.device)) is not None:
            budget = int(MEMORY_SHARE * free)
        positions = min(most_positions or policy.max_positions, policy.max_positions)
        head = self._paged_head
        if self._backbone is not None and head is not None and budget is not None:
            from tether.models.fast.decoding.paged import PagedDecoder  # its kernels are for CUDA alone

            return PagedDecoder(self._backbone, head, num_slots, min(positions, self._backbone.num_positions), budget)
        return ContiguousDecoder(policy, num_slots, backbone=self._backbone, most_positions=positions, budget=budget)
