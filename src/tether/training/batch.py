"""The batch of a step: sample prompts, filter them, sample more until the batch is full, and weight what was kept.

`Rollouts` samples it when its step begins, with the newest weights; async_rollouts.py samples it ahead.

Every round of a step samples new prompts. After each round the filter ranks all groups of the step together; where it keeps more than a
batch, the best of them are the batch. Strategy `all` ranks nothing: the first that were sampled are (DAPO, arXiv 2503.14476, algorithm 1).
Without refill there is one round, and the batch is what the filter keeps of it. A run that mixes environments ranks groups within their
environment, because rewards of different environments have different scales.

With early decision (rollout/early_decision.py) a round plays prompts until as many groups as it wants are whole. The filter ranks those; numbers about
all prompts come from their first members, which were played whatever was decided.

Reweighting and the trajectory-level filter come after the advantages and change none of their baselines.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import numpy as np
import torch

from tether.algorithms.batch import Batch
from tether.algorithms.filters.group_filter import GroupFilter
from tether.algorithms.filters.scores import ZERO, sample_variance
from tether.algorithms.filters.select import Selection, extreme_members, groups_to_sample, variance_weights
from tether.core.enums import Decision
from tether.core.types import Group
from tether.diagnostics.summary import group_summary
from tether.rollout.early_decision import EarlyRules, first_members_of
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
    first_scores: Mapping[str, float] = field(default_factory=dict)
    """By environment, the mean score of first members in the recent steps, for early decision."""

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
    first_members: int = 0
    """Of early decision; 0 where there is none."""
    measured: Selection = NOTHING
    """Of early decision: the scores and variances of first members, of all prompts."""

    @property
    def unselected(self) -> list[Group]:
        """What no choice was made on: all groups, or with early decision their first members."""
        return [first_members_of(group, self.first_members) for group in self.groups] if self.first_members else self.groups

    @property
    def kept_ids(self) -> set[Hashable]:
        return {group.index for group in self.kept}

    @property
    def summary(self) -> dict[str, float]:
        """The "groups/" metrics of all prompts, which no choice was made on."""
        if not self.first_members:
            return group_summary(self.groups, self.selection)
        return {**group_summary(self.unselected, self.measured), "kept_ratio": len(self.kept) / len(self.groups)}

    @property
    def fill_ratio(self) -> float:
        """How full the batch is: kept groups / groups wanted. Without refill this is the kept ratio."""
        return len(self.kept) / self.num_wanted

    def metrics(self, tokens_batched: int) -> dict[str, float]:
        """The "groups/" metrics of the step; `tokens_batched` of its sampled tokens are in the batch."""
        tokens = num_sampled(self.groups)
        return {
            **self.summary,
            "sampled": len(self.groups),
            "kept": len(self.kept),
            "kept_ratio": len(self.kept) / len(self.groups),
            "rounds": self.num_rounds,
            "tokens_discarded": tokens - tokens_batched,
            "tokens_trained": tokens_batched,
            **({"sampled_per_trained": tokens / tokens_batched} if tokens_batched else {}),
            **(self._early_metrics() if self.first_members else {}),
        }

    def _early_metrics(self) -> dict[str, float]:
        """What was decided early, and what that cost."""
        decided = {decision: [group for group in self.groups if group.decision is decision] for decision in Decision}
        explored = [sample_variance(np.array(group.rewards)) > ZERO for group in decided[Decision.EXPLORED]]
        stopped = [group for group in self.groups if not group.is_whole]
        scores: dict[str, list[float]] = {}
        for group in self.groups:
            if group.index in self.measured.scores:  # else all its first members errored
                scores.setdefault(group.env, []).append(self.measured.scores[group.index])
        return {
            **{str(decision): len(groups) for decision, groups in decided.items()},
            **({"explored_varied": sum(explored) / len(explored)} if explored else {}),
            "tokens_decisions": num_sampled(stopped),
            **{f"first_score/{env}": sum(values) / len(values) for env, values in scores.items()},
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
            with timer.stage("rollout"):
                groups = self.play(step, count, first, inputs, choose)
            timer.count_engine(sampler.statistics)
            return groups

        with timer.stage("select"):  # less the rollouts in it
            sampled = sample_batch(
                play, settings.rollout.num_groups, inputs.rules(settings.filter), inputs.ratios, settings.rollout.first_members
            )
        check_resets(sampled.groups, f"step {step}")
        timer.count_rollout(sampled.groups)
        return sampled

    def _chooser(self, step: int) -> PromptChooser | None:
        """Of the prompts of a step, by what is known of them now."""
        return None if self._prompt_memory is None else self._prompt_memory.chooser(step)

    def play(
        self, step: int, count: int, first: int, inputs: FilterInputs, choose: PromptChooser | None, *, quiet: bool = False
    ) -> list[Group]:
        """A round of a step: so many new prompts, or with early decision as many groups from the first prompts that are worth it."""
        settings, chosen, sampler = self._settings, self._settings.rollout, self._sampler
        tries = chosen.max_tries if chosen.first_members else 1
        plan = training_plan(settings.seed, step, count, chosen.group_size, first, sampler.pool.weights, choose, tries)
        early = None
        if chosen.first_members:
            early = EarlyRules(
                num_places=count,
                group_size=chosen.group_size,
                first_members=chosen.first_members,
                oversample=chosen.oversample,
                explore=chosen.explore,
                seed=settings.seed,
                step=step,
                score=lambda group: group_score(group, settings.filter),
                mean_scores=inputs.first_scores,
            )
        groups = sampler.collect(plan, settings.sampling(), quiet=quiet, early=early)
        return groups if choose is None else choose.marked(groups)

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
    sample: Callable[[int, int], list[Group]],
    num_groups: int,
    rules: GroupFilter,
    earlier_ratios: Sequence[float] = (),
    first_members: int = 0,
) -> SampledBatch:
    """Sample the batch of a step.

    Args:
        sample: plays new prompts: how many, and the index of the first.
        num_groups: how many the batch should hold.
        rules: the filter, and how many rounds of refill it may take.
        earlier_ratios: `groups/rv_ratio` of the recent steps, for strategy `auto`.
        first_members: of early decision; 0 where there is none. The filter then ranks the groups that are whole.
    """
    groups = first = sample(num_groups, 0)
    selection = select(groups, rules, earlier_ratios)
    num_rounds = 1
    while num_rounds <= rules.refill and (
        more := groups_to_sample(len(selection.kept), sum(group.is_whole for group in groups), num_groups)
    ):
        groups = [*groups, *sample(more, 1 + max(group.index for group in groups))]
        selection = select(groups, rules, earlier_ratios)
        num_rounds += 1
    return _batch(groups, min(len(first), num_groups), selection, num_rounds, num_groups, rules, first_members)


def selected_again(
    groups: list[Group],
    num_first: int,
    num_rounds: int,
    num_groups: int,
    rules: GroupFilter,
    earlier_ratios: Sequence[float],
    first_members: int = 0,
) -> SampledBatch:
    """The batch of groups that `sample_batch` sampled before, in so many rounds, `num_first` of them the first prompts of the first."""
    return _batch(groups, num_first, select(groups, rules, earlier_ratios), num_rounds, num_groups, rules, first_members)


def _batch(
    groups: list[Group],
    num_first: int,
    selection: Selection,
    num_rounds: int,
    num_groups: int,
    rules: GroupFilter,
    first_members: int,
) -> SampledBatch:
    # With early decision, explored groups stand beside those that were wanted: a cut would rank them by what they turned out to be.
    batch = set(selection.kept if first_members else selection.kept[:num_groups])
    kept = [group for group in groups if group.index in batch]
    if not first_members:
        return SampledBatch(groups, groups[:num_first], selection, kept, num_rounds, num_groups, rules.keep)
    unselected = [first_members_of(group, first_members) for group in groups]
    measured = select(unselected, rules.model_copy(update={"strategy": "all", "include_zero": True}))
    first_round = unselected[:num_first]
    return SampledBatch(groups, first_round, selection, kept, num_rounds, num_groups, rules.keep, first_members, measured)


def num_sampled(groups: Sequence[Group]) -> int:
    """The sampled tokens of these groups."""
    return sum(t.num_sampled for group in groups for t in group.trajectories)


def group_score(group: Group, rules: GroupFilter) -> float:
    """The filter's score of one group."""
    return select([group], rules.model_copy(update={"strategy": "all", "include_zero": True})).scores.get(group.index, 0.0)


