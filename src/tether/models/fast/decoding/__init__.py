"""Decoders: the keys and values of conversations in slots, prompts fed into them, tokens sampled from them."""
