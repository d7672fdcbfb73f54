"""Pure functions of learning: filters, advantages, ratios, losses, aggregation, and the presets that bundle them.

The one shape legend of the package (suffixes of tensor names):
    P prompts   G members of a group   N reasonings   B rows of a batch   T tokens   V vocabulary
"""
