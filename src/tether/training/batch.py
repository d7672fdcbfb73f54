"""The batch of a step: sample prompts, filter them, sample more until the batch is full, and weight what was kept.

`Rollouts` samples it when its step begins, with the newest weights; async_rollouts.py samples it ahead.

Every round of a step samples new prompts. After each round the filter ranks all groups of the step together; where it keeps more than a
batch, the best of them are the batch. Strategy `all` ranks nothing: the first that were sampled are (DAPO, arXiv 2503.14476, algorithm 1).
Without refill there is one round, and the batch is what the filter keeps of it. A run that mixes environments ranks groups within their
environment, because rewards of different environments have different scales.

Reweighting and the trajectory-level filter come after the advantages and change none of their baselines.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.group_filter import GroupFilter
from tether.algorithms.filters.scores import sample_variance
from tether.algorithms.filters.select import Selection, extreme_members, groups_to_sample, variance_weights
from tether.core.types import Group
from tether.diagnostics.summary import group_summary
from tether.rollout.prompt_memory import PromptChooser, PromptMemory
from tether.rollout.sampler import Sampler, check_resets, training_plan
from tether.training.callbacks import Callback
from tether.training.settings import RunSettings
from tether.training.throughput import StepTimer

NOTHING = Selection(np.zeros(0, dtype=bool), [], [], {}, 0.0, 0, 0.0, 0.0, 0.0)
"""The selection of a step whose every episode errored."""


@dataclass(frozen=True, slots=True)
class FilterInputs:
    """What decides about the filter of a batch, besides its groups."""

    keep: float
    """The filter's share, which alarm actions may have changed."""
    ratios: tuple[float, ...]
    """`groups/rv_ratio` of the recent steps, for strategy `auto`."""

    def rules(self, settings: GroupFilter) -> GroupFilter:
        return settings.model_copy(update={"keep": self.keep})


@dataclass(frozen=True, slots=True)
class SampledBatch:
    """Everything a step sampled, and what the filter kept of it."""

    groups: list[Group]
    """Of all rounds."""
    first_round: list[Group]
    selection: Selection
    kept: list[Group]
    """The batch, in the order of sampling."""
    num_rounds: int
    num_wanted: int
    keep: float = 1.0
    """The share that the filter was told to keep."""

    @property
    def kept_ids(self) -> set[Hashable]:
        return {group.index for group in self.kept}

    @property
    def fill_ratio(self) -> float:
        """How full the batch is: kept groups / groups wanted. Without refill this is the kept ratio."""
        return len(self.kept) / self.num_wanted

    def metrics(self, tokens_batched: int) -> dict[str, float]:
        """The "groups/" metrics of the step; `tokens_batched` of its sampled tokens are in the batch."""
        return {
            **group_summary(self.groups, self.selection),
            "sampled": len(self.groups),
            "kept": len(self.kept),
            "kept_ratio": len(self.kept) / len(self.groups),
            "rounds": self.num_rounds,
            "tokens_discarded": sum(t.num_sampled for group in self.groups for t in group.trajectories) - tokens_batched,
        }


