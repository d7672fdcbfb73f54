"""Evaluation: the fixed validation prompts, sampled a number of times each, with the interval of the success rate and pass@k.

An environment whose instances are a list, such as the rows of a file, plays each of them once, in order; others play the instances of fixed
seeds. Instances are drawn independently of each other, episodes of one instance are not: the interval is over instances. Prompts that turn
out to be the same instance count as one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.metrics import wilson_interval
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.diagnostics.intervals import student_t
from tether.diagnostics.summary import pass_rates, rollout_summary
from tether.envs.factory import env_factory
from tether.envs.registry import make_env
from tether.rollout.sampler import EnvPool, EnvSpec, Sampler, validation_plan

DEFAULT_PROMPTS = 512
"""Of an environment in which every seed makes its own instance."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    groups: list[Group]
    """One per prompt."""
    mixed: bool
    """There is more than one environment."""

    @property
    def metrics(self) -> dict[str, float]:
        """The "validation/" section of a step's metrics."""
        return _metrics(self.groups, self.mixed)

    @property
    def environments(self) -> dict[str, dict[str, float]]:
        """The same for the prompts of each environment by itself."""
        names = dict.fromkeys(group.env for group in self.groups)
        return {name: _metrics([group for group in self.groups if group.env == name]) for name in names}


def evaluate(
    sampler: Sampler, num_prompts: int | None, sampling: Sampling, *, samples: int = 1, specs: Sequence[EnvSpec] | None = None
) -> Evaluation:
    """Play the fixed validation prompts, `samples` times each; several environments share the prompts by weight.

    Args:
        num_prompts: None plays every instance of an environment that has a list of them, and DEFAULT_PROMPTS otherwise.
        specs: the environments, as they are to be played; None takes the validation split of the sampler's.
    """
    chosen = validation_specs(sampler.pool.specs) if specs is None else list(specs)
    groups = play_validation(sampler, num_prompts, sampling, samples=samples, specs=chosen)
    return Evaluation(groups, mixed=len(chosen) > 1)


def play_validation(
    sampler: Sampler,
    num_prompts: int | None,
    sampling: Sampling,
    *,
    samples: int,
    specs: Sequence[EnvSpec] | None = None,
    stage: str = "validation",
    first_turn_only: bool = False,
) -> list[Group]:
    """Fixed prompts as groups: the same prompts and the same seeds whenever they are played."""
    with EnvPool(validation_specs(sampler.pool.specs) if specs is None else specs) as pool:
        sizes = [num_instances(spec) for spec in pool.specs]
        if num_prompts is None:
            num_prompts = sizes[0] if len(sizes) == 1 and sizes[0] else DEFAULT_PROMPTS
        plan = validation_plan(num_prompts, samples, pool.weights, sizes)
        return sampler.collect(plan, sampling, stage=stage, pool=pool, first_turn_only=first_turn_only)


def _metrics(groups: Sequence[Group], mixed: bool = False) -> dict[str, float]:
    summary = rollout_summary(groups, mixed=mixed)
    names = ("success", "reward_mean", "turns", "response_tokens", "format_valid", "lenient", "errors")
    played = [group for group in groups if group.trajectories]  # a prompt whose every episode errored says nothing about the policy
    if not played:  # nothing was measured: a rate of 0 would look like a collapsed policy
        return {"errors": summary["errors"], "prompts": 0}
    outcomes = instance_outcomes(played)
    low, high = clustered_interval(outcomes)
    return {
        **{name: summary[name] for name in summary if name in names or name.startswith("env/")},
        **pass_rates(groups),
        "success_low": low,
        "success_high": high,
        "prompts": len(played),
        "instances": len(outcomes),
    }


def instance_outcomes(groups: Sequence[Group]) -> list[list[bool]]:
    """The outcomes of the episodes of each distinct instance. Instances are told apart by the first prompt of their episodes."""
    outcomes: dict[tuple[str, tuple[int, ...]], list[bool]] = {}
    for group in groups:
        first = group.trajectories[0].turns
        asked = tuple(first[0].context_ids) if first else (-1, group.index)  # an episode without a turn is an instance of its own
        outcomes.setdefault((group.env, asked), []).extend(group.successes)
    return list(outcomes.values())


def clustered_interval(outcomes: Sequence[Sequence[bool]]) -> tuple[float, float]:
    """The 95% interval of a success rate from the episodes of independent instances.

    With one episode of each this is Wilson's interval. Episodes of one instance are alike to some degree, which is measured: Wilson's interval
    is then taken for as many trials as would give the rate the variance that the instances show, with Student's quantile, as this variance
    was found from few. Where the instances show none (all solved, or none), each counts as one trial.
    """
    count, num_episodes = len(outcomes), sum(map(len, outcomes))
    rate = sum(map(sum, outcomes)) / max(1, num_episodes)
    if num_episodes == count:
        return wilson_interval(rate * count, count)
    if count < 2:
        return wilson_interval(rate * count, count)
    variance = count / (count - 1) * sum((sum(found) - len(found) * rate) ** 2 for found in outcomes) / num_episodes**2
    trials = rate * (1 - rate) / variance if variance > 0 else float(count)
    return wilson_interval(rate * trials, trials, student_t(count - 1))


def validation_specs(specs: Sequence[EnvSpec]) -> list[EnvSpec]:
    """The specs with the validation split, where an environment has splits."""
    return [_validation_spec(spec) for spec in specs]


def num_instances(spec: EnvSpec) -> int | None:
    """How many instances an environment has, where they are a list; a served environment does not tell."""
    return getattr(make_env(spec.name, **spec.options), "num_instances", None)


def _validation_spec(spec: EnvSpec) -> EnvSpec:
    """The spec with the validation split, if its environment has splits."""
    known = env_factory(spec.name).options
    # A served environment tells its options once it is asked.
    names: Any = known.model_fields if known is not None else getattr(make_env(spec.name, **spec.options), "options", {})
    return dataclasses.replace(spec, options={**spec.options, "split": "validation"}) if "split" in names else spec
