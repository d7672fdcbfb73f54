"""What there is to compute with, in words."""

import torch


def default_device() -> str:
    """The GPU if there is one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_compute() -> str:
    """The GPU, or the CPU's threads."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"GPU {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"no GPU; {torch.get_num_threads()} CPU threads (float32)"
