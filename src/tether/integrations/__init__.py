"""Tether inside other people's trainers: TRL (`tether.integrations.trl`) and verl (`tether.integrations.verl`).

They import rollout, diagnostics and the layers below, never `training`. A loop that is neither needs none of this: `tether.select_groups`,
`tether.Monitor` and `tether.TetherLogger` take plain rows.
"""
