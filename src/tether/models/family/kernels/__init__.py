"""Triton kernels for CUDA devices. Nothing outside `models/family` and `models/decoding` imports them, and only where a tensor is on such a device."""
