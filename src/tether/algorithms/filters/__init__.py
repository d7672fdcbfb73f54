"""SNR-aware filtering: score every group of trajectories, keep the groups with signal, say what was dropped."""
