"""Reinforcement learning of a multi-turn agent in one file, from Tether's public pieces: no trainer, no config, no framework.

    python examples/rl_loop.py --steps 10

It trains the embedded model `tiny` on FrozenLake with GRPO. Every step samples groups of episodes, keeps the groups that carry signal,
measures how much the reasoning depends on its prompt, and makes one update. About five seconds a step on two CPU cores.
"""

import argparse
import dataclasses
from collections.abc import Sequence

import torch

from tether import Group, Monitor, Policy, load_model, play, select_groups
from tether.algorithms.advantages import ESTIMATORS
from tether.algorithms.batch import Batch
from tether.algorithms.objective import PolicyTokens, loss_terms, token_weights
from tether.algorithms.presets import Algorithm, preset
from tether.diagnostics.pairs import rollout_rows
from tether.models.logprobs import cut_batch, forward, logprobs_and_entropy
from tether.models.scoring.local import scorer_for
from tether.rollout.engines.registry import make_engine
from tether.rollout.pack import pack

ENV = "frozen_lake"
MAX_TOKENS = 100
"""Budget of one response."""
MICRO_TOKENS = 8192
"""Tokens per forward pass of the update; it changes memory and speed, not the gradient."""


def filter_groups(groups: Sequence[Group], keep: float) -> list[Group]:
    """SNR-aware filtering: groups whose trajectories all earned the same have no gradient but noise."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    selection = select_groups([t.reward for t in trajectories], [t.group for t in trajectories], strategy="top_p", keep=keep)
    return [group for group in groups if group.index in set(selection.kept)]


def with_advantages(batch: Batch, algorithm: Algorithm) -> Batch:
    """Rewards to advantages: each trajectory against the others of its prompt."""
    episodes = batch.episodes()
    estimates = ESTIMATORS[algorithm.advantages](episodes, algorithm)
    return dataclasses.replace(batch, advantages_BT=batch.spread(estimates.advantages_RT, episodes))


def update(policy: Policy, batch: Batch, algorithm: Algorithm, optimizer: torch.optim.Optimizer) -> float:
    """One optimiser step on the whole batch, accumulated over micro-batches; returns the loss.

    The weight of every token is fixed before the batch is cut, so the gradient does not depend on the cut. Log-probs and mask are the ones
    the sampler returned: no text is tokenised again.
    """
    assert batch.advantages_BT is not None
    weights_BT = token_weights(algorithm, batch.loss_mask_BT, batch.trajectory_index_B, MAX_TOKENS)
    total = 0.0
    optimizer.zero_grad()
    for micro in cut_batch(policy, batch.ids_BT, batch.lengths_B, MICRO_TOKENS):
        selected = forward(policy, batch.ids_BT, batch.loss_mask_BT, micro)
        logprobs_N, entropy_N = logprobs_and_entropy(policy, selected.features_ND, selected.targets_N, temperature=1.0)
        rows_M = micro.index_M.to(batch.ids_BT.device)
        mask_MT = batch.loss_mask_BT[rows_M]
        tokens = PolicyTokens(
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            old_N=batch.old_BT[rows_M][mask_MT],
            behavior_N=batch.behavior_logprobs_BT[rows_M][mask_MT],
            advantages_N=batch.advantages_BT[rows_M][mask_MT],
        )
        loss = (weights_BT[rows_M][mask_MT] * loss_terms(algorithm, tokens).total_N).sum()
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(policy.module.parameters(), 1.0)
    optimizer.step()
    return total


def success(groups: Sequence[Group]) -> float:
    """Share of episodes that solved their task."""
    solved = [trajectory.success for group in groups for trajectory in group.trajectories]
    return sum(solved) / max(1, len(solved))


def main(
    steps: int = 10, prompts: int = 8, group_size: int = 8, learning_rate: float = 1e-4, keep: float = 0.9, seed: int = 0
) -> list[float]:
    """Train and return the success rate of every step."""
    torch.manual_seed(seed)
    policy = Policy(*load_model("tiny"))
    engine = make_engine("native", policy, max_context=1024)
    algorithm = preset("grpo")
    optimizer = torch.optim.AdamW(policy.module.parameters(), lr=learning_rate, weight_decay=0.0)
    monitor = Monitor(scorer_for(policy), every=2, seed=seed)
    rates = []
    for step in range(1, steps + 1):
        groups = play(
            ENV,
            engine,
            prompts,
            group_size,
            seed,
            tokenizer=policy.tokenizer,
            step=step,
            rollout={"max_tokens": MAX_TOKENS, "max_context": 1024},
        )
        kept = filter_groups(groups, keep)
        health = monitor.observe(step, **rollout_rows(groups))  # on all groups, before the update
        loss = float("nan")
        if kept:
            batch = with_advantages(pack([t for group in kept for t in group.trajectories], policy.module.device), algorithm)
            loss = update(policy, batch, algorithm, optimizer)
        rates.append(success(groups))
        measured = health.metrics.get("information", {})
        information = f"  MI {measured['mi_seq']:.2f} nats, {health.regime}" if "mi_seq" in measured else ""
        alarms = f"  alarms: {', '.join(alarm.name for alarm in health.alarms)}" if health.alarms else ""
        print(f"step {step}: success {rates[-1]:.0%}, kept {len(kept)}/{len(groups)} prompts, loss {loss:+.4f}{information}{alarms}")
    return rates


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--keep", type=float, default=0.9, help="share of the reward variance that the filter keeps")
    parser.add_argument("--seed", type=int, default=0)
    main(**vars(parser.parse_args()))
