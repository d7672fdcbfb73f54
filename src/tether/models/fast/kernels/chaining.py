"""Kernels that start while the one before them still runs, and wait for its results only where they need them.

A step of decoding for few rows is a chain of some two hundred short kernels, and the time between two of them is an eighth of it. From Hopper on, a
kernel may be launched early ("programmatic dependent launch"): what does not depend on the kernel before, such as the first lines of a weight, it reads
at once. `wait_for_inputs` returns when the kernel before has ended and its writes can be seen; whatever comes from there is read, and anything at
all is written, behind it.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

CHAINED_CAPABILITY = (9, 0)


@cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """What a launch says to start early, where the device can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < CHAINED_CAPABILITY:
        return {"CHAINED": False}
    return {"CHAINED": True, "launch_pdl": True}


@triton.jit
def wait_for_inputs(CHAINED: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    if CHAINED:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
