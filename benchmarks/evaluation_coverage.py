"""Do the 95% intervals of an evaluation hold the true value 95% of the time?

    python benchmarks/evaluation_coverage.py [--rounds 1000] [--instances 20 40 80 300]

Instances have beta-distributed difficulties; two models find the same instance hard (a share of the instances is drawn at the same quantile for
both). Every round draws instances and samples, and counts whether the success interval (clustered_interval), the interval of the mean
(mean_interval) and that of the paired difference (difference_interval) hold the true value. One line for each number of instances and samples:
the lowest and the highest coverage over all cases. Exit code 1 if, from 80 instances on, one is outside 93-97% by more than three standard
errors of the simulation.
"""

import argparse
import itertools
import math
import sys

import numpy as np

from tether.core.intervals import clustered_interval, difference_interval, mean_interval
from tether.core.seeding import generator

RATES = ((0.5, 0.5), (0.6, 0.4), (0.3, 0.7), (0.1, 0.3), (0.9, 0.8), (0.1, 0.1))
SHARPNESS = (0.5, 3.0)
"""Sum of the parameters of the beta distribution: how much instances differ in difficulty, from much to little."""
ALIKE = (0.0, 0.8, 1.0)
"""Share of the instances that are equally hard for both models."""
SAMPLES = (1, 4, 16)
POOL = 20_000
LOWEST, HIGHEST, JUDGED_FROM = 0.93, 0.97, 80
NAMES = ("success", "reward", "difference")


def coverage(instances: int, samples: int, rates: tuple[float, float], sharpness: float, alike: float, rounds: int) -> list[float]:
    """The share of rounds in which each interval holds the true value."""
    rng = generator("evaluation coverage", instances, samples, *(int(1000 * rate) for rate in rates), int(10 * sharpness), int(10 * alike))
    first, second = (np.sort(rng.beta(rate * sharpness, (1 - rate) * sharpness, POOL)) for rate in rates)
    drawn = rng.integers(POOL, size=(rounds, instances))
    other = np.where(rng.random((rounds, instances)) < alike, drawn, rng.integers(POOL, size=(rounds, instances)))
    solved, solved_other = rng.binomial(samples, first[drawn]), rng.binomial(samples, second[other])
    # A reward beside success: whatever the task pays, with noise of its own.
    rewards = solved / samples + rng.normal(0.0, 0.3, (rounds, instances))
    true = (float(first.mean()), float(first.mean()), float(first.mean() - second.mean()))
    held = [0, 0, 0]
    for row, other_row, reward in zip(solved.tolist(), solved_other.tolist(), rewards.tolist(), strict=True):
        outcomes = [[1.0] * count + [0.0] * (samples - count) for count in row]
        differences = [(a - b) / samples for a, b in zip(row, other_row, strict=True)]
        intervals = (clustered_interval(outcomes), mean_interval(reward), difference_interval(differences, samples))
        for number, (interval, value) in enumerate(zip(intervals, true, strict=True)):
            held[number] += interval is not None and interval[0] <= value <= interval[1]
    return [count / rounds for count in held]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--instances", type=int, nargs="+", default=[20, 40, 80, 300])
    given = parser.parse_args()
    error = 3 * math.sqrt(0.05 * 0.95 / given.rounds)
    failed = False
    for instances, samples in itertools.product(given.instances, SAMPLES):
        cases = itertools.product(RATES, SHARPNESS, ALIKE)
        found = np.array([coverage(instances, samples, rates, sharpness, alike, given.rounds) for rates, sharpness, alike in cases])
        low, high = found.min(axis=0), found.max(axis=0)
        words = ", ".join(f"{name} {100 * low[n]:.1f}% to {100 * high[n]:.1f}%" for n, name in enumerate(NAMES))
        print(f"{instances} instances, {samples} samples: {words}", flush=True)
        failed |= instances >= JUDGED_FROM and bool((low < LOWEST - error).any() or (high > HIGHEST + error).any())
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
