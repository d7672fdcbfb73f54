"""From a packed batch to one that can be trained on: old log-probs, values of the critic, log-probs of the reference, advantages.

All of it is computed once per step, before the first update, on the policy that sampled the batch. Old log-probs are computed only where
truncated importance sampling needs them; an engine on the learner's own weights has returned them already, and the only update of a step computes them
itself.

Several ranks deal out the rows, so a model reads each row on one rank. Advantages follow from whole groups and are computed on every rank.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import Tensor

from tether.algorithms.advantages import ESTIMATORS, penalize, place_rewards
from tether.algorithms.batch import Batch
from tether.algorithms.objective import DIVERGENCES
from tether.algorithms.presets import Algorithm
from tether.core.errors import BadInput
from tether.models.critic import Critic
from tether.models.hardware import memory_boundary
from tether.models.logprobs import token_logprobs
from tether.models.policy import Policy
from tether.models.reference import Reference
from tether.training.distributed.ranks import Ranks


class AdvantageEstimator:
    """Fills in a batch's advantages and what they were computed from."""

    def __init__(
        self,
        algorithm: Algorithm,
        critic: Critic | None,
        reference: Reference | None,
        *,
        temperature: float,
        micro_tokens: int,
        policy: Policy | None = None,
        ranks: Ranks | None = None,
        update_batch: int = 0,
    ) -> None:
        """`policy` is needed where it is compared with the sampler: by truncated importance sampling, and by `policy_logprobs`. `ranks` share the rows;
        by default there is one. `update_batch`: so many trajectories make one update and are passed over once; 0 where that is not so."""
        if algorithm.importance_cap is not None and policy is None:
            raise BadInput("algorithm.importance_cap needs the policy: its log-probs before the update are compared with the sampler's")
        self.algorithm = algorithm
        self._policy = policy
        self._critic = critic
        self._reference = reference
        self._temperature = temperature
        self._micro_tokens = micro_tokens
        self._ranks = ranks or Ranks()
        self._update_batch = update_batch

    def complete(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with advantages (and returns, values, reference log-probs where the algorithm uses them), and numbers about them."""
        values_BT = reference_BT = old_BT = final_values_B = None
        critic, reference = self._critic, self._reference
        temperature, micro_tokens = self._temperature, self._micro_tokens
        if self.algorithm.importance_cap is not None and batch.num_trajectories > self._update_batch:
            old_BT = self.policy_logprobs(batch)
        if critic is not None:
            values_BT, final_values_B = self._values(batch, critic)
        if reference is not None:
            reference_BT = self._by_row(batch, lambda ids, mask, lengths: reference.logprobs(ids, mask, lengths, temperature, micro_tokens))
        episodes = place_rewards(batch.episodes(values_BT, final_values_B), self.algorithm.reward_placement)
        if reference_BT is not None and self.algorithm.kl_mode == "reward":
            divergence_BT = DIVERGENCES[self.algorithm.divergence](batch.behavior_logprobs_BT, reference_BT)
            episodes = penalize(episodes, batch.aligned(divergence_BT, episodes.mask_RT), self.algorithm.kl_coef)
        estimates = ESTIMATORS[self.algorithm.advantages](episodes, self.algorithm)
        returns_BT = None if estimates.returns_RT is None else batch.spread(estimates.returns_RT, episodes)
        completed = dataclasses.replace(
            batch,
            old_logprobs_BT=old_BT,
            advantages_BT=batch.spread(estimates.advantages_RT, episodes),
            returns_BT=returns_BT,
            values_BT=values_BT,
            reference_BT=reference_BT,
        )
        return completed, _summary(completed)

    def policy_logprobs(self, batch: Batch) -> Tensor:
        """Log-probs of the sampled tokens by the policy as it is now."""
        policy, temperature, micro_tokens = self._policy, self._temperature, self._micro_tokens
        assert policy is not None  # of a run
        return self._by_row(
            batch, lambda ids, mask, lengths: token_logprobs(policy, ids, mask, lengths, temperature, max_tokens=micro_tokens)
        )

    def _values(self, batch: Batch, critic: Critic) -> tuple[Tensor, Tensor | None]:
        """The value before every sampled token, and, from the same pass, the value after the last token of each truncated trajectory."""

        def values(ids: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
            return critic.values(ids, mask, lengths, self._micro_tokens)

        truncated_B = batch.truncated_B
        if truncated_B is None or not self.algorithm.bootstrap_truncated:
            return self._by_row(batch, values), None
        # One more column: the state after a row is what its last token leaves, at the place of the token that would have followed.
        ids_BT, mask_BT = (torch.nn.functional.pad(field_BT, (0, 1)) for field_BT in (batch.ids_BT, batch.loss_mask_BT))
        ends_B1 = batch.lengths_B[:, None]
        mask_BT.scatter_(1, ends_B1, truncated_B[:, None])
        found_BT = self._by_row(dataclasses.replace(batch, ids_BT=ids_BT, loss_mask_BT=mask_BT), values)
        final_values_B = torch.where(truncated_B, found_BT.gather(1, ends_B1)[:, 0], 0.0)
        return torch.where(batch.loss_mask_BT, found_BT[:, :-1], 0.0), final_values_B

    def _by_row(self, batch: Batch, compute: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """Numbers of the sampled tokens at their places, computed from (ids, mask, lengths) of rows, each row on one rank."""
        # Ranges of rows of about equally many tokens: the rows of a group, which share their prompt, stay together as far as that goes.
        ends_B = batch.lengths_B.cumsum(0)
        owners_B = ((ends_B - batch.lengths_B / 2) * self._ranks.size / ends_B[-1]).long()
        own = owners_B == self._ranks.rank

        def compute_own() -> Tensor:
            with memory_boundary("advantages", f"lower learner.micro_tokens (now {self._micro_tokens}; the update stays the same)"):
                return compute(batch.ids_BT[own], batch.loss_mask_BT[own], batch.lengths_B[own]).cpu()

        values_N = torch.cat(self._ranks.share(compute_own)).to(batch.ids_BT.device)
        return torch.zeros(batch.ids_BT.shape, device=batch.ids_BT.device).masked_scatter(batch.loss_mask_BT, values_N.float())


def _summary(batch: Batch) -> dict[str, float]:
    """Numbers for the "update/" section; what is not finite is left out, as the update will be."""
    assert batch.advantages_BT is not None  # filled in a moment ago
    advantages_N = batch.advantages_BT[batch.loss_mask_BT].double()
    summary = {"advantage_std": float(advantages_N.std(correction=0))}
    if batch.returns_BT is not None and batch.values_BT is not None:
        returns_N, values_N = (field_BT[batch.loss_mask_BT].double() for field_BT in (batch.returns_BT, batch.values_BT))
        spread = float(returns_N.var(correction=0))
        missed = float((returns_N - values_N).var(correction=0))
        summary |= {
            "return_mean": float(returns_N.mean()),
            "value_mean": float(values_N.mean()),
            # A critic that says one number for everything explains nothing of returns that are all the same.
            "explained_variance": 1 - missed / spread if spread > 0 else 0.0,
        }
    return {name: value for name, value in summary.items() if math.isfinite(value)}
