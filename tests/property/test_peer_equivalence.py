"""Our mathematics against verl 0.9.1's functions on random inputs, wherever both define the same thing.

verl is no dependency: the tests run where it is importable and are skipped elsewhere. Literal values that these comparisons gave stand in
the unit tests ("values from verl 0.9.1"), which always run. What the two define differently is listed in docs/algorithms.md.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tether.algorithms.advantages import gae, group_relative, whiten
from tether.algorithms.batch import Episodes
from tether.algorithms.objective import (
    DIVERGENCES,
    clipped_policy_loss,
    clipped_value_loss,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from tether.algorithms.presets import preset

core_algos: Any = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed; the comparison needs verl 0.9.1")
torch_functional: Any = pytest.importorskip("verl.utils.torch_functional", reason="verl is not installed; the comparison needs verl 0.9.1")

PAIRS = {
    "token-mean": (token_mean, 1.0),
    "seq-mean-token-mean": (sequence_mean_token_mean, 1.0),
    "seq-mean-token-sum": (sequence_mean_token_sum, 1.0),
    "seq-mean-token-sum-norm": (sequence_mean_token_sum, 11.0),  # verl divides by the width of the mask
}
seeds = pytest.mark.parametrize("seed", range(12))


def near(ours: Tensor | float, theirs: Tensor | float) -> bool:
    return torch.allclose(torch.as_tensor(ours).double(), torch.as_tensor(theirs).double(), rtol=1e-6, atol=1e-6)


class Case:
    """Six rows of eleven tokens with holes in the mask, at least two tokens in each; three groups of one to three."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.mask = torch.rand(6, 11, generator=self.generator) < 0.7
        self.mask[:, :2] = True
        self.weight = self.mask.double()
        self.groups = torch.tensor([7, 3, 7, 5, 5, 7] if seed % 2 else [2, 2, 1, 1, 2, 1])

    def normal(self, scale: float = 1.0) -> Tensor:
        return torch.randn(6, 11, generator=self.generator, dtype=torch.float64) * scale

    def episodes(self) -> Episodes:
        ends = self.mask & (torch.rand(6, 11, generator=self.generator) < 0.3)
        return Episodes(self.normal() * self.mask, self.mask, ends, self.groups, self.normal())


@seeds
@pytest.mark.parametrize(("gamma", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
def test_gae(seed: int, gamma: float, gae_lambda: float) -> None:
    case = Case(seed)
    episodes = case.episodes()
    assert episodes.values_RT is not None
    ours = gae(episodes, preset("ppo").model_copy(update={"gamma": gamma, "gae_lambda": gae_lambda}))
    advantages, returns = core_algos.compute_gae_advantage_return(episodes.rewards_RT, episodes.values_RT, case.weight, gamma, gae_lambda)
    assert ours.returns_RT is not None
    assert near(ours.advantages_RT, advantages * case.mask)
    assert near(ours.returns_RT, returns * case.mask)


@seeds
def test_whitening(seed: int) -> None:
    case = Case(seed)
    values = case.normal(10 ** (seed % 5 - 2)) + seed
    assert near(whiten(values, case.mask), torch_functional.masked_whiten(values, case.weight) * case.mask)


@seeds
@pytest.mark.parametrize("normalize_std", [True, False])
def test_group_relative(seed: int, normalize_std: bool) -> None:
    """Groups of one aside: verl gives them their reward as advantage, we give them none."""
    case = Case(seed)
    episodes = case.episodes()
    ours = group_relative(episodes, preset("grpo").model_copy(update={"normalize_std": normalize_std})).advantages_RT
    theirs, _ = core_algos.compute_grpo_outcome_advantage(
        episodes.rewards_RT, case.weight, case.groups.numpy(), norm_adv_by_std_in_grpo=normalize_std
    )
    alone = torch.from_numpy(np.bincount(case.groups.numpy())[case.groups.numpy()] == 1)
    assert near(ours[~alone], theirs[~alone])
    assert not ours[alone].any()


def in_rows(weights: Tensor, losses: Tensor) -> float:
    return float((weights.double() * losses).sum())


@seeds
@pytest.mark.parametrize("mode", sorted(PAIRS))
def test_aggregation(seed: int, mode: str) -> None:
    case = Case(seed)
    rule, length = PAIRS[mode]
    losses = case.normal()
    assert near(in_rows(rule(case.mask, torch.arange(6), length), losses), core_algos.agg_loss(losses, case.weight, mode))


@seeds
@pytest.mark.filterwarnings("ignore:.*compute_policy_loss.*deprecated:FutureWarning")  # its successor wants verl's configuration objects
@pytest.mark.parametrize("mode", sorted(PAIRS))
@pytest.mark.parametrize(("low", "high", "dual"), [(0.2, 0.28, 3.0), (0.2, 0.2, 1.5), (0.1, 0.5, 1e9)])
def test_policy_loss(seed: int, mode: str, low: float, high: float, dual: float) -> None:
    case = Case(seed)
    rule, length = PAIRS[mode]
    sampled, advantages = case.normal() - 3, case.normal()
    mine, theirs = ((sampled + shift).requires_grad_() for shift in [case.normal()] * 2)
    ours = clipped_policy_loss(mine, sampled, advantages, low, high, dual)
    loss, clipped, _, bounded = core_algos.compute_policy_loss(
        sampled, theirs, advantages, case.weight, cliprange_low=low, cliprange_high=high, clip_ratio_c=dual, loss_agg_mode=mode
    )
    total = (rule(case.mask, torch.arange(6), length).double() * ours.loss_N).sum()
    total.backward()
    loss.backward()
    assert mine.grad is not None and theirs.grad is not None
    assert near(total, loss) and near(mine.grad, theirs.grad)
    assert near((ours.clipped_low_N | ours.clipped_high_N)[case.mask].double().mean(), clipped)
    assert near(ours.clipped_dual_N[case.mask].double().mean(), bounded)


@seeds
@pytest.mark.parametrize("mode", sorted(PAIRS))
def test_value_loss(seed: int, mode: str) -> None:
    case = Case(seed)
    rule, length = PAIRS[mode]
    before, returns = case.normal(), case.normal()
    mine, theirs = ((before + shift).requires_grad_() for shift in [case.normal(0.5)] * 2)
    ours = clipped_value_loss(mine, before, returns, 0.3)
    loss, clipped = core_algos.compute_value_loss(theirs, returns, before, case.weight, 0.3, loss_agg_mode=mode)
    total = (rule(case.mask, torch.arange(6), length).double() * ours.loss_N).sum()
    total.backward()
    loss.backward()
    assert mine.grad is not None and theirs.grad is not None
    assert near(total, loss) and near(mine.grad, theirs.grad)
    assert near(ours.clipped_N[case.mask].double().mean(), clipped)


@seeds
@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_divergence(seed: int, name: str) -> None:
    """Inside verl's clamps: it holds log-ratios within 20 and k3 within 10."""
    case = Case(seed)
    reference = case.normal() - 3
    shift = case.normal(0.7)
    mine, theirs = ((reference + shift).requires_grad_() for _ in range(2))
    ours, other = DIVERGENCES[name](mine, reference), core_algos.kl_penalty(theirs, reference, name)
    ours.sum().backward()
    other.sum().backward()
    assert mine.grad is not None and theirs.grad is not None
    assert float(other.detach().abs().max()) < 10
    assert near(ours, other) and near(mine.grad, theirs.grad)
