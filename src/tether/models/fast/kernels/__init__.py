"""Triton kernels for CUDA devices; importing a module of this package needs triton."""
