"""What an update is made of: the gradients of task, KL and entropy, prompt bucket by prompt bucket (paper, section 3 and appendix H).

A bucket is treated as a minibatch of its own. Its loss is algorithms/objective.py, the one the learner trains on (same log-probs, clips,
coefficients and token weights), so norms of equal-sized buckets compare. The three terms enter with their coefficients; a term that is not in the loss (no
reference, KL in the reward, a coefficient of 0) has gradient zero and is flagged absent. `total` is the sum of the terms, of the bucket or
of the whole batch.

Signal and noise come from halves of every prompt (buckets.py): g_i is the task gradient of half i as if it were the minibatch.

The bound of theorem H.2, |g| <= sqrt(RV) sqrt(E|s|^2), is about A = R - mean(R) of the group, not divided by a standard deviation, every
trajectory weighing the same, on samples of the policy itself; s is the gradient of the log-prob of a whole trajectory. With means over the
N trajectories of a bucket, g = mean(A s) and RV = mean(A^2) (divided by N, so no larger than the filters' G - 1), it is Cauchy-Schwarz for
any N vectors: it holds to rounding whatever the samples, and how much of it is used (`tightness`) is the news. It does not bound the
gradient of an algorithm that divides by the standard deviation: there A^2 has mean 1 wherever rewards differ at all.

Nothing is written to the model: gradients are returned by autograd and summed in float32 (or better), `.grad` and the optimiser are not
touched, and which parameters require gradients is as before afterwards. Beside what autograd returns, at most six vectors of the size of the
chosen parameters are held at a time: the batch's total, the three terms of one bucket and the task gradients of its halves.
"""

import difflib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tether.algorithms.batch import Batch
from tether.algorithms.objective import TASK, active_terms, loss_terms, token_weights
from tether.algorithms.objective import TERMS as REGULARISERS
from tether.algorithms.presets import Algorithm
from tether.core.errors import BadInput, DivergedModel, UnknownName
from tether.core.protocols import Communicator, SingleProcess
from tether.diagnostics.buckets import NUM_BUCKETS, Agreement, Bucket, SignalNoise, Vector, dot, split_halves, variance_buckets
from tether.models.hardware import memory_boundary
from tether.models.logprobs import MicroBatchTokens, cut_batch, forward, logprobs_and_entropy
from tether.models.policy import Policy
from tether.models.probing import evaluating

ALL, LAST = "all", "last"
NO_MEMORY = "lower learner.micro_tokens or diagnosis.gradients.prompts"
ROUNDING = 1e-4
"""By what share rounding may push a gradient over its bound."""

TERMS = (TASK, *REGULARISERS)
"""Every term that a loss can have; norms and cosines are reported for task, kl and entropy, further terms count as regularisers."""


@dataclass(frozen=True, slots=True)
class Cosines:
    """Of the gradient of each term with another gradient; None where one of the two is zero."""

    task: float | None
    kl: float | None
    entropy: float | None


@dataclass(frozen=True, slots=True)
class Bound:
    """Theorem H.2 on the trajectories of a bucket, with A = R - mean(R) and no weighting by length."""

    gradient_norm: float
    """|mean(A s)|."""
    reward_variance: float
    """mean(A^2) over the trajectories of the bucket."""
    mean_square_score: float
    """mean(|s|^2)."""

    @property
    def limit(self) -> float:
        return math.sqrt(self.reward_variance * self.mean_square_score)

    @property
    def holds(self) -> bool:
        return self.gradient_norm <= self.limit * (1 + ROUNDING)

    @property
    def tightness(self) -> float:
        """The share of the bound that is used; 0 where rewards do not vary."""
        return self.gradient_norm / self.limit if self.limit > 0 else 0.0


