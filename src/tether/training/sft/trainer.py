"""The supervised trainer: the learner of a run with another loss, the mean negative log-prob of the response tokens of a minibatch.

Everything else is the learner's: packed micro-batches, the head in parts, fp32 master weights, clipping, running out of memory. Each step
takes the next `update_batch` demonstrations of an order that is drawn anew for every pass over them. The held-out loss is measured before the
first step, every `evaluate_every` steps and after the last one; the weights with the lowest are kept on the CPU and are what is saved.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tether.algorithms.presets import Algorithm
from tether.core.errors import DivergedModel
from tether.core.seeding import generator
from tether.models.hardware import memory_boundary
from tether.models.logprobs import Selected, logprobs_and_entropy, token_logprobs
from tether.models.policy import Policy
from tether.rollout.pack import pack
from tether.training.interrupts import Interrupts
from tether.training.learner import Learner, MicroBatchTokens, Rates
from tether.training.optim import learning_rate
from tether.training.sft.demonstrations import Demonstration
from tether.training.sft.settings import SftLearnerSettings
from tether.training.totals import TokenTotals

TOKEN_MEAN = Algorithm(aggregation="token_mean")
"""Of an algorithm the supervised loss has the aggregation only: every response token of a minibatch has the same weight."""
MAX_NONFINITE = 10
"""Updates in a row that may be left out because their gradient is not finite."""
HELD_OUT_ROWS = 64
"""Demonstrations that are evaluated at a time."""

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and the losses in words."""


class SupervisedLearner(Learner):
    """A learner whose loss is the mean of -log p over the response tokens of a minibatch."""

    def __init__(self, policy: Policy, settings: SftLearnerSettings, dtype: torch.dtype | None) -> None:
        """`dtype`: what the model computes in; None leaves it, as for adapters."""
        super().__init__(policy, TOKEN_MEAN, settings.learner(), temperature=1.0, max_tokens=1, dtype=dtype)

    def policy_losses(self, policy: Policy, selected: Selected, part: MicroBatchTokens, totals: TokenTotals) -> Tensor:
        logprobs_N, _ = logprobs_and_entropy(policy, selected.features_ND, selected.targets_N, 1.0)
        totals.add(nll=-logprobs_N)
        return -logprobs_N

    def loss_of(self, demonstrations: Sequence[Demonstration]) -> float:
        """Mean of -log p over all response tokens, without gradient."""
        total, count = 0.0, 0
        for start in range(0, len(demonstrations), HELD_OUT_ROWS):
            batch = pack([each.trajectory for each in demonstrations[start : start + HELD_OUT_ROWS]], self.policy.device)
            with memory_boundary("held-out loss", "lower learner.micro_tokens"):
                logprobs_N = token_logprobs(
                    self.policy, batch.ids_BT, batch.loss_mask_BT, batch.lengths_B, 1.0, max_tokens=self.micro_tokens
                )
            total, count = total - float(logprobs_N.double().sum()), count + len(logprobs_N)
        return total / max(1, count)


@dataclass(slots=True)
class TrainingHistory:
    """How a training went."""

    steps: int = 0
    """Updates made."""
    tokens: int = 0
    """Response tokens trained on, each as often as it was."""
    losses: dict[int, float] = field(default_factory=dict)
    """Step to the loss of its minibatch, before the update."""
    held_out: dict[int, float] = field(default_factory=dict)
    """Step to the held-out loss after it."""
    stopped_early: bool = False

    @property
    def best_step(self) -> int:
        """The step whose weights are kept: the first with the lowest held-out loss, or the last where nothing was held out."""
        return min(self.held_out, key=lambda step: (self.held_out[step], step)) if self.held_out else self.steps

    def words(self) -> str:
        """The latest losses. Example: "loss 0.412, held out 0.398"."""
        latest = {"loss": self.losses, "held out": self.held_out}
        return ", ".join(f"{name} {losses[max(losses)]:.3f}" for name, losses in latest.items() if losses)


