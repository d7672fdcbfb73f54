"""Gradient checkpointing: layers keep only their input during an update and are computed again in the backward pass.

The transformers switch for this works only in training mode, where dropout is on and the gradient is another one. Here every layer's
forward is wrapped for the length of a block and the model stays as it is: the same gradients in less memory, and an engine that runs
outside the block notices nothing. Models of the Llama family have a forward pass of their own that does the same (`LlamaBackbone.features`).

What keeping everything would cost is estimated from the shape of the layers (`kept_bytes`), so that it is done where it fits.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from tether.core.errors import BadInput

UNFUSED = 1.7
"""Plain torch keeps about so many times what fused kernels keep: copies in float32, and the inputs of every small step."""


def can_recompute(model: PreTrainedModel) -> bool:
    """Whether the model says which layers may be computed again."""
    return any(isinstance(module, GradientCheckpointingLayer) for module in model.modules())


def kept_bytes(model: PreTrainedModel, tokens: int, *, fused: bool) -> int:
    """About how much memory the layers keep for the backward pass over so many tokens, through the family's fused kernels or without them.

    Per layer, fused: four times the width (the stream and its norms, twice), queries and outputs, keys and values, each once more where they are
    normed, and three times the width of the MLP.
    """
    config = model.config.get_text_config()
    width, heads = int(config.hidden_size), int(config.num_attention_heads)
    head_width = int(getattr(config, "head_dim", None) or width // heads)
    key_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    inner = int(getattr(config, "intermediate_size", None) or 4 * width)
    elements = 4 * width + 3 * heads * head_width + 3 * key_heads * head_width + 3 * inner
    return int(tokens * int(config.num_hidden_layers) * elements * model.dtype.itemsize * (1 if fused else UNFUSED))


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