@dataclass(frozen=True, slots=True)
class BucketGradients:
    """The gradients of one bucket as numbers."""

    bucket: Bucket
    num_trajectories: int
    num_tokens: int
    """Tokens in the loss."""
    task_norm: float
    kl_norm: float
    entropy_norm: float
    regulariser_norm: float
    """Of KL and entropy together."""
    total_norm: float
    with_bucket: Cosines
    """With the total of the bucket."""
    with_batch: Cosines
    """With the total of the whole batch."""
    task_with_regulariser: float | None
    """Cosine."""
    halves: SignalNoise | None
    """None where no prompt has two members."""
    bound: Bound | None
    """None where it was not asked for."""

    @property
    def dominance(self) -> float | None:
        """|g_reg| / (|g_task| + |g_reg|): 1 where regularisation alone moves the policy; None where nothing does."""
        both = self.task_norm + self.regulariser_norm
        return self.regulariser_norm / both if both > 0 else None

    @property
    def snr(self) -> float | None:
        return None if self.halves is None else self.halves.snr

    @property
    def snr_regularised(self) -> float | None:
        """|signal| / (|task noise| + |g_reg|), the SNR of section 3.2; None where there are no halves or nothing to divide by."""
        if self.halves is None:
            return None
        against = math.sqrt(self.halves.noise) + self.regulariser_norm
        return math.sqrt(max(0.0, self.halves.signal)) / against if against > 0 else None


@dataclass(frozen=True, slots=True)
class GradientDecomposition:
    """The buckets of a batch, lowest reward variance first."""

    buckets: tuple[BucketGradients, ...]
    total_norm: float
    """Of the whole batch."""
    has_kl: bool
    has_entropy: bool
    num_parameters: int
    """Numbers that were differentiated by."""


def decompose_gradients(
    policy: Policy,
    batch: Batch,
    algorithm: Algorithm,
    variances: Mapping[int, float],
    *,
    temperature: float,
    micro_tokens: int,
    max_tokens: int | None = None,
    parameters: str | Sequence[str] = ALL,
    num_buckets: int = NUM_BUCKETS,
    with_bound: bool = True,
    seed: int = 0,
    ranks: Communicator | None = None,
) -> GradientDecomposition:
    """Decompose the gradient of a batch's loss over buckets of prompts. The model and its optimiser are left as they are.

    Args:
        policy: the model that sampled the batch.
        batch: with advantages, and reference log-probs if there is a reference.
        algorithm: how losses are formed from it.
        variances: the reward variance of every group of the batch, by its id; others are ignored.
        temperature: of sampling.
        micro_tokens: padded tokens that go through the model at once; changes memory and speed, not the numbers.
        max_tokens: the length that an algorithm with `constant_length` divides by; others do not ask.
        parameters: "all" that are trainable, those of the "last" layer and the norm after it (cheap), or names of parameters or modules.
        num_buckets: at most; every bucket holds at least one prompt.
        with_bound: check theorem H.2, at the price of a backward pass per trajectory.
        seed: of the halves.
        ranks: share the buckets; each computes the batch's total for itself. By default there is one.
    """
    if batch.advantages_BT is None or not len(batch):
        raise BadInput("gradients need a batch of at least one trajectory, with its advantages; estimate them first")
    if algorithm.constant_length and max_tokens is None:
        raise BadInput(f"algorithm '{algorithm.name}' divides by the token budget of a response; give max_tokens")
    groups = list(dict.fromkeys(int(group) for group in batch.groups_B.tolist()))
    unknown = [group for group in groups if group not in variances]
    if unknown:
        raise BadInput(f"no reward variance was given for group {unknown[0]}; give one for every group of the batch")
    buckets = variance_buckets({group: variances[group] for group in groups}, num_buckets)
    chosen = choose_parameters(policy.module, parameters)
    loss = _Loss(policy, algorithm, temperature, micro_tokens, max_tokens or 1, chosen)
    ranks = ranks or SingleProcess()

    def own_buckets() -> tuple[float, dict[int, BucketGradients]]:
        with (
            evaluating(policy.module),
            torch.enable_grad(),
            _differentiating(policy.module, chosen),
            memory_boundary("gradients", NO_MEMORY),
        ):
            total = loss.zeros()
            loss.add(batch, loss.weights(batch), {"total": total})
            own = range(ranks.rank, len(buckets), ranks.size)
            rows = {number: _decompose_bucket(loss, batch, buckets[number], total, with_bound, seed) for number in own}
            return math.sqrt(dot(total, total)), rows

    parts = ranks.share(own_buckets)
    found = {number: row for _, rows in parts for number, row in rows.items()}
    terms, num_parameters = loss.terms(batch), sum(parameter.numel() for parameter in chosen)
    ordered = tuple(found[number] for number in range(len(buckets)))
    return GradientDecomposition(ordered, parts[0][0], "kl" in terms, "entropy" in terms, num_parameters)


