"""From rewards to advantages: one pure function per estimator, from Episodes (R trajectories, one per row) to Estimates, in float64.

Only tokens of the mask take part; a position outside the mask is skipped. `group_relative` compares a trajectory with the others of its
prompt. `gae` and `bilevel_gae` compare it with the values of a critic. Both are one backward pass (`_discounted_errors`): over the tokens,
or first over the ends of turns and then over the tokens of each turn.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tether.algorithms.batch import Episodes, Estimates
from tether.core.errors import BadInput

if TYPE_CHECKING:
    from tether.algorithms.presets import Algorithm

STD_FLOOR = 1e-6
VARIANCE_FLOOR = 1e-8


def group_relative(episodes: Episodes, algorithm: "Algorithm") -> Estimates:
    """A_g = R_g - mean(R) over the trajectories of one group, divided by std(R) + 1e-6 (ddof 1) if asked; the same at every token.

    With the division this is GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without it Dr. GRPO (arXiv 2503.20783, section 3.2),
    which does not favour prompts whose rewards hardly differ. A group of one, or of equal rewards, has advantage zero.
    """
    returns_R = episodes.rewards_RT.double().sum(dim=1)
    groups, group_R = torch.unique(episodes.groups_R, return_inverse=True)
    rows_R = torch.arange(len(returns_R), device=returns_R.device)
    sizes = torch.bincount(group_R, minlength=len(groups))
    firsts = torch.full_like(groups, len(returns_R), dtype=torch.long).scatter_reduce_(0, group_R, rows_R, "amin")

    def total(values_R: Tensor) -> Tensor:
        return torch.zeros(len(groups), dtype=torch.float64, device=values_R.device).index_add_(0, group_R, values_R)

    offset_R = returns_R - returns_R[firsts][group_R]  # equal rewards are then exactly zero, whatever their mean rounds to
    advantages_R = offset_R - (total(offset_R) / sizes)[group_R]
    if algorithm.normalize_std:
        std = (total(advantages_R.square()) / (sizes - 1).clamp(min=1)).sqrt()
        advantages_R = advantages_R / (std + STD_FLOOR)[group_R]
    return Estimates(torch.where(episodes.mask_RT, advantages_R[:, None], 0.0))


def gae(episodes: Episodes, algorithm: "Algorithm") -> Estimates:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) over the sampled tokens, with `gamma` and `gae_lambda` per token.

    A_t = sum_l (gamma gae_lambda)^l delta_(t+l), delta_t = r_t + gamma V_(t+1) - V_t. V after the last token is 0 where the environment ended
    the episode, and what the critic expects there where the episode was cut (`Episodes.final_values_R`; arXiv 1712.00378, section 3). The
    critic is taught A_t + V_t, with A_t before whitening.
    """
    values_RT, mask_RT = _values(episodes), episodes.mask_RT
    stops_RT = torch.zeros_like(mask_RT)
    advantages_RT = _discounted_errors(
        episodes.rewards_RT, values_RT, mask_RT, stops_RT, algorithm.gamma, algorithm.gae_lambda, episodes.final_values_R
    )
    return _estimates(advantages_RT, values_RT, mask_RT, algorithm.whiten)


def bilevel_gae(episodes: Episodes, algorithm: "Algorithm") -> Estimates:
    """GAE over turns, then over the tokens of each turn (VAGEN, arXiv 2510.16907, bi-level GAE).

    Turn level, at the last token of each turn, with `turn_gamma` and `gae_lambda`: the reward is what the turn earned, the next state is
    the last token of the next turn, or of a truncated episode what follows it. Token level, within a turn, with `gamma` and `gae_lambda`:
    the last token is paid the turn's advantage plus its value, and nothing follows it. Rewards inside a turn (a divergence in the reward)
    stay at their tokens and are not paid twice.
    """
    values_RT = _values(episodes)
    mask_RT, rewards_RT = episodes.mask_RT, torch.where(episodes.mask_RT, episodes.rewards_RT.double(), 0.0)
    ends_RT = (episodes.turn_ends_RT & mask_RT) | _last_tokens(mask_RT)
    turns_RT = ends_RT.long().cumsum(dim=1) - ends_RT.long()  # the number of the turn that each token is in
    earned_RT = torch.zeros_like(rewards_RT).scatter_add_(1, turns_RT, rewards_RT).gather(1, turns_RT)
    never_RT = torch.zeros_like(mask_RT)
    turn_RT = _discounted_errors(
        earned_RT, values_RT, ends_RT, never_RT, algorithm.turn_gamma, algorithm.gae_lambda, episodes.final_values_R
    )
    # What the turn earned before its last token stands there already.
    paid_RT = torch.where(ends_RT, turn_RT + values_RT - (earned_RT - rewards_RT), rewards_RT)
    advantages_RT = _discounted_errors(paid_RT, values_RT, mask_RT, ends_RT, algorithm.gamma, algorithm.gae_lambda)
    return _estimates(advantages_RT, values_RT, mask_RT, algorithm.whiten)


