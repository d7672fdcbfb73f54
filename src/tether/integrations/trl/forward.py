"""The policy as Tether's engine and scorer read it: the trainer's own module, with its weights as they are.

Under mixed precision accelerate replaces a model's `forward` by one that runs in autocast. Tether's fast path reads the weights, so it computes in
their precision (float32 under mixed precision), and is probed against the module's own `forward`. Within `plain_forward` that is the original
one. Nothing else changes, and the trainer's `forward` is back afterwards.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tether.models.probing import evaluating


def policy_module(trainer: Any) -> Any:
    """The module that is trained, without the wrappers of data parallelism."""
    return trainer.accelerator.unwrap_model(trainer.model)


@contextmanager
def plain_forward(module: Any) -> Iterator[None]:
    """The module without autocast and without dropout."""
    base = module.get_base_model() if hasattr(module, "get_base_model") else module
    held = [
        (each, each.__dict__["forward"]) for each in {id(m): m for m in (module, base)}.values() if "_original_forward" in each.__dict__
    ]
    for each, _ in held:
        each.forward = each._original_forward
    try:
        with evaluating(module):
            yield
    finally:
        for each, forward in held:
            each.forward = forward
