"""The Llama family (Llama, Qwen2, Qwen3, Mistral, SmolLM and whoever is built alike): one forward pass of our own over their parameters."""