ESTIMATORS: dict[str, Callable[[Episodes, "Algorithm"], Estimates]] = {
    estimator.__name__: estimator for estimator in (group_relative, gae, bilevel_gae)
}


def place_rewards(episodes: Episodes, reward_placement: str) -> Episodes:
    """The same episodes with rewards where they are to count: "turn" as given, "trajectory" all at the last token.

    To be done before penalties: a divergence in the reward stays at its token.
    """
    if reward_placement == "turn":
        return episodes
    total_R1 = episodes.rewards_RT.double().sum(dim=1, keepdim=True)
    return replace(episodes, rewards_RT=torch.where(_last_tokens(episodes.mask_RT), total_R1, 0.0))


def penalize(episodes: Episodes, divergence_RT: Tensor, coef: float) -> Episodes:
    """The same episodes with coef * divergence taken from the reward of each sampled token (arXiv 2203.02155, equation 2)."""
    return replace(episodes, rewards_RT=episodes.rewards_RT - coef * torch.where(episodes.mask_RT, divergence_RT.double(), 0.0))


def whiten(values_RT: Tensor, mask_RT: Tensor) -> Tensor:
    """Mean 0 and variance 1 (ddof 1) over the mask, zero elsewhere; equal values, or a single one, become zero."""
    if not mask_RT.any():
        return torch.zeros_like(values_RT, dtype=torch.float64)
    values_N = values_RT[mask_RT].double()
    offset_N = values_N - values_N[0]  # equal values are then exactly zero
    centred_N = offset_N - offset_N.mean()
    variance = centred_N.square().sum() / max(len(centred_N) - 1, 1)
    return torch.zeros_like(values_RT, dtype=torch.float64).masked_scatter(mask_RT, centred_N * torch.rsqrt(variance + VARIANCE_FLOOR))


def _discounted_errors(
    rewards_RT: Tensor,
    values_RT: Tensor,
    mask_RT: Tensor,
    stops_RT: Tensor,
    gamma: float,
    gae_lambda: float,
    final_values_R: Tensor | None = None,
) -> Tensor:
    """Sum of (gamma gae_lambda)^l delta_(t+l) at each position of the mask, from right to left; nothing follows a stop. The value behind the
    last position is `final_values_R`, 0 by default."""
    goes_on_RT = (~stops_RT).double()
    columns_RT = (rewards_RT - values_RT, values_RT, mask_RT, gamma * goes_on_RT, gamma * gae_lambda * goes_on_RT)
    columns = [field_RT.T.contiguous().unbind() for field_RT in columns_RT]  # position by position, each in one piece of memory
    advantage_R = values_RT.new_zeros(len(values_RT))
    next_value_R = advantage_R if final_values_R is None else final_values_R
    backwards = []
    for paid_R, value_R, inside_R, discount_R, decay_R in zip(*map(reversed, columns), strict=True):
        error_R = torch.addcmul(paid_R, discount_R, next_value_R)
        advantage_R = torch.where(inside_R, torch.addcmul(error_R, decay_R, advantage_R), advantage_R)
        next_value_R = torch.where(inside_R, value_R, next_value_R)
        backwards.append(advantage_R)
    if not backwards:
        return torch.zeros_like(values_RT)
    return torch.where(mask_RT, torch.stack(backwards[::-1], dim=1), 0.0)


def _estimates(advantages_RT: Tensor, values_RT: Tensor, mask_RT: Tensor, whitened: bool) -> Estimates:
    returns_RT = torch.where(mask_RT, advantages_RT + values_RT, 0.0)
    return Estimates(whiten(advantages_RT, mask_RT) if whitened else advantages_RT, returns_RT)


def _values(episodes: Episodes) -> Tensor:
    if episodes.values_RT is None:
        raise BadInput("this estimator needs the values of a critic; got none: give Episodes.values_RT, or use group_relative")
    return episodes.values_RT.double()


def _last_tokens(mask_RT: Tensor) -> Tensor:
    return mask_RT & (mask_RT.long().flip(1).cumsum(dim=1).flip(1) == 1)
