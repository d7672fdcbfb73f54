"""Is the reasoning tied to its input? Pairs, cross-scores, information, regimes, and the monitor that watches a run.

Diagnosis needs (x, z) pairs and a Scorer and nothing else, so the same code runs in the trainer, on a file, or inside another framework.
"""
