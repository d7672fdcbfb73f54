"""What there is to compute with, in words."""

import torch

from tether.core.errors import BadInput


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(name: str) -> str:
    """The name of a device that exists here, as it was given."""
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch's answers to: no such kind, not built in, none present
        raise BadInput(f"device '{name}' cannot be used here: {str(error).splitlines()[0][:120]}; use cpu or cuda") from error
    return name


def describe_compute() -> str:
    """The GPU, or the CPU's threads."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"GPU {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"no GPU; {torch.get_num_threads()} CPU threads (float32)"
