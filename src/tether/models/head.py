"""A causal language model in two halves: features for every position, logits only for the positions that are wanted.

The vocabulary is the widest thing in a small model: computing logits for prompt tokens that nobody reads wastes most of the time and
memory of a forward pass. Some architectures do more than a matrix product after the last layer (scaling, soft caps), so the split is
probed once per model: where the halves do not reproduce the model's own logits, the features are the logits and the second half does nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

PROBE_TOKENS = 4


def probe_ids(model: PreTrainedModel, count: int) -> Tensor:
    """A short text [1, count] of the first words of the model's vocabulary."""
    return (torch.arange(count, device=model.device) % int(model.config.get_text_config().vocab_size))[None]


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """The model without dropout inside the block, as it was afterwards."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


class SplitModel:
    """Features and head of a Hugging Face causal language model."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._head: Any = model.get_output_embeddings()
        self._splits = self._head is not None and self._halves_agree()

    @torch.inference_mode()
    def _halves_agree(self) -> bool:
        ids = probe_ids(self.model, PROBE_TOKENS)
        whole = self.model(input_ids=ids, use_cache=False).logits
        halves = self._head(self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
        return bool(whole.shape == halves.shape and torch.equal(whole, halves))

    def features(self, **inputs: Any) -> Tensor:
        """[B, T, D] (or [B, T, V] for a model that does not split) for the model's usual inputs."""
        output: Tensor
        if self._splits:
            output = self.model.base_model(**inputs).last_hidden_state
        else:
            output = self.model(**inputs).logits
        return output

    def logits(self, features: Tensor) -> Tensor:
        """[..., V] from any selection of features."""
        output: Tensor = self._head(features) if self._splits else features
        return output
