"""Which decoder serves a model: the paged one for the Llama family on a CUDA device, contiguous rows for everything else."""

from torch import nn
from transformers import PreTrainedModel

from tether.core.errors import BadInput
from tether.models.decoding.cached import decodes_with_cache, max_positions
from tether.models.decoding.contiguous import ContiguousDecoder
from tether.models.decoding.protocol import Decoder
from tether.models.hardware import available_memory
from tether.models.policy import Policy

MEMORY_SHARE = 0.5
"""What the cache takes of the memory that is free, unless told."""


class DecoderChoice:
    """How a model is decoded, decided once; decoders of any size are made from it."""

    def __init__(self, model: PreTrainedModel, split: Policy) -> None:
        self._model, self._split = model, split
        self._backbone = split.backbone
        if self._backbone is None and not decodes_with_cache(model, split):
            raise BadInput(
                f"models of type '{model.config.model_type}' cannot be decoded with a key/value cache of this engine; "
                "use a transformer with causal attention such as Llama, Qwen, Mistral, Gemma or GPT-2"
            )

    @property
    def backend(self) -> str:
        """paged, contiguous (the family's forward pass without pages), or generic (the model's own code)."""
        if self._backbone is None:
            return "generic"
        return "paged" if self._pages is not None else "contiguous"

    @property
    def _pages(self) -> nn.Linear | None:
        """The head of a model that the paged decoder can serve."""
        head = self._model.get_output_embeddings()
        return head if self._backbone is not None and self._model.device.type == "cuda" and type(head) is nn.Linear else None

    def make(self, num_slots: int, most_positions: int | None, budget: int | None) -> Decoder:
        """A decoder of so many slots whose cache stays within a budget in bytes; None: half of the memory that is free."""
        if budget is None and (free := available_memory(self._model.device)) is not None:
            budget = int(MEMORY_SHARE * free)
        positions = min(most_positions or max_positions(self._model), max_positions(self._model))
        head = self._pages
        if self._backbone is not None and head is not None and budget is not None:
            from tether.models.decoding.paged import PagedDecoder  # its kernels are for CUDA alone

            return PagedDecoder(self._backbone, head, num_slots, positions, budget)
        return ContiguousDecoder(self._model, self._split, num_slots, backbone=self._backbone, most_positions=positions, budget=budget)
