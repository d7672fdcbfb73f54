"""Cross a frozen lake to the goal without falling into a hole; the ice is slippery."""
