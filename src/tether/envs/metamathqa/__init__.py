"""Answer questions of mathematics in words, with a reward that halves at every retry."""
