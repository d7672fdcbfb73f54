"""The learner: a batch in, the optimiser updates of one step done, the numbers about them out.

A minibatch of `update_batch` trajectories makes one update. It is cut into micro-batches by token budget; the weight of every token is
fixed for the whole minibatch before that, so the gradient does not depend on the cut. The loss is algorithms/objective.py. Log-probs are
taken at the sampling temperature, like the behavior log-probs they are compared with. An algorithm with a critic trains it on the same
minibatches: a critic with its own backbone has its own optimiser, on a shared backbone its loss is added to the policy's. An update whose
gradient is not finite changes nothing and is counted. A minibatch that runs out of memory is repeated in smaller parts
(training/memory.py).

The batch is cut on the host, and a step waits for the device once, at its end: what was seen is read then, and whether an update is left out is
decided on the device.

Several ranks cut a minibatch alike and deal the micro-batches out by tokens. The weights of tokens are those of the whole minibatch, so the sum
of the ranks' gradients is the gradient of one rank. What was counted is combined before anything is decided: all ranks skip an update, or
repeat it in smaller parts, together.

With learner.sharding=fsdp the gradient is computed on a divided copy of the policy, or on the policy itself where no rank holds it whole
(training/distributed/fsdp.py). Every pass is then an exchange: ranks with fewer micro-batches than others repeat one with a loss of zero,
and a rank that runs out of memory ends the run.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms.batch import Batch
from tether.algorithms.objective import clipped_value_loss, loss_terms, reported, token_mean, token_weights
from tether.algorithms.presets import Algorithm
from tether.core.errors import OutOfMemory, RankFailure
from tether.models.critic import Critic
from tether.models.hardware import forget_failed, memory_boundary
from tether.models.logprobs import AnyMicroBatch, MicroBatchTokens, Selected, cut_batch, forward, logprobs_and_entropy
from tether.models.policy import Policy
from tether.models.recorded import RecordedPasses
from tether.training.distributed.ranks import Ranks, balanced
from tether.training.memory import MicroBudget
from tether.training.optim import FP32MasterAdamW
from tether.training.settings import CriticSettings, LearnerSettings
from tether.training.totals import TokenTotals, UpdateWork, update_metrics

if TYPE_CHECKING:
    from tether.training.distributed.fsdp import ShardedAdamW, ShardedModel


@dataclass(frozen=True, slots=True)
class Rates:
    """The learning rates of a step; with a policy rate of 0 only the critic learns (on a shared backbone: its head)."""

    policy: float
    critic: float = 0.0


class Update(NamedTuple):
    """An update that was launched; its numbers are on the device."""

    part: TokenTotals
    norms: dict[str, Tensor]
    """Of the gradients, by optimiser."""
    finite: Tensor


class Learner:
    """Owns the optimisers; the policy's tensors are shared with the engine."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        settings: LearnerSettings,
        *,
        temperature: float,
        max_tokens: int,
        critic: Critic | None = None,
        critic_settings: CriticSettings | None = None,
        dtype: torch.dtype | None = None,
        ranks: Ranks | None = None,
        records: bool = True,
    ) -> None:
        """`dtype` is what policy and critic compute in, None as they are; `ranks` share the work, by default there is one. `records`: small passes may be
        recorded, while which no other thread may wait for the card."""
        self.policy, self.critic = policy, critic
        self.ranks = ranks or Ranks()
        self._algorithm, self._settings, self._temperature = algorithm, settings, temperature
        self._critic_settings = critic_settings or CriticSettings()
        self._max_tokens = max_tokens
        self._sharded: dict[str, ShardedModel] = {}
        """The models that are trained in their divided form, with learner.sharding=fsdp on several ranks."""
        self._optimizers: dict[str, FP32MasterAdamW | ShardedAdamW] = {}
        parameters = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
        self._add_optimizer("policy", parameters, dtype, policy)
        if critic is not None:
            # An optimiser of its own: the head computes in float32 whatever its backbone does.
            self._add_optimizer("head", list(critic.head.parameters()), None)
            if not critic.shared:
                self._add_optimizer("critic", critic.backbone_parameters(), dtype, critic.policy)
        self._policies = [policy] if critic is None or critic.shared else [policy, critic.policy]
        self._passes = {
            name: RecordedPasses(model, optimizer.keep_gradients)
            for name, model in zip(("policy", "critic"), self._policies, strict=False)
            if isinstance(optimizer := self._optimizers[name], FP32MasterAdamW) and self.ranks.size == 1 and settings.packing and records
        }
        self._budget = MicroBudget(settings.micro_tokens, settings.gradient_checkpointing)
        self.nonfinite_streak = 0
        """How many updates in a row were left out by now."""
        self.updates_applied = 0
        """How many updates of the latest step have changed the weights, also where the step then failed."""
        self.work = UpdateWork(0, 0, 0)
        """What the latest step put through the policy."""

    def _add_optimizer(
        self, name: str, parameters: list[torch.nn.Parameter], dtype: torch.dtype | None, model: Policy | None = None
    ) -> None:
        """An optimiser for some parameters, of a model that may be divided or of none."""
        chosen, sharded = self._settings, None
        if model is not None and chosen.sharding == "fsdp" and self.ranks.size > 1:
            from tether.training.distributed.fsdp import ShardedAdamW, ShardedModel

            assert model.divided is None or isinstance(model.divided, ShardedModel)  # there is no other
            sharded = self._sharded[name] = model.divided or ShardedModel.beside(model, dtype, self.ranks)
        common: dict[str, Any] = {
            "learning_rate": 0.0,  # set for every step
            "beta1": chosen.beta1,
            "beta2": chosen.beta2,
            "weight_decay": chosen.weight_decay,
            "ranks": self.ranks,
        }
        self._optimizers[name] = (
            FP32MasterAdamW(parameters, compute_dtype=dtype, **common) if sharded is None else ShardedAdamW(sharded, parameters, **common)
        )

    def warm_up(self) -> None:
        """Compile the kernels of an update, which it would do one after the other."""
        for policy in self._policies:
            backbone = policy.backbone if policy.device.type == "cuda" and policy.linear_head is not None else None
            if backbone is not None and not backbone.through_modules:
                from tether.models.fast.kernels.warm_up import warm_up_gradients

                warm_up_gradients(backbone)

    def update(self, batch: Batch, orders: Sequence[Tensor], loss_scale: float, rates: Rates) -> dict[str, float]:
        """Train on the batch, once per order of its trajectories; returns the "update/" metrics."""
        for name, optimizer in self._optimizers.items():
            optimizer.set_rate(rates.policy if name == "policy" else rates.critic)
        batch, orders = batch.to("cpu"), [order.cpu() for order in orders]  # cut there, without waiting for the device
        made: list[Update] = []
        self.updates_applied, self._budget.retries, self.work = 0, 0, UpdateWork(0, 0, 0)
        to_come = sum(optimizer.bytes_to_come for optimizer in self._optimizers.values())
        self._budget.decide(self._policies, to_come, self._settings.packing, self.ranks)
        for minibatch in (b for order in orders for b in batch.minibatches(order, self._settings.update_batch)):
            part = self._gradient(minibatch, loss_scale if rates.policy else 0.0)
            self.work = UpdateWork(*(sum(pair) for pair in zip(self.work, part.work, strict=True)))
            made.append(self._step(part, policy_learns=rates.policy > 0))
        for sharded in self._sharded.values():
            sharded.publish()
        totals = self._settled(made)
        mismatch = (made[0].part if made else totals).mismatch
        return {
            **update_metrics(totals, mismatch, rates.policy, self.nonfinite_streak),
            "micro_tokens": self._budget.tokens,
            "recompute": int(self._budget.recompute),
            "memory_retries": self._budget.retries,
        }

    def state(self) -> dict[str, object]:
        """What a checkpoint must keep beside the policy's weights; complete on rank 0."""
        return {
            "optimizers": {name: optimizer.state_dict() for name, optimizer in self._optimizers.items()},
            "critic": self.critic.state() if self.critic else {},
            "nonfinite_streak": self.nonfinite_streak,
        }

    def saved_sizes(self) -> list[int]:
        """Bytes of each storage that a checkpoint holds, the small ones aside."""
        return [size for optimizer in self._optimizers.values() for size in optimizer.saved_sizes()]

    def restore(self, state: dict[str, object]) -> None:
        """Take back what `state` gave; a KeyError or ValueError says that it is of another learner."""
        optimizers, critic, streak = state["optimizers"], state["critic"], state["nonfinite_streak"]
        if not isinstance(optimizers, dict) or not isinstance(critic, dict) or not isinstance(streak, int):
            raise ValueError("the learner's state has another form")
        if self.critic is not None:
            self.critic.restore(critic)
        for name, optimizer in self._optimizers.items():
            optimizer.load_state_dict(optimizers[name])
        self.nonfinite_streak = streak

    def take_notes(self) -> list[str]:
        """What is worth a line since this was asked last."""
        notes = [passes.failure for passes in self._passes.values() if passes.failure]
        for passes in self._passes.values():
            passes.failure = ""
        return notes

    @property
    def micro_tokens(self) -> int:
        """Tokens that go through the model at once, by now."""
        return self._budget.tokens

    @contextmanager
    def full_precision(self) -> Iterator[None]:
        """Inside the block the policy's parameters hold their float32 master weights."""
        with self._optimizers["policy"].full_precision():
            yield

    def whole_model(self) -> PreTrainedModel | None:
        """The policy's model as it computes, to be saved. Where no rank holds it, it is gathered in the first one's host memory, and the others have
        None. All ranks call it."""
        sharded = self._sharded.get("policy")
        if sharded is None or not sharded.is_alone:
            return self.policy.module
        weights = sharded.gathered(sharded.dtype)
        return None if weights is None else sharded.filled(weights)

    def _gradient(self, minibatch: Batch, loss_scale: float) -> TokenTotals:
        """Accumulate the gradient of one minibatch, in smaller parts where memory asks for it; returns what all ranks saw."""
        part, remedy = TokenTotals(), "lower learner.micro_tokens"
        if self._sharded:  # every pass is an exchange: a rank that fails in it ends the run, because the others wait for its part
            remedy += f" (now {self._budget.tokens}), and continue with --resume"
            with self.ranks.exchanging("the update"), memory_boundary("update", remedy, RankFailure):
                self._backward(minibatch, loss_scale, part)
            return TokenTotals.combined(self.ranks.all_gather(part))

        def own_part() -> TokenTotals:
            part = TokenTotals()
            with memory_boundary("update", remedy):
                self._backward(minibatch, loss_scale, part)
            return part  # of one rank it is read at the end of the step

        while True:
            failure = None
            try:
                return TokenTotals.combined(self.ranks.share(own_part))
            except OutOfMemory as error:
                failure = str(error.__cause__ or error)
            # Only here, where nothing refers to the failed pass any more, is its memory free.
            for passes in self._passes.values():
                passes.forget("memory ran out")
            for optimizer in self._optimizers.values():
                optimizer.zero_grad()
            forget_failed(self.policy.device)
            lengths = minibatch.lengths_B.tolist()
            if not self._budget.reduce(self._policies, lengths):
                applied = (
                    f"{self.updates_applied} of this step's updates had been applied" if self.updates_applied else "no weight was changed"
                )
                raise OutOfMemory(
                    f"out of memory in the update with {self._budget.tokens} tokens at a time, where the longest sequence has {max(lengths)}, and "
                    f"activations {'computed again' if self._budget.recompute else 'kept'} ({' '.join(failure.split())[:120]}); {applied}; "
                    "lower rollout.max_tokens or env.options.max_turns, train adapters (lora.rank), or take a smaller model"
                )

    def _cut(self, name: str, policy: Policy, minibatch: Batch) -> list[tuple[AnyMicroBatch, bool]]:
        """This rank's micro-batches, of those with something to learn from; False stands beside one that is another rank's, to be computed
        only because all ranks must make equally many passes through the model of this name."""
        cut = self._cut_by(policy, minibatch, self._budget.tokens)
        num_ranks = self.ranks.size
        if len(cut) < num_ranks:  # smaller ones, so that every rank has work
            cut = self._cut_by(policy, minibatch, -(-sum(micro.num_tokens for micro in cut) // num_ranks))
        learns_B = minibatch.loss_mask_BT.any(dim=1).tolist()
        micros = [micro for micro in cut if any(learns_B[row] for row in micro.index_M.tolist())]
        owners = balanced([micro.num_positions for micro in micros], num_ranks)
        own = [(micro, True) for micro, owner in zip(micros, owners, strict=True) if owner == self.ranks.rank]
        if name in self._sharded and micros:
            most = max(owners.count(rank) for rank in range(num_ranks))
            own += [(min(micros, key=lambda micro: micro.num_positions), False)] * (most - len(own))
        return own

    def _cut_by(self, policy: Policy, minibatch: Batch, max_tokens: int) -> list[AnyMicroBatch]:
        return cut_batch(
            policy,
            minibatch.ids_BT,
            minibatch.lengths_B,
            max_tokens,
            packing=self._settings.packing,
            share_prompts=self._settings.share_prompts,
        )

    def _backward(self, minibatch: Batch, loss_scale: float, totals: TokenTotals) -> None:
        """Accumulate the gradient of this rank's micro-batches of a minibatch; `totals` get what they saw."""
        weights_BT = token_weights(self._algorithm, minibatch.loss_mask_BT, minibatch.trajectory_index_B, self._max_tokens)
        value_weights_BT = token_mean(minibatch.loss_mask_BT, minibatch.trajectory_index_B, 1.0)
        for micro, is_own in self._cut("policy", self.policy, minibatch):
            counted = totals if is_own else TokenTotals()
            loss = self._computed("policy", partial(self._policy_loss, minibatch, micro, loss_scale, weights_BT, value_weights_BT, counted))
            (loss if is_own else 0.0 * loss).backward()
            counted.add_loss(loss)
            del loss  # and with it what led to it: a pass is recorded only where no other holds on to the weights
        if self.critic is not None and not self.critic.shared:
            for micro, is_own in self._cut("critic", self.critic.policy, minibatch):
                counted = totals if is_own else TokenTotals()
                loss = self._computed("critic", partial(self._critic_loss, minibatch, micro, value_weights_BT, counted))
                (loss if is_own else 0.0 * loss).backward()
                del loss
        if self.ranks.size > 1:
            totals.settle()

    def _computed(self, name: str, compute: Callable[[Policy], Tensor]) -> Tensor:
        """What `compute` makes of the model of this name, in its divided form where there is one."""
        if name in self._sharded:
            sharded = self._sharded[name]
            return sharded(lambda: compute(sharded.policy))
        return compute(self.policy if self.critic is None or name == "policy" else self.critic.policy)

    def _policy_loss(
        self,
        minibatch: Batch,
        micro: AnyMicroBatch,
        loss_scale: float,
        weights_BT: Tensor,
        value_weights_BT: Tensor,
        totals: TokenTotals,
        policy: Policy,
    ) -> Tensor:
        part = MicroBatchTokens.select(minibatch, micro, policy.device)
        selected = forward(
            policy,
            minibatch.ids_BT,
            minibatch.loss_mask_BT,
            micro,
            recompute=self._budget.recompute,
            passes=self._passes.get("policy"),
        )
        loss = loss_scale * (part.gather(weights_BT) * self.policy_losses(policy, selected, part, totals)).sum()
        totals.count_micro(len(selected.targets_N), micro.num_tokens, micro.num_positions, micro.num_saved, micro.num_pairs)
        if self.critic is not None and self.critic.shared:
            values_N: Tensor = self.critic.head(selected.features_ND)
            loss = loss + self._critic_settings.coef * (part.gather(value_weights_BT) * self._value_losses(values_N, part, totals)).sum()
        return loss

    def _critic_loss(self, minibatch: Batch, micro: AnyMicroBatch, weights_BT: Tensor, totals: TokenTotals, policy: Policy) -> Tensor:
        assert self.critic is not None
        part = MicroBatchTokens.select(minibatch, micro, policy.device)
        values_N = self.critic.micro_values(
            minibatch.ids_BT,
            minibatch.loss_mask_BT,
            micro,
            recompute=self._budget.recompute,
            policy=policy,
            passes=self._passes.get("critic"),
        )
        return (part.gather(weights_BT) * self._value_losses(values_N, part, totals)).sum()

    def policy_losses(self, policy: Policy, selected: Selected, part: MicroBatchTokens, totals: TokenTotals) -> Tensor:
        """The loss of every token, all terms together; another objective on the same engine overrides this (training/sft/trainer.py)."""
        logprobs_N, entropy_N = logprobs_and_entropy(policy, selected.features_ND, selected.targets_N, self._temperature)
        tokens = part.policy_tokens(self._algorithm, logprobs_N, entropy_N)
        losses = loss_terms(self._algorithm, tokens)
        log_ratio_N = logprobs_N.detach() - reported(logprobs_N.detach(), tokens.behavior_N)
        totals.add(**losses.metrics)
        totals.add_ratios(losses.policy.ratio_N)
        totals.add_mismatch(log_ratio_N)
        return losses.total_N

    def _value_losses(self, values_N: Tensor, part: MicroBatchTokens, totals: TokenTotals) -> Tensor:
        losses = clipped_value_loss(
            values_N, part.gather(part.batch.values_BT), part.gather(part.batch.returns_BT), self._critic_settings.value_clip
        )
        totals.add(value_loss=losses.loss_N, value_clip=losses.clipped_N)
        return losses.loss_N

    def _step(self, part: TokenTotals, *, policy_learns: bool) -> Update:
        """Update the weights by the gradient of a minibatch unless something is not finite, on all ranks alike."""
        norms = {name: optimizer.clip(self._settings.max_grad_norm) for name, optimizer in self._optimizers.items()}
        finite = torch.stack([part.finite(self.policy.device), *(norm.isfinite() for norm in norms.values())]).all()
        self.updates_applied += 1  # from here on: an optimiser that fails may have changed some weights
        for name, optimizer in self._optimizers.items():
            if name != "policy" or policy_learns:
                optimizer.step(finite)
        for optimizer in self._optimizers.values():
            optimizer.zero_grad()
        return Update(part, norms, finite)

    def _settled(self, made: Sequence[Update]) -> TokenTotals:
        """What the updates of a step saw; those that were left out are counted, and kept out of its numbers, which must be finite."""
        totals = TokenTotals()
        for part, norms, finite in made:
            part.settle()
            if bool(finite):
                self.nonfinite_streak, part.norms = 0, [{name: float(norm) for name, norm in norms.items()}]
                totals.merge(part)
            else:
                self.nonfinite_streak, self.updates_applied = self.nonfinite_streak + 1, self.updates_applied - 1
                totals.nonfinite += 1
        return totals
