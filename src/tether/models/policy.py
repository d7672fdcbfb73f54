"""A causal language model in two halves: features for every position, logits only for the positions that are wanted.

The vocabulary is the widest thing in a small model: computing logits for prompt tokens that nobody reads wastes most of the time and
memory of a forward pass. Some architectures do more than a matrix product after the last layer (scaling, soft caps), so the split is
probed once per model: where the halves do not reproduce the model's own logits, the features are the logits and the second half does nothing.
Whether several texts may share a row, and whether the model has a forward pass over flat tokens, is probed the same way, when it is first
asked.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tether.models.family.backbone import LlamaBackbone, llama_backbone
from tether.models.probing import evaluating, probe_ids

PROBE_TOKENS = 4
PACKED_LENGTHS = ((4, 3), (5, 2))
"""Two rows of two texts each: as many tokens in both, the border elsewhere."""


class Policy:
    """Features and head of a Hugging Face causal language model."""

    def __init__(self, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        self.module, self.tokenizer = module, tokenizer
        self._head: Any = module.get_output_embeddings()
        with evaluating(module):  # dropout would make the halves disagree
            self.separable_head: bool = self._head is not None and self._halves_agree()
        """Whether `features` are the last hidden states; they are the logits otherwise."""

    @torch.inference_mode()
    def _halves_agree(self) -> bool:
        ids = probe_ids(self.module, PROBE_TOKENS)
        whole = self.module(input_ids=ids, use_cache=False).logits
        halves = self._head(self.module.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return bool(whole.shape == halves.shape and torch.equal(whole, halves))

    @property
    def end_of_turn_ids(self) -> tuple[int, ...]:
        """The token ids that end a turn: the tokenizer's, and those of the model's generation config."""
        listed = getattr(getattr(self.module, "generation_config", None), "eos_token_id", None)
        ids = [listed] if isinstance(listed, int) else list(listed or [])
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids = [int(self.tokenizer.eos_token_id), *ids]
        return tuple(dict.fromkeys(ids))

    @property
    def linear_head(self) -> nn.Linear | None:
        """The head, where logits are one matrix product of the features with its weights."""
        is_plain = self.separable_head and type(self._head) is nn.Linear and self._head.weight.is_floating_point()
        return self._head if is_plain else None

    @property
    def width(self) -> int:
        """D, where the model splits."""
        return int(self._head.weight.shape[1])

    @cached_property
    def backbone(self) -> LlamaBackbone | None:
        """The model's forward pass over flat tokens, which needs no padding; None for models that have none."""
        return llama_backbone(self.module) if self.separable_head else None

    @cached_property
    def supports_packing(self) -> bool:
        """Whether texts that share a row, told apart by positions that start again, get the logits they get alone."""
        with evaluating(self.module):
            return self._packed_agrees()

    @torch.inference_mode()
    def _packed_agrees(self) -> bool:
        """Second texts must not change with the first ones of their rows, to the last bits; against texts alone there is rounding."""
        first, second = PACKED_LENGTHS
        lengths, width = [*first, *second], sum(first)
        ids_1T = probe_ids(self.module, 2 * width)
        positions_2W = torch.cat([torch.arange(length, device=ids_1T.device) for length in lengths]).view(2, width)
        is_first_2W = torch.arange(width, device=ids_1T.device) < torch.tensor([[first[0]], [second[0]]], device=ids_1T.device)
        ids_2W = ids_1T.view(2, width)
        others_2W = torch.where(is_first_2W, ids_2W.flip(0), ids_2W)
        try:
            packed, with_others = (
                self.logits(self.features(input_ids=ids, position_ids=positions_2W, use_cache=False)).float() for ids in (ids_2W, others_2W)
            )
        except (RuntimeError, ValueError, TypeError, IndexError, AttributeError):  # however a model says that it takes no positions
            return False
        alone_1TD = torch.cat([self.features(input_ids=text, use_cache=False) for text in ids_1T.split(lengths, dim=1)], dim=1)
        alone = self.logits(alone_1TD).float().view_as(packed)
        scale = max(1.0, float(alone.abs().max()))
        rounding = 1e-5 if self.module.dtype == torch.float32 else 5e-2
        unmoved = (packed - with_others).abs()[~is_first_2W].max() <= 1e-5 * scale
        return bool(unmoved and (packed - alone).abs().max() <= rounding * scale)

    def features(self, **inputs: Any) -> Tensor:
        """[B, T, D] (or [B, T, V] for a model that does not split) for the model's usual inputs."""
        output: Tensor
        if self.separable_head:
            output = self.module.base_model(**inputs).last_hidden_state
        else:
            output = self.module(**inputs).logits
        return output

    def logits(self, features: Tensor) -> Tensor:
        """[..., V] from any selection of features."""
        output: Tensor = self._head(features) if self.separable_head else features
        return output