def gradient_metrics(found: GradientDecomposition) -> dict[str, float]:
    """The "gradients/" metrics of a decomposition; what could not be measured is left out."""
    values: dict[str, float] = {"failed": 0}
    for number, row in enumerate(found.buckets, start=1):
        named: dict[str, float | None] = {
            "rv_mean": row.bucket.rv_mean,
            **{name: getattr(row, name) for name in ("task_norm", "kl_norm", "entropy_norm", "regulariser_norm", "dominance")},
            **{f"{term}_cosine": getattr(row.with_batch, term) for term in ("task", "kl", "entropy")},
            "task_with_regulariser": row.task_with_regulariser,
            "snr": row.snr,
            "bound_used": row.bound.tightness if row.bound else None,
        }
        values.update({f"{name}_{number}": value for name, value in named.items() if value is not None and np.isfinite(value)})
    bounds = [row.bound for row in found.buckets if row.bound is not None]
    return {**values, "bound_broken": sum(not bound.holds for bound in bounds)} if bounds else values


def agreement(exact: GradientDecomposition, cheap: GradientDecomposition) -> dict[str, Agreement]:
    """How well the cheap mode tells what the exact one does, for task_norm, regulariser_norm, dominance and snr.

    Norms over some of the parameters are smaller; what counts is that they are smaller by the same factor in every bucket.
    """
    if [row.bucket for row in exact.buckets] != [row.bucket for row in cheap.buckets]:
        raise BadInput("the two decompositions have other buckets; take both on the same batch")
    return {
        name: Agreement.between([getattr(row, name) for row in exact.buckets], [getattr(row, name) for row in cheap.buckets])
        for name in ("task_norm", "regulariser_norm", "dominance", "snr")
    }


def choose_parameters(model: PreTrainedModel, which: str | Sequence[str]) -> list[torch.nn.Parameter]:
    """The trainable parameters of a choice; with adapters (LoRA) only those are trainable."""
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    if not trainable:
        raise BadInput("no parameter of the model requires a gradient; unfreeze some, or add adapters")
    if which == ALL:
        return list(trainable.values())
    if which == LAST:
        return _last_layer(trainable)
    chosen: dict[str, torch.nn.Parameter] = {}
    for wanted in [which] if isinstance(which, str) else which:
        found = {name: parameter for name, parameter in trainable.items() if name == wanted or name.startswith(f"{wanted}.")}
        if not found:
            near = difflib.get_close_matches(wanted, [ALL, LAST, *trainable], n=1)
            hint = f"did you mean '{near[0]}'?" if near else "take 'all', 'last', or names out of model.named_parameters()"
            raise UnknownName(f"no trainable parameters are named '{wanted}': {hint}")
        chosen |= found
    if not chosen:
        raise BadInput("the list of parameters is empty; take 'all', 'last', or names out of model.named_parameters()")
    return list(chosen.values())


