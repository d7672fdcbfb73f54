"""Supervised fine-tuning on demonstrations: three sources of them, one trainer on the learner's code, and the recipe of `tiny`."""