class Rollouts:
    """Samples the batch of each step when the step begins, and gives the engine the weights after each update."""

    def __init__(
        self, settings: RunSettings, sampler: Sampler, timer: StepTimer, callbacks: Callback, prompt_memory: PromptMemory | None = None
    ) -> None:
        self._settings, self._sampler, self._timer, self._callbacks = settings, sampler, timer, callbacks
        self._prompt_memory = prompt_memory

    def begin(self, step: int, state: str | None) -> None:
        """Give the engine the weights of the last complete step: a server may hold others. `state`: of a checkpoint, what `state` gave."""
        self._sampler.engine.sync(step)

    def sample(self, step: int, inputs: FilterInputs) -> SampledBatch:
        """Play new prompts until the filter has its batch."""
        settings, sampler, timer = self._settings, self._sampler, self._timer
        choose = self._chooser(step)

        def play(count: int, first: int) -> list[Group]:
            plan = training_plan(settings.seed, step, count, settings.rollout.group_size, first, sampler.pool.weights, choose)
            with timer.stage("rollout"):
                groups = sampler.collect(plan, settings.sampling())
            timer.count_engine(sampler.statistics)
            return groups if choose is None else choose.marked(groups)

        with timer.stage("select"):  # less the rollouts in it
            sampled = sample_batch(play, settings.rollout.num_groups, inputs.rules(settings.filter), inputs.ratios)
        check_resets(sampled.groups, f"step {step}")
        timer.count_rollout(sampled.groups)
        return sampled

    def _chooser(self, step: int) -> PromptChooser | None:
        """Of the prompts of a step, by what is known of them now."""
        return None if self._prompt_memory is None else self._prompt_memory.chooser(step)

    def prefetch(self, step: int, inputs: FilterInputs) -> None:
        """A step is complete: sample ahead what its weights are for."""

    def publish(self, step: int) -> dict[str, float]:
        """The update of a step is done: give the engine the new weights. Returns what that measured, for the "update/" metrics."""
        engine = self._sampler.engine
        if not engine.capabilities.shares_weights:
            self._callbacks.on_stage_begin("publish", 1)
        with nullcontext() if engine.capabilities.shares_weights else self._timer.stage("publish"):
            return engine.sync(step)

    def replace_weights(self, step: int) -> None:
        """Other weights took the place of those of the last complete step: a rollback."""
        self._sampler.engine.sync(step)

    def settle(self, step: int) -> None:
        """Before the engine is used for anything but the batches of steps: it must be free, and hold the weights after this step."""

    def state(self, step: int) -> dict[str, str]:
        """For the checkpoint of a step: what was sampled for later ones."""
        return {}

    def is_busy(self, step: int) -> bool:
        """Whether `state` would have to wait."""
        return False

    def close(self) -> None:
        """End what runs beside the trainer."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def sample_batch(
    sample: Callable[[int, int], list[Group]], num_groups: int, rules: GroupFilter, earlier_ratios: Sequence[float] = ()
) -> SampledBatch:
    """Sample the batch of a step.

    Args:
        sample: plays new prompts: how many, and the index of the first.
        num_groups: how many the batch should hold.
        rules: the filter, and how many rounds of refill it may take.
        earlier_ratios: `groups/rv_ratio` of the recent steps, for strategy `auto`.
    """
    groups = first = sample(num_groups, 0)
    selection = select(groups, rules, earlier_ratios)
    num_rounds = 1
    while num_rounds <= rules.refill and (more := groups_to_sample(len(selection.kept), len(groups), num_groups)):
        groups = [*groups, *sample(more, len(groups))]
        selection = select(groups, rules, earlier_ratios)
        num_rounds += 1
    return _batch(groups, len(first), selection, num_rounds, num_groups, rules)


def selected_again(
    groups: list[Group], num_first: int, num_rounds: int, num_groups: int, rules: GroupFilter, earlier_ratios: Sequence[float]
) -> SampledBatch:
    """The batch of groups that `sample_batch` sampled before, in so many rounds, `num_first` of them in the first."""
    return _batch(groups, num_first, select(groups, rules, earlier_ratios), num_rounds, num_groups, rules)


def _batch(groups: list[Group], num_first: int, selection: Selection, num_rounds: int, num_groups: int, rules: GroupFilter) -> SampledBatch:
    batch = set(selection.kept[:num_groups])
    kept = [group for group in groups if group.index in batch]
    return SampledBatch(groups, groups[:num_first], selection, kept, num_rounds, num_groups, rules.keep)


def select(groups: Sequence[Group], rules: GroupFilter, earlier_ratios: Sequence[float] = ()) -> Selection:
    """What the filter keeps of these groups, ranked within their environments; strategy `all` keeps them in the order of sampling."""
    trajectories = [t for group in groups for t in group.trajectories]
    if not trajectories:
        return NOTHING
    columns = {
        "successes": [float(t.success) for t in trajectories],
        "entropies": [t.mean_nll for t in trajectories],
        "lengths": [float(t.num_sampled) for t in trajectories],
    }
    rewards, indices = [t.reward for t in trajectories], [t.group for t in trajectories]
    return rules.select(rewards, indices, columns, [t.env for t in trajectories], earlier_ratios)


def reweight_batch(batch: Batch, sampled: SampledBatch, rules: GroupFilter) -> Batch:
    """The batch of the kept groups, with advantages, reweighted by reward variance and reduced to extreme members as configured."""
    if rules.reweight:
        weights: dict[Hashable, float] = {}
        for env in {group.env for group in sampled.kept}:  # relative to the largest variance of the same environment
            weights |= variance_weights(
                {group.index: sample_variance(np.array(group.rewards)) for group in sampled.kept if group.env == env}
            )
        weights_B = torch.tensor([weights[int(group)] for group in batch.groups_B], device=batch.ids_BT.device)
        assert batch.advantages_BT is not None
        batch = dataclasses.replace(batch, advantages_BT=batch.advantages_BT * weights_B[:, None])
    if rules.members is not None:
        extreme = {(g.index, g.trajectories[m].member) for g in sampled.kept for m in extreme_members(g.rewards, rules.members)}
        packed = [t for group in sampled.kept for t in group.trajectories if t.has_trained]
        kept = [index for index, t in enumerate(packed) if (t.group, t.member) in extreme]
        batch = batch.trajectories(torch.tensor(kept, device=batch.ids_BT.device))
    return batch
