"""The one loss: importance ratio, clip, KL, entropy and aggregation, as pure functions on the selected tokens of a forward pass.

The learner trains on `loss_terms(...).total_N`, and the gradient decomposition differentiates the same terms one by one, so the two cannot
drift apart. A term is an entry of `TERMS`: a name, when it is in the loss, and its value per token with its coefficient. A new term is a
function and an entry here, and its coefficient in presets.Algorithm, which is the setting.

Three log-probs of a token are told apart:

- `behavior`: what the sampler returned. A remote or stale engine differs from the policy.
- `old`: the policy before the first update of the step. It equals `behavior` where the engine runs on the learner's own weights.
- `logprobs`: the policy that is being trained, with gradient.

The ratio is new / old. Where the sampler is another model than the old policy, truncated importance sampling multiplies the clipped loss of
a token by min(old / behavior, cap) (arXiv 2510.26788; TRL and verl do the same for vLLM).

How token losses become one number is a weight per token, loss = sum(weight * token loss). Weights are computed for a whole minibatch
before it is cut into micro-batches, so the gradient does not depend on the cut. A trajectory may be several rows; rows with the same
trajectory index count as one sequence.

Shape legend: N selected tokens, B rows, T positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tether.algorithms.presets import Algorithm

# ------------------------------------------------------------------------------------------------------------ divergence


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """-log r with log r = log p_reference - log p_policy: unbiased, noisy. As a loss its gradient is zero on average: use it in the reward."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """(log r)^2 / 2: biased, never negative. Its gradient, unlike its value, is unbiased."""
    return 0.5 * (logprobs_N - reference_N).square()


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """r - 1 - log r: unbiased, never negative (GRPO's choice, arXiv 2402.03300, equation 4)."""
    log_ratio_N = reference_N - logprobs_N
    return torch.expm1(log_ratio_N) - log_ratio_N  # exp - 1 would cancel where the two are close


DIVERGENCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {estimate.__name__: estimate for estimate in (k1, k2, k3)}
"""Estimates of KL(policy || reference) per token, from tokens the policy drew (Schulman, "Approximating KL divergence", 2020)."""

REPORTED_LOG_RATIO = 20.0
"""Log-ratios that are only reported are cut off here: exp(89) is infinite in float32, and a number on the record must not decide about an update."""


def reported(logprobs_N: Tensor, other_N: Tensor) -> Tensor:
    """Other log-probs of the same tokens, at most REPORTED_LOG_RATIO away from `logprobs_N`: for numbers that are logged and not trained on."""
    return torch.clamp(other_N, logprobs_N - REPORTED_LOG_RATIO, logprobs_N + REPORTED_LOG_RATIO)


# ----------------------------------------------------------------------------------------------------------- aggregation


def token_mean(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Every token of the minibatch has the same weight (DAPO, arXiv 2503.14476, equation 12)."""
    return mask_BT.float() / mask_BT.sum().clamp(min=1)


def sequence_mean_token_mean(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Mean over the tokens of a sequence, then over sequences (GRPO, arXiv 2402.03300, equation 3)."""
    trajectories, sequence_B = torch.unique(trajectory_index_B, return_inverse=True)
    tokens = torch.zeros(len(trajectories), dtype=torch.long, device=mask_BT.device).index_add_(0, sequence_B, mask_BT.sum(dim=1).long())
    return mask_BT.float() / tokens.clamp(min=1)[sequence_B, None] / max(len(trajectories), 1)


def sequence_mean_token_sum(mask_BT: Tensor, trajectory_index_B: Tensor, length: float) -> Tensor:
    """Sum over tokens divided by a constant `length`, mean over sequences: no bias towards long responses (Dr. GRPO, arXiv 2503.20783)."""
    return mask_BT.float() / length / max(len(torch.unique(trajectory_index_B)), 1)


AGGREGATIONS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    rule.__name__: rule for rule in (token_mean, sequence_mean_token_mean, sequence_mean_token_sum)
}
"""(mask_BT, trajectory_index_B, length) -> weights_BT, float32 and zero outside the mask."""


def token_weights(algorithm: "Algorithm", mask_BT: Tensor, trajectory_index_B: Tensor, max_tokens: int) -> Tensor:
    """The weight of every token of a minibatch; `max_tokens` is the response budget that constant-length algorithms divide by."""
    length = float(max_tokens) if algorithm.constant_length else 1.0
    return AGGREGATIONS[algorithm.aggregation](mask_BT, trajectory_index_B, length)


# ---------------------------------------------------------------------------------------------------- ratio, clip, value


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The clipped objective of N tokens and which tokens were clipped."""

    loss_N: Tensor
    ratio_N: Tensor
    clipped_low_N: Tensor
    clipped_high_N: Tensor
    clipped_dual_N: Tensor
    """True where the dual clip decides."""


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The clipped regression of N values and which values were clipped."""

    loss_N: Tensor
    clipped_N: Tensor


def clipped_policy_loss(
    logprobs_N: Tensor, old_N: Tensor, advantages_N: Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> PolicyLoss:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(log p_new - log p_old); for A < 0 at most -dual_clip * A.

    PPO (arXiv 1707.06347, equation 7) with DAPO's separate upper bound (arXiv 2503.14476, equation 10) and, if configured, dual clip
    (arXiv 1912.09729, equation 5). A token counts as clipped where the bound, not the ratio, decides: there its gradient is zero.
    """
    ratio_N = torch.exp(logprobs_N - old_N)
    loss_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_low, 1 + clip_high) * advantages_N)
    clipped_dual_N = torch.zeros_like(advantages_N, dtype=torch.bool)
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        clipped_dual_N = (advantages_N < 0) & (loss_N > ceiling_N)
        loss_N = torch.where(clipped_dual_N, ceiling_N, loss_N)
    return PolicyLoss(
        loss_N=loss_N,
        ratio_N=ratio_N.detach(),
        clipped_low_N=(ratio_N < 1 - clip_low) & (advantages_N < 0),
        clipped_high_N=(ratio_N > 1 + clip_high) & (advantages_N > 0),
        clipped_dual_N=clipped_dual_N,
    )


def clipped_value_loss(values_N: Tensor, before_N: Tensor, returns_N: Tensor, clip: float) -> ValueLoss:
    """max((v - return)^2, (clip(v, before - c, before + c) - return)^2) / 2: the critic gains nothing by moving further than c.

    Not in the PPO paper; the form of its authors' implementation, which verl and TRL's former PPO trainer share. A value counts as
    clipped where the bound decides: there its gradient is zero.
    """
    free_N = (values_N - returns_N).square()
    held_N = (torch.clamp(values_N, before_N - clip, before_N + clip) - returns_N).square()
    return ValueLoss(loss_N=0.5 * torch.maximum(free_N, held_N), clipped_N=held_N > free_N)


def importance_weights(old_N: Tensor, behavior_N: Tensor, cap: float | None) -> Tensor | None:
    """min(exp(log p_old - log p_behavior), cap), without gradient; None where the correction is off (`cap` None)."""
    return None if cap is None else torch.exp((old_N - behavior_N).detach()).clamp(max=cap)


# ----------------------------------------------------------------------------------------------------- the terms of the loss


@dataclass(frozen=True, slots=True)
class PolicyTokens:
    """Everything the loss looks at, for N selected tokens."""

    logprobs_N: Tensor
    """Under the policy that is being trained, with gradient."""
    entropy_N: Tensor
    """Entropy of the policy's distribution at each token, with gradient where the entropy term is in the loss."""
    old_N: Tensor
    """Log-probs of the policy before the first update of the step."""
    behavior_N: Tensor
    """Log-probs that the sampler returned."""
    advantages_N: Tensor
    reference_N: Tensor | None = None
    """Log-probs under the reference model; None without one."""


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of N tokens, term by term, and what the step logs about it."""

    terms: dict[str, Tensor]
    """Name of a term in the loss to its value per token, coefficient included. "task" is always there."""
    policy: PolicyLoss
    metrics: dict[str, Tensor]
    """Further numbers per token, by the name they are logged under."""

    @property
    def total_N(self) -> Tensor:
        return torch.stack(list(self.terms.values())).sum(dim=0)


@dataclass(frozen=True, slots=True)
class Term:
    """A regulariser beside the task: whether an algorithm has it in its loss, and its value per token, coefficient included."""

    active: Callable[["Algorithm", bool], bool]
    """(algorithm, whether there are reference log-probs)."""
    loss: Callable[["Algorithm", PolicyTokens], Tensor]


def _kl_loss(algorithm: "Algorithm", tokens: PolicyTokens) -> Tensor:
    assert tokens.reference_N is not None  # the term is active only with a reference
    return algorithm.kl_coef * DIVERGENCES[algorithm.divergence](tokens.logprobs_N, tokens.reference_N)


TERMS: dict[str, Term] = {
    "kl": Term(
        active=lambda algorithm, has_reference: has_reference and algorithm.kl_mode == "loss" and algorithm.kl_coef != 0,
        loss=_kl_loss,
    ),
    "entropy": Term(
        active=lambda algorithm, has_reference: algorithm.entropy_coef != 0,
        loss=lambda algorithm, tokens: -algorithm.entropy_coef * tokens.entropy_N,
    ),
}
"""The regularisers that an algorithm may add to the clipped task loss."""

TASK = "task"


def active_terms(algorithm: "Algorithm", *, has_reference: bool) -> tuple[str, ...]:
    """The names of the terms in the loss, the task first."""
    return (TASK, *(name for name, term in TERMS.items() if term.active(algorithm, has_reference)))


def loss_terms(algorithm: "Algorithm", tokens: PolicyTokens) -> LossTerms:
    """Every term of the loss per token, before aggregation."""
    policy = clipped_policy_loss(
        tokens.logprobs_N, tokens.old_N, tokens.advantages_N, algorithm.clip_low, algorithm.clip_high, algorithm.dual_clip
    )
    weights_N = importance_weights(tokens.old_N, tokens.behavior_N, algorithm.importance_cap)
    terms = {TASK: policy.loss_N if weights_N is None else weights_N * policy.loss_N}
    metrics = {
        "policy_loss": terms[TASK],
        "entropy": tokens.entropy_N,
        "clip_low": policy.clipped_low_N,
        "clip_high": policy.clipped_high_N,
        "clip_dual": policy.clipped_dual_N,
        "kl_sampled": k3(reported(tokens.logprobs_N, tokens.old_N), tokens.logprobs_N),
    }
    if weights_N is not None:
        metrics["importance_weight"] = weights_N
    if tokens.reference_N is not None:
        metrics["kl_reference"] = DIVERGENCES[algorithm.divergence](tokens.logprobs_N, reported(tokens.logprobs_N, tokens.reference_N))
    for name, term in TERMS.items():
        if term.active(algorithm, tokens.reference_N is not None):
            terms[name] = term.loss(algorithm, tokens)
            metrics[f"loss_{name}"] = terms[name]
    return LossTerms(terms, policy, metrics)
