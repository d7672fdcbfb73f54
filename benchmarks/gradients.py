"""Where do updates come from? The paper's Figure 3 on a run of ours: task and regulariser gradients by reward variance, exact and cheap.

A run is trained for a few steps, then prompts are played for the measurement alone and their gradients taken apart, once over all
parameters with the Cauchy-Schwarz bound, once over the last layer. Prints both tables, and how the cheap way agrees with the exact one.

    python benchmarks/gradients.py --env frozen_lake --algorithm dr_grpo --prompts 48
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from rich.console import Console

from tether.algorithms.filters.scores import sample_variance
from tether.core.config import dump_yaml, validate
from tether.core.types import Group
from tether.diagnostics.gradients import GradientDecomposition, agreement, decompose_gradients
from tether.rollout.pack import pack
from tether.rollout.sampler import training_plan
from tether.runs.store import RunStore
from tether.training.loop import Trainer
from tether.training.settings import RunSettings
from tether.training.stages import GRADIENT_GROUPS


def trained(chosen: argparse.Namespace, folder: Path) -> tuple[Trainer, list[Group]]:
    """A run after its steps, and groups that its policy has played then."""
    config = {
        "env": {"name": chosen.env},
        "model": {"name": chosen.model, "device": chosen.device},
        "algorithm": {"name": chosen.algorithm, "kl_coef": chosen.kl_coef, "entropy_coef": chosen.entropy_coef},
        "rollout": {"num_groups": 8, "group_size": chosen.group_size, "max_tokens": chosen.max_tokens, "max_rows": 256},
        "learner": {"update_batch": 16},
        "diagnosis": {"every": 0},
        "steps": max(1, chosen.steps),
        "seed": chosen.seed,
    }
    settings = validate(RunSettings, config)
    trainer = Trainer(settings, RunStore.create(folder / "run", dump_yaml(settings), {}))
    pool = trainer.sampler.pool
    with pool:
        for step in range(1, chosen.steps + 1):
            trainer.train_step(step)
        plan = training_plan(chosen.seed, chosen.steps + 1, chosen.prompts, chosen.group_size, GRADIENT_GROUPS, pool.weights)
        return trainer, trainer.sampler.collect(plan, settings.sampling())


def decomposed(trainer: Trainer, groups: list[Group], parameters: str, bound: bool) -> tuple[GradientDecomposition, float]:
    """The decomposition of these groups, and the seconds it took."""
    settings = trainer.settings
    batch, _ = trainer.estimator.complete(pack([t for group in groups for t in group.trajectories], trainer.policy.device))
    start = time.perf_counter()
    found = decompose_gradients(
        trainer.policy,
        batch,
        trainer.algorithm,
        {group.index: sample_variance(np.array(group.rewards)) for group in groups},
        temperature=settings.rollout.temperature,
        micro_tokens=settings.learner.micro_tokens,
        max_tokens=settings.rollout.max_tokens,
        parameters=parameters,
        with_bound=bound,
        seed=settings.seed,
    )
    return found, time.perf_counter() - start


def table(found: GradientDecomposition) -> str:
    """Markdown: one row per bucket."""
    lines = [
        "| bucket | reward variance | task norm | regulariser norm | dominance | SNR | bound holds, share used |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, row in enumerate(found.buckets, start=1):
        dominance, snr = (f"{value:.3f}" if value is not None else "-" for value in (row.dominance, row.snr))
        bound = f"{'yes' if row.bound.holds else 'NO'}, {row.bound.tightness:.2f}" if row.bound else "-"
        lines.append(
            f"| {number} | {row.bucket.rv_mean:.4f} | {row.task_norm:.5f} | {row.regulariser_norm:.5f} | {dominance} | {snr} | {bound} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="frozen_lake")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--algorithm", default="dr_grpo")
    parser.add_argument("--steps", type=int, default=2, help="training steps before the measurement")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--group-size", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=80)
    parser.add_argument("--kl-coef", type=float, default=0.001)
    parser.add_argument("--entropy-coef", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    console = Console(soft_wrap=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer, groups = trained(chosen, Path(folder))
        exact, exact_seconds = decomposed(trainer, groups, "all", bound=True)
        cheap, cheap_seconds = decomposed(trainer, groups, "last", bound=False)
    for name, found, seconds in (("exact", exact, exact_seconds), ("cheap", cheap, cheap_seconds)):
        console.print(f"\n{name}: {found.num_parameters:,} parameters, {seconds:.1f} s\n\n{table(found)}", markup=False, highlight=False)
    console.print("\n| number | correlation over buckets | mean ratio cheap / exact | its spread |\n|---|---|---|---|", markup=False)
    for number, agreed in agreement(exact, cheap).items():
        values = (f"{value:.3f}" if value is not None else "-" for value in (agreed.correlation, agreed.ratio, agreed.ratio_spread))
        console.print(f"| {number} | {' | '.join(values)} |", markup=False, highlight=False)


if __name__ == "__main__":
    main()
