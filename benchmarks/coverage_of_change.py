"""Do the 95% intervals of a change on the fixed probe hold the true change 95% of the time, and how much does the pairing narrow them?

    python benchmarks/coverage_of_change.py [--samples 1000] [--bootstrap 400] [--prompts 16 64] [--only alike ...]

The populations of prompts are those of coverage.py: policies over a finite alphabet, so that log-probs are exact. Between two measurements
the policy of every prompt moves towards a template over a third of the letters, by a weight of its own: `little` (3% on average), `some`
(23%), `collapse` (80%). Every sample draws new prompts; both measurements have the same prompts, 4 reasonings each. `paired`: the draws that
make a reasoning are the same in both, as in a run. `independent`: they are not. The true change is its mean over other samples.

For mi_seq, retrieval_acc and h_conditional the table has the coverage in percent and, after the slash, how many times wider the difference of
two unpaired intervals is (the root of the sum of their squared widths). Exit code 1 if with 64 prompts a coverage is outside 90-99.5%.
"""

import argparse
import math
import sys
from collections.abc import Callable

import numpy as np
from coverage import ROUNDING, Floats, Rng, alike, saturated, templates, unlike

from tether import Information, measure_information
from tether.core.seeding import generator
from tether.diagnostics.pairs import Pairs
from tether.diagnostics.probe import CHANGES, ProbeMeasurement

KINDS: dict[str, tuple[Callable[[int, Rng], Floats], int]] = {
    "alike": (alike, 3),
    "het": (unlike, 3),
    "template": (templates, 4),
    "saturation": (saturated, 1),
}
"""Policies, and letters per reasoning."""
MOVES = {"little": (1.0, 30.0), "some": (0.6, 2.0), "collapse": (8.0, 2.0)}
"""The Beta distribution of the weight of the template."""
MEMBERS = 4
LOWEST, HIGHEST, JUDGED_PROMPTS = 0.90, 0.995, 64

Sample = tuple[Floats, Floats, Floats, np.ndarray]


def draw(kind: str, move: str, num: int, paired: bool, rng: Rng) -> Sample:
    """Cross-scores of both measurements, lengths and sources."""
    policies, letters = KINDS[kind]
    first = policies(num, rng)
    weight = rng.beta(*MOVES[move], size=(num, 1))
    shared = np.arange(first.shape[1]) < max(2, first.shape[1] // 3)
    last = (1 - weight) * first + weight * shared / shared.sum()
    source = np.repeat(np.arange(num), MEMBERS)
    draws = rng.random((len(source), letters))
    again = draws if paired else rng.random(draws.shape)
    return scores(first, draws, source), scores(last, again, source), np.full(len(source), float(letters)), source


def scores(policies: Floats, draws: Floats, source: np.ndarray) -> Floats:
    """[N, P] log-probs of the reasonings that these draws make, under every prompt."""
    sure = np.maximum(policies, 1e-9)
    sure /= sure.sum(axis=1, keepdims=True)
    letters = (np.cumsum(sure, axis=1)[source][:, None] < draws[..., None]).sum(axis=-1).clip(0, sure.shape[1] - 1)
    return np.log(sure).T[letters].sum(axis=1)


def measured(values: Floats, lengths: Floats, source: np.ndarray, bootstrap: int, seed: int) -> tuple[ProbeMeasurement, Information]:
    information = measure_information(values, lengths, source, bootstrap=bootstrap, seed=seed)
    prompts = [(column,) for column in range(values.shape[1])]
    return ProbeMeasurement.of(0, Pairs(prompts, [()] * len(source), source.tolist()), information), information


def coverage(kind: str, move: str, num: int, paired: bool, samples: int, bootstrap: int) -> dict[str, tuple[float, float]]:
    """For every number, the share of intervals that hold the true change, and the ratio of the unpaired width to theirs."""
    rng, truths = generator("change", "truth", kind, move, num, int(paired)), []
    for _ in range(4 * samples):
        first, last, lengths, source = draw(kind, move, num, paired, rng)
        before, after = measure_information(first, lengths, source), measure_information(last, lengths, source)
        truths.append([getattr(after, name) - getattr(before, name) for name in CHANGES])
    truth = dict(zip(CHANGES, np.mean(truths, axis=0), strict=True))
    rng = generator("change", "samples", kind, move, num, int(paired))
    held, narrow, wide = (dict.fromkeys(CHANGES, 0.0) for _ in range(3))
    for sample in range(samples):
        first, last, lengths, source = draw(kind, move, num, paired, rng)
        (before, level), (after, later) = (measured(values, lengths, source, bootstrap, sample) for values in (first, last))
        found = after.change_since(before, bootstrap, generator("change", "bootstrap", sample))
        for name in CHANGES:
            low, high = found[f"{name}_change_low"], found[f"{name}_change_high"]
            held[name] += low - ROUNDING <= truth[name] <= high + ROUNDING
            narrow[name] += high - low
            wide[name] += math.hypot(*(info.intervals[name][1] - info.intervals[name][0] for info in (level, later)))
    return {name: (held[name] / samples, wide[name] / narrow[name]) for name in CHANGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--bootstrap", type=int, default=400)
    parser.add_argument("--prompts", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    chosen = parser.parse_args()
    print("| kind | P | move | draws | " + " | ".join(CHANGES) + " |")
    print("|---|---|---|---|" + "---|" * len(CHANGES))
    missed = False
    for kind in chosen.only:
        for num in chosen.prompts:
            for move in MOVES:
                for paired in (True, False):
                    found = coverage(kind, move, num, paired, chosen.samples, chosen.bootstrap)
                    cells = " | ".join(f"{100 * found[name][0]:.1f} / {found[name][1]:.1f}" for name in CHANGES)
                    print(f"| {kind} | {num} | {move} | {'paired' if paired else 'independent'} | {cells} |", flush=True)
                    missed |= num >= JUDGED_PROMPTS and not all(LOWEST <= share <= HIGHEST for share, _ in found.values())
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
