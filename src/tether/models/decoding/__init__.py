"""Decoders: whatever keeps the keys and values of conversations in slots and draws tokens for them."""
