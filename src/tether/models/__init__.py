"""Models: getting one by name, chat to tokens and back, decoding with a cache, log-probs, adapters, critic and reference."""
