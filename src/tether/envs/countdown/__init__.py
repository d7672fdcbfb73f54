"""Reach a target number with the given numbers and the four operations."""
