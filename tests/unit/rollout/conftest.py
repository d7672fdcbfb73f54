"""A shallow `tiny` for the tests of engines: what they hold does not depend on how deep a model is, and a token costs as much as there are layers."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tether.models.load import load_model


@pytest.fixture(scope="session")
def tiny(tiny: Any) -> Any:
    """The embedded model with two of its layers, so that one layer's cache is not the other's. Read only.

    It would never close a tag: it does so where it would write a colon or a full stop, so that replies are of several lengths.
    """
    model = copy.deepcopy(tiny.model)
    model.model.layers = nn.ModuleList(model.model.layers[:2])
    model.lm_head = copy.deepcopy(model.lm_head)
    model.config.num_hidden_layers, model.config.tie_word_embeddings = 2, False
    for pair in (["</think>", ":"], ["</answer>", "."]):
        ids = tiny.tokenizer.convert_tokens_to_ids(pair)
        with torch.no_grad():
            model.lm_head.weight[ids] = model.lm_head.weight[ids[::-1]]
    return tiny._replace(model=model)


@pytest.fixture(scope="session")
def deep_tiny() -> Any:
    """The whole of it, on the CPU. Read only."""
    return load_model("tiny", device="cpu")
