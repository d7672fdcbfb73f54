"""Alarms: what a run's own record says is going wrong, with the evidence, the likely cause and what to change."""
