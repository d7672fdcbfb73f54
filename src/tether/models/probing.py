"""Probes: a few tokens through a model in two ways, to find out whether a faster one computes the same.

What an architecture's code does cannot be read off its config. So each fast way is tried once per model against the model itself, and is
taken only where the two agree to within rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

EXACT, HALF = 1e-3, 0.05
"""Differences that are taken for rounding: of the largest value in float32, of their root mean square in half precision."""


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


def agree(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two ways of computing the same thing differ by rounding only."""
    found, expected = found.float(), expected.float()
    difference = found - expected
    if dtype in (torch.float32, torch.float64):
        # Against the largest: what rounding does to one of them depends on the size of all.
        return bool(difference.abs().max() <= EXACT * max(1.0, float(expected.abs().max())))
    # In half precision the largest of a hundred thousand errors says little: it grows with depth and vocabulary, and wrong attention is wrong
    # nearly everywhere.
    return bool(difference.square().mean().sqrt() <= HALF * expected.square().mean().sqrt())