class SupervisedTrainer:
    """Trains a policy on demonstrations and remembers its best weights."""

    def __init__(self, policy: Policy, settings: SftLearnerSettings, *, rate: float, seed: int, dtype: torch.dtype | None) -> None:
        self.learner = SupervisedLearner(policy, settings, dtype)
        self.history = TrainingHistory()
        self._settings, self._rate, self._seed = settings, rate, seed
        self._trained = [parameter for parameter in policy.module.parameters() if parameter.requires_grad]
        self._best: list[Tensor] | None = None
        self._interrupts = Interrupts()

    def train(
        self,
        demonstrations: Sequence[Demonstration],
        steps: int,
        progress: Progress,
        *,
        held_out: Sequence[Demonstration] = (),
        evaluate_every: int = 1,
        patience: int = 1,
    ) -> None:
        """Make `steps` updates, or fewer where the held-out loss no longer falls.

        Ctrl-C is raised between updates, so weights are whole, and after their held-out loss was measured, so that they may be the best.
        """
        progress(0, steps, "")
        with self._interrupts.listening():
            if held_out:
                self._evaluate(held_out)
            try:
                for chosen in self._minibatches(demonstrations, steps):
                    with self._interrupts.shield():
                        self._update(chosen, steps)
                    if held_out and (self.history.steps % evaluate_every == 0 or self.history.steps == steps):
                        self._evaluate(held_out)
                    progress(self.history.steps, steps, self.history.words())
                    since_best = sum(step > self.history.best_step for step in self.history.held_out)
                    if held_out and since_best >= patience and self.history.steps < steps:
                        self.history.stopped_early = True
                        return
            except KeyboardInterrupt:
                if held_out and self.history.steps not in self.history.held_out:
                    self._evaluate(held_out)
                raise

    @contextmanager
    def best_weights(self) -> Iterator[None]:
        """Inside the block the policy holds its best weights in float32, to be saved; the training is over then."""
        with self.learner.full_precision(), torch.no_grad():
            if self._best is not None:
                for parameter, best in zip(self._trained, self._best, strict=True):
                    parameter.data.copy_(best)
            yield

    def _minibatches(self, demonstrations: Sequence[Demonstration], steps: int) -> Iterator[list[Demonstration]]:
        """The demonstrations of every step: pass after pass, each in an order of its own; the last of a pass may be fewer."""
        size, made, epoch = self._settings.update_batch, 0, 0
        while True:
            order = generator("sft-order", self._seed, epoch).permutation(len(demonstrations)).tolist()
            for start in range(0, len(order), size):
                if made == steps:
                    return
                yield [demonstrations[index] for index in order[start : start + size]]
                made += 1
            epoch += 1

    def _update(self, chosen: Sequence[Demonstration], steps: int) -> None:
        step, settings = self.history.steps + 1, self._settings
        warmup = max(1, round(settings.warmup_ratio * steps))
        rate = learning_rate(self._rate, step, steps, settings.schedule, warmup, settings.min_lr_ratio)
        batch = pack([each.trajectory for each in chosen], self.learner.policy.device)
        metrics = self.learner.update(batch, [torch.arange(batch.num_trajectories, device=batch.ids_BT.device)], 1.0, Rates(rate))
        if self.learner.nonfinite_streak >= MAX_NONFINITE:
            raise DivergedModel(f"the gradient was not finite in {MAX_NONFINITE} updates in a row; lower learner.learning_rate")
        self.history.steps = step
        if metrics["num_updates"]:
            self.history.losses[step] = metrics["nll"]
            self.history.tokens += int(metrics["tokens_trained"])

    def _evaluate(self, held_out: Sequence[Demonstration]) -> None:
        history = self.history
        loss = self.learner.loss_of(held_out)
        history.held_out[history.steps] = loss if math.isfinite(loss) else math.inf
        if history.best_step == history.steps:
            with self.learner.full_precision():
                self._best = [parameter.detach().to("cpu", copy=True) for parameter in self._trained]
