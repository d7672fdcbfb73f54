"""Do the 95% intervals of measure_information hold the true value 95% of the time?

    python benchmarks/coverage.py [--samples 1000] [--bootstrap 400] [--prompts 4 8 16 64] [--only het_drawn ...]

Policies are distributions over a finite alphabet, drawn for every prompt or fixed; a reasoning is a few letters of its prompt's policy, so
its log-prob under every prompt is known exactly. Every sample is measured, and the share of intervals that hold the true value is counted.

- drawn: each sample draws new prompts and new reasonings. The true value is the mean of the estimator over independent samples.
- fixed: the P prompts are all there are, and only reasonings are drawn. The true value of the symmetric channel is its I(X;Z), by hand.

The intervals speak of drawn prompts. Where fixed prompts differ among themselves they are therefore too wide, which the last kind shows.
Exit code 1 if, with at least 8 prompts, the coverage of mi, mi_seq, retrieval_acc or h_conditional is outside 90-99% in a judged kind: the
drawn ones and the symmetric channel. Shares of exactly 1 or 0 in every reasoning have a point for an interval, which no near-certain
true value is equal to; with 4 prompts that is common.
"""

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tether import measure_information
from tether.core.seeding import generator

Floats = npt.NDArray[np.float64]
Rng = np.random.Generator

ALPHABET = 24
NAMES = ("mi", "mi_seq", "mi_token_mean", "mi_zscore", "retrieval_acc", "recall_2", "h_conditional", "h_marginal")
JUDGED = ("mi", "mi_seq", "retrieval_acc", "h_conditional")
LOWEST, HIGHEST = 0.90, 0.99
FEWEST_JUDGED = 8
NOISE = 0.3
ROUNDING = 1e-9
"""The marginal of the symmetric channel is the same for every letter: its interval is a point."""
SHAPES = {4: 8, 8: 16, 16: 8, 64: 4}
"""Reasonings per prompt, for each number of prompts; a second round has uneven groups of 1 to 2G - 1."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A population of prompts: the policies of P of them, letters per reasoning, and whether its coverage is judged."""

    policies: Callable[[int, Rng], Floats]
    letters: int | None
    """None: 1 + Poisson(3), different for every reasoning."""
    judged: bool = True
    by_hand: Callable[[int], float] | None = None
    """I(X;Z), where it is known."""


def alike(num: int, rng: Rng) -> Floats:
    """Policies of the same sharpness."""
    return rng.dirichlet(np.full(ALPHABET, 0.3), size=num)


def unlike(num: int, rng: Rng) -> Floats:
    """Some prompts get one letter, some nearly all of them."""
    sharpness = np.exp(rng.normal(-1.0, 1.2, size=num))
    return np.stack([rng.dirichlet(np.full(ALPHABET, value)) for value in sharpness])


def templates(num: int, rng: Rng) -> Floats:
    """A shared template over eight letters, mixed into each prompt's own policy with a weight that is mostly near 0 or near 1."""
    weight = rng.beta(0.6, 0.6, size=(num, 1))
    return (1 - weight) * alike(num, rng) + weight * np.repeat([1 / 8, 0.0], [8, ALPHABET - 8])


def collapsed(num: int, rng: Rng) -> Floats:
    """95% of every policy is the same."""
    return 0.05 * alike(num, rng) + 0.95 / ALPHABET


def saturated(num: int, rng: Rng) -> Floats:
    """A letter of its own for every prompt, and any other letter a tenth of the time."""
    own = np.eye(num)
    slip = rng.beta(2.0, 18.0, size=(num, 1))
    return (1 - slip) * own + slip / num


def symmetric(num: int, _rng: Rng) -> Floats:
    """A noisy channel: the prompt's own letter, or with probability 0.3 one of the others."""
    return np.where(np.eye(num, dtype=bool), 1 - NOISE, NOISE / (num - 1))


def symmetric_information(num: int) -> float:
    """log P - H(noise) - noise log(P - 1)."""
    return math.log(num) + (1 - NOISE) * math.log(1 - NOISE) + NOISE * math.log(NOISE / (num - 1))


