"""What there is to compute with, in words."""

import torch


def describe_compute() -> str:
    """The GPU, or the CPU's threads."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        return f"GPU {properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return f"no GPU; {torch.get_num_threads()} CPU threads (float32)"
