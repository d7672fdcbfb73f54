"""Push every box onto a target; pushes cannot be taken back by pulling."""
