"""Rollout: environments and an engine make trajectories; trajectories become groups; groups become a training batch."""
