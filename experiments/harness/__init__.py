"""Experiments: grids of runs that test the paper's claims, their finished cells, statistics and verdicts. Imports training; no torch itself."""
