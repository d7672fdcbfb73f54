"""Does the reasoning depend on its input? Pairs, cross-scores, information, regimes, the monitor, alarms, gradients and the audit of files.

Diagnosis needs (x, z) pairs and a Scorer, so the same code runs in the trainer, on a file, or inside another framework.
"""
