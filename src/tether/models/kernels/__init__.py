"""Triton kernels for CUDA devices. They are imported only where a tensor is on such a device: Triton need not be there otherwise."""
