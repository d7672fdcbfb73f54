"""Evaluation: the fixed validation prompts, sampled a number of times each, with the interval of the success rate and pass@k.

Prompts are drawn independently of each other, samples of one prompt are not: the interval therefore counts prompts. Each prompt brings
the share of its samples that succeeded, whose variance is at most that of a single trial, so the interval errs on the wide side.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.metrics import wilson_interval
from tether.core.protocols import Sampling
from tether.core.types import Group
from tether.envs.factory import env_factory
from tether.envs.registry import make_env
from tether.rollout.sampler import EnvPool, EnvSpec, Sampler, validation_plan
from tether.rollout.summary import pass_rates, rollout_summary


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


def evaluate(sampler: Sampler, num_prompts: int, sampling: Sampling, *, samples: int = 1) -> Evaluation:
    """Play the fixed validation prompts, `samples` times each; several environments share the prompts by weight."""
    groups = play_validation(sampler, num_prompts, sampling, samples=samples)
    return Evaluation(groups, mixed=len(sampler.pool.specs) > 1)


def play_validation(
    sampler: Sampler, num_prompts: int, sampling: Sampling, *, samples: int, stage: str = "validation", first_turn_only: bool = False
) -> list[Group]:
    """The fixed validation prompts as groups: the same prompts and the same seeds whenever they are played."""
    with EnvPool([_validation_spec(spec) for spec in sampler.pool.specs]) as pool:
        plan = validation_plan(num_prompts, samples, pool.weights)
        return sampler.collect(plan, sampling, stage=stage, pool=pool, first_turn_only=first_turn_only)


def _metrics(groups: Sequence[Group], mixed: bool = False) -> dict[str, float]:
    summary = rollout_summary(groups, mixed=mixed)
    names = ("success", "reward_mean", "turns", "response_tokens", "format_valid", "lenient", "errors")
    played = [group for group in groups if group.trajectories]  # a prompt whose every episode errored says nothing about the policy
    low, high = wilson_interval(sum(sum(group.successes) / len(group.successes) for group in played), len(played))
    if not played:  # nothing was measured: a rate of 0 would look like a collapsed policy
        return {"errors": summary["errors"], "prompts": 0}
    return {
        **{name: summary[name] for name in summary if name in names or name.startswith("env/")},
        **pass_rates(groups),
        "success_low": low,
        "success_high": high,
        "prompts": len(played),
    }


def _validation_spec(spec: EnvSpec) -> EnvSpec:
    """The spec with the validation split, if its environment has splits."""
    known = env_factory(spec.name).options
    # A served environment tells its options once it is asked.
    names: Any = known.model_fields if known is not None else getattr(make_env(spec.name, **spec.options), "options", {})
    return dataclasses.replace(spec, options={**spec.options, "split": "validation"}) if "split" in names else spec
