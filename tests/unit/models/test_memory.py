"""Running out of memory: a real allocation that cannot be had, torch's own error, and errors that are none."""

import pytest
import torch

from tether.core.errors import OutOfMemory
from tether.models.hardware import memory_boundary


def test_an_allocation_that_no_machine_can_make() -> None:
    with pytest.raises(OutOfMemory) as caught, memory_boundary("update", "lower learner.micro_tokens (now 8192)"):
        torch.empty(2**50, dtype=torch.uint8)
    message = str(caught.value)
    assert message.startswith("out of memory in the update (")
    assert message.endswith("; lower learner.micro_tokens (now 8192)")
    assert "\n" not in message and len(message) < 300
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_a_gpu_that_is_full() -> None:
    said = r"out of memory in the rollout \(CUDA out of memory\. Tried to allocate 2 GiB\); lower it"
    with pytest.raises(OutOfMemory, match=said), memory_boundary("rollout", "lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 2 GiB")


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), ValueError("not enough memory"), KeyboardInterrupt()])
def test_other_errors_pass(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory_boundary("update", "x"):
        raise error
    assert caught.value is error
