"""The learner: a batch in, one step's optimiser updates done, the numbers about them out.

A minibatch of `update_batch` trajectories makes one update. It is cut into micro-batches by token budget; the weight of every token
is fixed before the cut, so the gradient is the same however much memory there is. Log-probs are taken at the sampling temperature,
like the sampled ones they are compared with.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tether.algorithms.aggregate import token_weights
from tether.algorithms.batch import Batch
from tether.algorithms.losses import clipped_policy_loss, k3_divergence
from tether.algorithms.presets import Algorithm
from tether.models.head import SplitModel
from tether.models.logprobs import token_logprobs
from tether.training.settings import LearnerSettings


class TokenTotals:
    """Sums over trained tokens, reduced to means once at the end of the step."""

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self.count = 0
        self.ratio_max = 0.0

    def add(self, count: int, **values: Tensor) -> None:
        self.count += count
        for name, tensor in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(tensor.detach().double().sum())

    @property
    def is_finite(self) -> bool:
        return all(math.isfinite(value) for value in (self.ratio_max, *self.sums.values()))

    def mean(self, name: str) -> float:
        return self.sums.get(name, 0.0) / max(1, self.count)


class Learner:
    """Owns the optimiser; the model's tensors are shared with the engine."""

    def __init__(self, model: SplitModel, algorithm: Algorithm, settings: LearnerSettings, *, temperature: float, max_tokens: int) -> None:
        self.model = model
        self._algorithm = algorithm
        self._settings = settings
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._parameters = [p for p in model.model.parameters() if p.requires_grad]
        assert settings.learning_rate is not None  # filled in when the settings were resolved
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=settings.learning_rate, betas=(settings.beta1, settings.beta2), weight_decay=settings.weight_decay
        )

    def update(self, batch: Batch, order: Tensor, loss_scale: float) -> dict[str, float]:
        """Train on the batch in the given row order; returns the "update/" metrics."""
        totals, losses, norms, num_skipped = TokenTotals(), [], [], 0
        mismatch: float | None = None
        for minibatch in batch.minibatches(order, self._settings.update_batch):
            before = TokenTotals()
            loss = sum(self._backward(minibatch, loss_scale, before))
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.max_grad_norm))
            if math.isfinite(norm) and before.is_finite:
                self.optimizer.step()
                norms.append(norm)
                losses.append(loss)
                mismatch = before.mean("mismatch") if mismatch is None else mismatch
                self._merge(totals, before)
            else:  # counted, and kept out of the step's numbers, which must be finite
                num_skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
        return {
            "loss": sum(losses) / max(1, len(losses)),
            "policy_loss": totals.mean("policy_loss"),
            "entropy": totals.mean("entropy"),
            "ratio_mean": totals.mean("ratio"),
            "ratio_max": totals.ratio_max,
            "clip_low": totals.mean("clip_low"),
            "clip_high": totals.mean("clip_high"),
            "kl_sampled": totals.mean("kl"),
            "mismatch": mismatch or 0.0,
            "grad_norm": sum(norms) / max(1, len(norms)),
            "learning_rate": float(self.optimizer.param_groups[0]["lr"]),
            "num_updates": len(norms),
            "nonfinite": num_skipped,
            "tokens_trained": totals.count,
        }

    def _backward(self, minibatch: Batch, loss_scale: float, totals: TokenTotals) -> Iterator[float]:
        """Accumulate the gradient of one minibatch; yields the loss of each micro-batch."""
        algorithm = self._algorithm
        weights_BT = token_weights(minibatch.loss_mask_BT, algorithm.aggregation, self._max_tokens)
        for index, micro in minibatch.microbatches(self._settings.micro_tokens):
            mask_BT = micro.loss_mask_BT
            sampled_N, advantages_N = micro.logprobs_BT[mask_BT], micro.advantages_BT[mask_BT]
            weights_N = weights_BT[index][:, : mask_BT.shape[1]][mask_BT]
            logprobs_N, entropy_N = token_logprobs(self.model, micro.ids_BT, mask_BT, self._temperature)
            policy = clipped_policy_loss(logprobs_N, sampled_N, advantages_N, algorithm.clip_low, algorithm.clip_high)
            loss = loss_scale * (weights_N * (policy.loss_N - algorithm.entropy_coef * entropy_N)).sum()
            loss.backward()
            totals.add(
                len(logprobs_N),
                policy_loss=policy.loss_N,
                entropy=entropy_N,
                ratio=policy.ratio_N,
                clip_low=policy.clipped_low_N,
                clip_high=policy.clipped_high_N,
                kl=k3_divergence(logprobs_N, sampled_N),
                mismatch=(logprobs_N - sampled_N).abs(),
            )
            totals.ratio_max = max(totals.ratio_max, float(policy.ratio_N.max()))
            yield float(loss.detach())

    @staticmethod
    def _merge(totals: TokenTotals, part: TokenTotals) -> None:
        totals.count += part.count
        totals.ratio_max = max(totals.ratio_max, part.ratio_max)
        for name, value in part.sums.items():
            totals.sums[name] = totals.sums.get(name, 0.0) + value
