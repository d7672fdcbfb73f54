"""When two answers are the same: normal forms of LaTeX, exact numbers, lists and intervals by their parts, the rest by math-verify."""
