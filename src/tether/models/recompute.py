"""Gradient checkpointing: layers keep only their input during an update and are computed again in the backward pass.

The transformers switch for this works only in training mode, where dropout is on and the gradient is another one. Here every layer's
forward is wrapped for the length of a block and the model stays as it is: the same gradients in less memory, and an engine that runs
outside the block notices nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.core.errors import BadInput


@contextmanager
def checkpointed(model: PreTrainedModel) -> Iterator[None]:
    """Inside the block, backward passes compute the model's layers again instead of keeping what they put out."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise BadInput(f"models of type '{model.config.model_type}' do not say which layers to recompute; turn gradient checkpointing off")
    for layer in layers:
        # Nothing random happens in a layer: dropout is off. So there is no random state to keep.
        vars(layer)["forward"] = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]
