"""Running out of memory: a real allocation that cannot be had, torch's own error, and errors that are none."""

import errno
from collections.abc import Callable
from mmap import mmap

import numpy as np
import pytest
import torch

from tether.core.errors import OutOfMemory
from tether.models.hardware import memory_boundary


@pytest.mark.parametrize(
    "allocate",
    [lambda: torch.empty(2**50, dtype=torch.uint8), lambda: np.empty(2**50, dtype=np.uint8), lambda: mmap(-1, 2**50)],
    ids=["torch", "numpy", "the system"],
)
def test_an_allocation_that_no_machine_can_make(allocate: Callable[[], object]) -> None:
    with pytest.raises(OutOfMemory) as caught, memory_boundary("update", "lower learner.micro_tokens (now 8192)"):
        allocate()
    message = str(caught.value)
    assert message.startswith("out of memory in the update (")
    assert message.endswith("; lower learner.micro_tokens (now 8192)")
    assert "\n" not in message and len(message) < 300
    assert isinstance(caught.value.__cause__, (RuntimeError, MemoryError, OSError))


def test_a_gpu_that_is_full() -> None:
    said = r"out of memory in the rollout \(CUDA out of memory\. Tried to allocate 2 GiB\); lower it"
    with pytest.raises(OutOfMemory, match=said), memory_boundary("rollout", "lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not fit"), ValueError("not enough memory"), OSError(errno.ENOSPC, "full"), KeyboardInterrupt()]
)
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory_boundary("update", "x"):
        raise error
    assert caught.value is error
