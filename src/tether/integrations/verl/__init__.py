"""Tether inside verl (the V1 trainer): a sampler that filters groups, a probe on the actor, an agent loop over Tether's environments.

verl finds the plug-in by the entry point group `verl.plugins` in every process that imports verl, Ray workers included, and swallows errors of loading
it; `tether doctor` loads it and says what happened. docs/integrations.md has the config lines. Importing this package imports nothing of verl.
"""
