"""Training: the loop, the learner, evaluation, checkpoints, and the recipe of the embedded model."""