def select(groups: Sequence[Group], rules: GroupFilter, earlier_ratios: Sequence[float] = ()) -> Selection:
    """What the filter keeps of the groups that are whole, ranked within their environments; strategy `all` keeps them in the order of sampling."""
    trajectories = [t for group in groups if group.is_whole for t in group.trajectories]
    if not trajectories:
        return NOTHING
    columns = {
        "successes": [float(t.success) for t in trajectories],
        "entropies": [t.mean_nll for t in trajectories],
        "lengths": [float(t.num_sampled) for t in trajectories],
    }
    rewards, indices = [t.reward for t in trajectories], [t.group for t in trajectories]
    return rules.select(rewards, indices, columns, [t.env for t in trajectories], earlier_ratios)


def reweight_batch(batch: Batch, sampled: SampledBatch, rules: GroupFilter, explored_weight: float = 1.0) -> Batch:
    """The batch of the kept groups, with advantages, reweighted by reward variance and reduced to extreme members as configured; explored groups
    count `explored_weight` times."""
    weights: dict[Hashable, float] = {}
    if rules.reweight:
        for env in {group.env for group in sampled.kept}:  # relative to the largest variance of the same environment
            weights |= variance_weights(
                {group.index: sample_variance(np.array(group.rewards)) for group in sampled.kept if group.env == env}
            )
    if explored_weight != 1:
        weights |= {g.index: weights.get(g.index, 1.0) * explored_weight for g in sampled.kept if g.decision is Decision.EXPLORED}
    if weights:
        weights_B = torch.tensor([weights.get(int(group), 1.0) for group in batch.groups_B], device=batch.ids_BT.device)
        assert batch.advantages_BT is not None
        batch = dataclasses.replace(batch, advantages_BT=batch.advantages_BT * weights_B[:, None])
    if rules.members is not None:
        extreme = {(g.index, g.trajectories[m].member) for g in sampled.kept for m in extreme_members(g.rewards, rules.members)}
        packed = [t for group in sampled.kept for t in group.trajectories if t.has_trained]
        kept = [index for index, t in enumerate(packed) if (t.group, t.member) in extreme]
        batch = batch.trajectories(torch.tensor(kept, device=batch.ids_BT.device))
    return batch
