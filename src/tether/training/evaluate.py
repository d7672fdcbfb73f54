"""Evaluation: the fixed validation prompts, sampled a number of times each, with the interval of the success rate and pass@k.

Prompts are drawn independently of each other, samples of one prompt are not: the interval therefore counts prompts. Each prompt brings
the share of its samples that succeeded, whose variance is at most that of a single trial, so the interval errs on the wide side.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tether.core.metrics import wilson_interval
from tether.core.protocols import Engine, Sampling
from tether.core.types import Group
from tether.envs.factory import env_factory
from tether.envs.registry import make_env
from tether.models.chat import ChatFormat
from tether.rollout.collect import validation_plan
from tether.rollout.env_pool import EnvPool
from tether.rollout.episode import EpisodeRules
from tether.rollout.mixture import EnvSpec
from tether.rollout.summary import pass_rates, rollout_summary
from tether.training.settings import EnvSettings


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
        names = dict.fromkeys(group.trajectories[0].env for group in self.groups)
        return {name: _metrics([group for group in self.groups if group.trajectories[0].env == name]) for name in names}


def env_specs(environments: Iterable[EnvSettings]) -> list[EnvSpec]:
    """Where a run plays."""
    return [EnvSpec(env.name, env.options, env.step_timeout, env.weight) for env in environments]


def evaluate(
    specs: Sequence[EnvSpec],
    engine: Engine,
    chat: ChatFormat,
    num_prompts: int,
    sampling: Sampling,
    rules: EpisodeRules,
    on_finished: Callable[[], None] | None = None,
    *,
    samples: int = 1,
) -> Evaluation:
    """Play the fixed validation prompts, `samples` times each; several environments share the prompts out by weight."""
    with EnvPool([_validating(spec) for spec in specs]) as env_pool:
        plan = validation_plan(num_prompts, samples, env_pool.weights)
        return Evaluation(env_pool.play(plan, engine, chat, sampling, rules, on_finished), mixed=len(specs) > 1)


def _metrics(groups: Sequence[Group], mixed: bool = False) -> dict[str, float]:
    summary = rollout_summary(groups, mixed=mixed)
    names = ("success", "reward_mean", "turns", "response_tokens", "format_valid", "errors")
    low, high = wilson_interval(sum(sum(group.successes) / len(group.successes) for group in groups), len(groups))
    return {
        **{name: summary[name] for name in summary if name in names or name.startswith("env/")},
        **pass_rates(groups),
        "success_low": low,
        "success_high": high,
        "prompts": len(groups),
    }


def _validating(spec: EnvSpec) -> EnvSpec:
    """The stage with the validation split, if its environment has splits."""
    known = env_factory(spec.name).options
    # A served environment tells its options once it is asked.
    names: Any = known.model_fields if known is not None else getattr(make_env(spec.name, **spec.options), "options", {})
    return dataclasses.replace(spec, options={**spec.options, "split": "validation"}) if "split" in names else spec
