"""Models: getting one by name, turning chat into tokens and back, decoding with a cache, and log-probabilities of tokens."""