def _last_layer(trainable: Mapping[str, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """The layer of the highest number and the norm after it, not the language head, which is as large as many layers."""
    numbers = [int(found[1]) if (found := re.search(r"\.(\d+)\.", name)) else None for name in trainable]
    last = max((number for number in numbers if number is not None), default=None)
    if last is None:
        raise BadInput("the model does not number its layers, so there is no 'last'; name the parameters")
    after = list(zip(numbers, trainable.values(), strict=True))[numbers.index(last) :]
    return [parameter for number, parameter in after if number == last or (number is None and parameter.ndim == 1)]


@contextmanager
def _differentiating(model: PreTrainedModel, chosen: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Only the chosen parameters require gradients inside the block: nothing is kept for a backward pass through the others."""
    wanted = {id(parameter) for parameter in chosen}
    others = [parameter for parameter in model.parameters() if parameter.requires_grad and id(parameter) not in wanted]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The policy's loss as the learner forms it, and its gradient by some parameters."""

    policy: Policy
    algorithm: Algorithm
    temperature: float
    micro_tokens: int
    max_tokens: int
    parameters: Sequence[torch.nn.Parameter]

    def terms(self, batch: Batch) -> tuple[str, ...]:
        """The terms that are in the loss."""
        return active_terms(self.algorithm, has_reference=batch.reference_BT is not None)

    def weights(self, batch: Batch) -> Tensor:
        return token_weights(self.algorithm, batch.loss_mask_BT, batch.trajectory_index_B, self.max_tokens)

    def zeros(self) -> list[Tensor]:
        return [torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32), requires_grad=False) for p in self.parameters]

    def add(self, batch: Batch, weights_BT: Tensor, into: Mapping[str, Vector]) -> None:
        """Add the gradient of sum(weight * loss) to the vector of the loss's name: a term, their "total", or the "score"."""
        for micro in cut_batch(self.policy, batch.ids_BT, batch.lengths_B, self.micro_tokens):
            part = MicroBatchTokens.select(batch, micro, self.policy.device)
            chosen = forward(self.policy, batch.ids_BT, batch.loss_mask_BT, micro)
            logprobs_N, entropy_N = logprobs_and_entropy(self.policy, *chosen, self.temperature)
            found = loss_terms(self.algorithm, part.policy_tokens(self.algorithm, logprobs_N, entropy_N))
            losses = {**found.terms, "total": found.total_N, "score": logprobs_N}  # the gradient of the log-prob itself is the score
            wanted = [name for name in into if name in losses]
            for name in wanted:
                weighted = (part.gather(weights_BT) * losses[name]).sum()
                gradients = torch.autograd.grad(weighted, list(self.parameters), retain_graph=name != wanted[-1], materialize_grads=True)
                for whole, gradient in zip(into[name], gradients, strict=True):
                    whole.add_(gradient)


def _decompose_bucket(loss: _Loss, batch: Batch, bucket: Bucket, batch_total: Vector, with_bound: bool, seed: int) -> BucketGradients:
    own = batch.trajectories(
        batch.trajectory_index_B[torch.isin(batch.groups_B, torch.tensor(bucket.groups, device=batch.groups_B.device))]
    )
    bound = _check_bound(loss, own) if with_bound else None  # first: its vectors are gone when the others come
    vectors = {term: loss.zeros() for term in loss.terms(own)}
    halves = _add_halves(loss, own, vectors, seed)
    known, names = {**vectors, "batch": batch_total}, (*TERMS, "batch")
    dots = [[dot(known[one], known[other]) if {one, other} <= known.keys() else 0.0 for other in names] for one in names]
    products = torch.tensor(dots, dtype=torch.float64)  # of the terms and the batch's total with one another; an absent term is zero
    if not bool(products.isfinite().all()):
        raise DivergedModel(f"the gradients of groups {bucket.groups} are not finite; look at the batch's log-probs and at the weights")
    return _measure(bucket, own, products, halves, bound)


def _add_halves(loss: _Loss, own: Batch, into: Mapping[str, Vector], seed: int) -> SignalNoise | None:
    """Add the gradients of a bucket's terms, half by half, and compare the halves' task gradients."""
    weights_BT = loss.weights(own)
    halves = split_halves(own.episodes().groups_R.tolist(), seed)
    estimates: list[Vector] = []
    shares: list[float] = []
    for members in (halves.first, halves.second, halves.left_over):
        rows = torch.isin(own.trajectory_index_B, torch.tensor(members, dtype=torch.long, device=own.trajectory_index_B.device)).nonzero()[
            :, 0
        ]
        if not len(rows):
            continue
        part = own.rows(rows)
        part_weights_BT = weights_BT[rows][:, : part.ids_BT.shape[1]]
        if members is halves.left_over:  # in the task gradient, but in neither half
            loss.add(part, part_weights_BT, into)
            continue
        task = loss.zeros()
        loss.add(part, part_weights_BT, {**into, "task": task})
        # A half that were the minibatch would give its tokens larger weights, by one over this.
        share = float(part_weights_BT.sum() / loss.weights(part).sum().clamp(min=torch.finfo(torch.float32).tiny))
        for whole, piece in zip(into["task"], task, strict=True):
            whole.add_(piece)
            piece.div_(share or 1.0)
        estimates.append(task)
        shares.append(share)
    return SignalNoise.from_halves(estimates[0], estimates[1], shares[0], shares[1]) if shares and all(shares) else None


def _measure(bucket: Bucket, own: Batch, products: Tensor, halves: SignalNoise | None, bound: Bound | None) -> BucketGradients:
    """Norms and cosines of sums of vectors, from the inner products of the vectors."""
    unit = dict(zip((*TERMS, "batch"), torch.eye(len(TERMS) + 1, dtype=torch.float64), strict=True))
    task, kl, entropy, batch_total = (unit[name] for name in (TASK, "kl", "entropy", "batch"))
    regulariser = torch.stack([unit[name] for name in REGULARISERS]).sum(dim=0)
    total = task + regulariser

    def norm(one: Tensor) -> float:
        return math.sqrt(max(0.0, float(one @ products @ one)))

    def cosine(one: Tensor, other: Tensor) -> float | None:
        lengths = norm(one) * norm(other)
        return max(-1.0, min(1.0, float(one @ products @ other) / lengths)) if lengths > 0 else None

    return BucketGradients(
        bucket=bucket,
        num_trajectories=own.num_trajectories,
        num_tokens=int(own.loss_mask_BT.sum()),
        task_norm=norm(task),
        kl_norm=norm(kl),
        entropy_norm=norm(entropy),
        regulariser_norm=norm(regulariser),
        total_norm=norm(total),
        with_bucket=Cosines(cosine(task, total), cosine(kl, total), cosine(entropy, total)),
        with_batch=Cosines(cosine(task, batch_total), cosine(kl, batch_total), cosine(entropy, batch_total)),
        task_with_regulariser=cosine(task, regulariser),
        halves=halves,
        bound=bound,
    )


def _check_bound(loss: _Loss, own: Batch) -> Bound:
    """Theorem H.2, with the score of every trajectory computed by itself."""
    episodes = own.episodes()
    rewards_R = episodes.rewards_RT.sum(dim=1)
    _, group_R = torch.unique(episodes.groups_R, return_inverse=True)
    sizes = torch.bincount(group_R)
    means = torch.zeros(len(sizes), dtype=torch.float64, device=rewards_R.device).index_add_(0, group_R, rewards_R) / sizes
    advantages_R = rewards_R - means[group_R]
    count = own.num_trajectories
    gradient, square_scores = loss.zeros(), 0.0
    for trajectory in range(count):
        rows = (own.trajectory_index_B == trajectory).nonzero()[:, 0]
        part, score = own.rows(rows), loss.zeros()
        loss.add(part, part.loss_mask_BT.float(), {"score": score})
        square_scores += dot(score, score)
        for whole, piece in zip(gradient, score, strict=True):
            whole.add_(piece, alpha=float(advantages_R[trajectory]) / count)
    return Bound(math.sqrt(dot(gradient, gradient)), float(advantages_R.square().mean()), square_scores / count)
