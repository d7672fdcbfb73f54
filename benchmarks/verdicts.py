"""How often are the verdicts on reasoning right, where it is known what they should be?

    python benchmarks/verdicts.py labels [--rounds 100]
    python benchmarks/verdicts.py audit [--judge blind|tiny|MODEL] [--seeds 20] [--device cpu]

- labels: what a run or a monitor says of one measurement. Scores are simulated: every log-prob has noise of one nat, half of its variance shared
  by the reasonings of a prompt, which are alike for reasons that have nothing to do with it; prompts differ by 0 or 3 nats for any text; a share
  of the reasonings (0, 0.3, 1) is ten nats likelier under its own prompt. "alike" has noise of a twentieth of a nat, as a collapsed policy's own
  scores. The figures are those of docs/diagnosis.md.
- audit: what `tether diagnose` says of a file. Prompts are FrozenLake's grids; reasonings are a template with noise in its slots, or say where player
  and goal stand, or one quarter of them does. `blind` finds every text equally likely under every prompt, so that words alone are evidence.
  The figures are those of docs/rollouts.md.
"""

import argparse
import collections
import dataclasses
import itertools
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tether import make_env, measure_information
from tether.core.evidence import recorded_evidence
from tether.core.reasoning import judge
from tether.core.seeding import generator
from tether.diagnostics.audit import AuditOptions, AuditScorer, audit_sample, collect, load_scorer
from tether.diagnostics.monitor import RESAMPLES
from tether.diagnostics.rollouts import open_rollouts

Rng = np.random.Generator

# -------------------------------------------------------------------------------------------------------------------- labels

SIZES = ((6, 2), (8, 4), (8, 16), (16, 4), (32, 4))
"""Prompts, and reasonings of each."""
SHARES = (0.0, 0.3, 1.0)
TIE = 10.0
"""Nats that a reasoning about its prompt is likelier under it."""
KINDS = {"equal prompts": (1.0, 0.0), "prompts apart": (1.0, 3.0), "alike": (0.05, 0.0)}
"""Nats of noise, and of the spread between prompts."""
TOKENS = 40


def label(prompts: int, samples: int, share: float, noise: float, spread: float, rng: Rng) -> str:
    """The verdict on one simulated measurement."""
    own = np.repeat(np.arange(prompts), samples)
    part = noise / math.sqrt(2)
    scores = (
        -80.0
        + rng.normal(0.0, spread, prompts)
        + rng.normal(0.0, part, (prompts, prompts))[own]
        + rng.normal(0.0, part, (len(own), prompts))
    )
    scores[np.arange(len(own)), own] += TIE * (rng.random(len(own)) < share)
    found = measure_information(scores, np.full(len(own), TOKENS), own, bootstrap=RESAMPLES, permutations=RESAMPLES)
    values: dict[str, Any] = {"num_prompts": prompts, "num_reasonings": len(own)}
    for name in ("retrieval_acc", "mi_seq"):
        values[name], (values[f"{name}_low"], values[f"{name}_high"]) = getattr(found, name), found.intervals[name]
    for name in ("chance", "retrieval_p_value", "mi_p_value", "h_conditional"):
        values[name] = getattr(found, name)
    evidence = recorded_evidence({f"information/{name}": float(value) for name, value in values.items()})
    assert evidence is not None
    return str(judge(evidence).code)


def labels(rounds: int) -> None:
    for (name, (noise, spread)), share, (prompts, samples) in itertools.product(KINDS.items(), SHARES, SIZES):
        if name == "alike" and share:
            continue
        rng = generator("labels", name, int(100 * share), prompts, samples)
        counts = collections.Counter(label(prompts, samples, share, noise, spread, rng) for _ in range(rounds))
        print(f"{name}, {share:.0%} tied, {prompts} x {samples}: {_shares(counts)}", flush=True)


def _shares(counts: collections.Counter[str]) -> str:
    return ", ".join(f"{code} {count}" for code, count in counts.most_common()) + f" of {counts.total()}"


# --------------------------------------------------------------------------------------------------------------------- audit

WAYS = ("Left", "Down", "Right", "Up")
OPENINGS = ("Okay.", "Let me see.", "Hmm.", "First,", "Right,", "So,", "Well,", "Now,")
LOOKS = ("careful", "simple", "quick", "clever", "safe", "direct", "patient", "bold")
STEPS = ("check the options", "look at the state", "weigh the risks", "plan ahead", "try the best move", "think twice", "compare ways")
FILES = ((16, 8), (32, 4))
TIED_SHARES = (0.25, 0.0, 1.0)


class Blind:
    """A scorer that finds every text equally likely under every prompt."""

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float:
        return -2.0 * len(reasoning)


def _pick(rng: Rng, options: Sequence[str]) -> str:
    return options[int(rng.integers(len(options)))]


def tied(prompt: str, rng: Rng) -> str:
    """Where the player and the goal stand on the board."""
    rows = [row for row in prompt.splitlines() if row and set(row) <= set("P_OG#")]
    (y, x), (gy, gx) = ((number, row.index(sign)) for sign in "PG" for number, row in enumerate(rows) if sign in row)
    ways = [way for way, wanted in (("Up", gy < y), ("Down", gy > y), ("Left", gx < x), ("Right", gx > x)) if wanted]
    return f"{_pick(rng, OPENINGS)} I am at ({y},{x}), goal at ({gy},{gx}). {_pick(rng, ('So', 'It is', 'I go'))} {_pick(rng, ways)}."


def template(rng: Rng) -> str:
    return f"I take a {_pick(rng, LOOKS)} approach. First I {_pick(rng, STEPS)}, then I {_pick(rng, STEPS)}. So I go {_pick(rng, WAYS)}."


def records(prompts: int, samples: int, share: float, seed: int) -> Iterator[dict[str, Any]]:
    lake = make_env("frozen_lake", instructions="plain")
    rng = generator("made rollouts", seed, "<lambda>", "None")
    for index in range(prompts):
        prompt = f"{lake.instructions}\n\n{lake.reset(1000 + index).text}"
        for _ in range(samples):
            reasoning = tied(prompt, rng) if rng.random() < share else template(rng)
            success = bool(rng.random() < 0.4)
            response = f"<think>{reasoning}</think> <answer> 1 </answer>"
            yield {"prompt": prompt, "response": response, "reward": float(success), "success": success}


def audit(judge_name: str, seeds: int, device: str | None) -> None:
    scorer = load_scorer("tiny", device="cpu") if judge_name == "blind" else load_scorer(judge_name, device=device)
    if judge_name == "blind":
        scorer = dataclasses.replace(scorer, scorer=Blind())
    for (prompts, samples), share in itertools.product(FILES, TIED_SHARES):
        counts = collections.Counter(verdict(list(records(prompts, samples, share, seed)), scorer) for seed in range(seeds))
        print(f"{judge_name}, {share:.0%} tied, {prompts} x {samples}: {_shares(counts)}", flush=True)


def verdict(made: Sequence[dict[str, Any]], scorer: AuditScorer) -> str:
    options = AuditOptions(bootstrap=200)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollouts.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in made), encoding="utf-8")
        return str(audit_sample(collect(open_rollouts(path), options), scorer, options).verdict.code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("labels", "audit"))
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--judge", default="blind")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--device")
    given = parser.parse_args()
    labels(given.rounds) if given.what == "labels" else audit(given.judge, given.seeds, given.device)


if __name__ == "__main__":
    main()
