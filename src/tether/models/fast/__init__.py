"""The fast path: Tether's own forward pass of Llama-shaped models, its attention, its kernels and its decoders."""