def unlike_fixed(num: int, _rng: Rng) -> Floats:
    return unlike(num, generator("coverage", "fixed", num))


KINDS = {
    "alike_drawn": Kind(alike, 3),
    "het_drawn": Kind(unlike, 3),
    "template_drawn": Kind(templates, None),
    "collapse_drawn": Kind(collapsed, None),
    "saturation_drawn": Kind(saturated, 1),
    "symmetric_fixed": Kind(symmetric, 1, by_hand=symmetric_information),
    "het_fixed": Kind(unlike_fixed, 3, judged=False),
}


def draw(kind: Kind, num: int, group: int, uneven: bool, rng: Rng) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Cross-scores, lengths and sources of one sample."""
    policies = np.maximum(kind.policies(num, rng), 1e-9)
    policies /= policies.sum(axis=1, keepdims=True)
    counts = rng.integers(1, 2 * group, size=num) if uneven else np.full(num, group)
    source = np.repeat(np.arange(num), counts)
    lengths = np.full(len(source), kind.letters) if kind.letters else 1 + rng.poisson(3.0, size=len(source))
    writer = np.repeat(source, lengths)
    letters = (np.cumsum(policies, axis=1)[writer] < rng.random((len(writer), 1))).sum(axis=1).clip(0, policies.shape[1] - 1)
    starts = np.cumsum(lengths) - lengths
    return np.add.reduceat(np.log(policies).T[letters], starts, axis=0), lengths.astype(float), source


def true_values(kind: Kind, num: int, group: int, uneven: bool, samples: int, rng: Rng) -> dict[str, float]:
    """The mean of every number over samples that the intervals never see; what is known by hand replaces it."""
    found = [measure_information(*draw(kind, num, group, uneven, rng)) for _ in range(samples)]
    means = {name: float(np.mean([info.recall[2] if name == "recall_2" else getattr(info, name) for info in found])) for name in NAMES}
    if kind.by_hand:
        means |= dict.fromkeys(("mi", "mi_seq"), kind.by_hand(num))  # one letter each: per token and per reasoning are the same
    return means


def coverage(name: str, num: int, uneven: bool, samples: int, bootstrap: int) -> dict[str, float]:
    """For every number, the share of samples whose interval holds its true value."""
    kind, group = KINDS[name], SHAPES.get(num, 8)
    truth = true_values(kind, num, group, uneven, 4 * samples, generator("coverage", "truth", name, num, int(uneven)))
    rng, held = generator("coverage", "samples", name, num, int(uneven)), dict.fromkeys(NAMES, 0)
    for sample in range(samples):
        intervals = measure_information(*draw(kind, num, group, uneven, rng), bootstrap=bootstrap, seed=sample).intervals
        for number in NAMES:
            low, high = intervals[number]
            held[number] += low - ROUNDING <= truth[number] <= high + ROUNDING
    return {number: count / samples for number, count in held.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--bootstrap", type=int, default=400)
    parser.add_argument("--prompts", type=int, nargs="+", default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=list(KINDS), default=list(KINDS), metavar="KIND")
    chosen = parser.parse_args()
    print("| kind | P | G | " + " | ".join(NAMES) + " |")
    print("|---|---|---|" + "---|" * len(NAMES))
    missed = False
    for name in chosen.only:
        for num in chosen.prompts:
            for uneven in (False, True):
                shares = coverage(name, num, uneven, chosen.samples, chosen.bootstrap)
                group = SHAPES.get(num, 8)
                members = f"1-{2 * group - 1}" if uneven else f"{group}"
                print(f"| {name} | {num} | {members} | " + " | ".join(f"{100 * shares[number]:.1f}" for number in NAMES) + " |", flush=True)
                judged = KINDS[name].judged and num >= FEWEST_JUDGED
                missed |= judged and not all(LOWEST <= shares[number] <= HIGHEST for number in JUDGED)
    sys.exit(int(missed))


if __name__ == "__main__":
    main()
