"""Running out of memory, put into words: which stage, and which setting to lower; and a clean start for another attempt."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tether.core.errors import OutOfMemory

_ON_CPU = ("can't allocate memory", "not enough memory")
"""How torch's allocator for the CPU says it, as a plain RuntimeError."""


@contextmanager
def memory_boundary(stage: str, remedy: str, kind: type[Exception] = OutOfMemory) -> Iterator[None]:
    """Turn a failed allocation of the block into an error of this kind that names the stage and the remedy."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise kind(_put_into_words(stage, remedy, error)) from error
    except RuntimeError as error:
        if not any(text in str(error) for text in _ON_CPU):
            raise
        raise kind(_put_into_words(stage, remedy, error)) from error


def forget_failed(device: torch.device) -> None:
    """Give back what a failed attempt held: its tensors may hang in cycles of objects, and torch keeps their memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _put_into_words(stage: str, remedy: str, error: RuntimeError) -> str:
    said = " ".join(str(error).split())[:120]
    return f"out of memory in the {stage} ({said}); {remedy}"
