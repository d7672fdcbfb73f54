"""Pure functions of learning: filters, advantages, ratios, losses, aggregation, and the presets that bundle them.

The one shape legend of the package (suffixes of tensor names):
    P prompts   G members of a group   R trajectories   N reasonings, or the tokens of a loss   B rows of a batch   T tokens   V vocabulary
"""
