"""Evaluation: the fixed validation prompts, sampled a number of times each, with the interval of the success rate and pass@k.

An environment whose instances are a list, such as the rows of a file, plays each of them once, in order; others play the instances of fixed
seeds. Instances are drawn independently of each other, episodes of one instance are not: the interval is over instances. Prompts that turn
out to be the same instance count as one.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tether.core.errors import BadInput
from tether.core.intervals import clustered_interval, instance_values, mean_interval
from tether.core.protocols import Sampling
from tether.core.types import Group, Trajectory
from tether.diagnostics.summary import pass_at_k, pass_rates, rollout_summary
from tether.envs.registry import env_factory, make_env
from tether.rollout.episode import EpisodeSeeds
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
    attempts: list[Trajectory] = field(default_factory=list)
    """Episodes that were played again, because something failed: their tokens were spent all the same."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing about how it was made, one sentence each."""
    record: dict[str, Any] = field(default_factory=dict)
    """All of it as JSON can hold it (docs/evaluation.md), for `tether.compare` and for publishing; empty within a training run."""
    files: Path | None = None
    """Record and page on disk, without their endings; None where no folder was given."""

    @property
    def metrics(self) -> dict[str, float]:
        """The "validation/" section of a step's metrics."""
        return _metrics(self.groups, self.mixed)

    @property
    def intervals(self) -> dict[str, tuple[float, float] | None]:
        """95% intervals over instances of success, of the mean reward and of every pass@k; None where nothing can be said."""
        played = [group for group in self.groups if group.trajectories]
        units = list(instances(played).values())
        found: dict[str, tuple[float, float] | None] = {
            "success": clustered_interval([[float(won) for group in unit for won in group.successes] for unit in units]),
            "reward_mean": mean_interval(instance_values([[reward for group in unit for reward in group.rewards] for unit in units])),
        }
        for name in pass_rates(self.groups):
            k = int(name.removeprefix("pass_at_"))
            found[name] = clustered_interval([[pass_at_k(len(g.trajectories), sum(g.successes), k) for g in unit] for unit in units])
        return found

    @property
    def tokens(self) -> dict[str, int]:
        """What was spent, failed episodes included: tokens of prompts and of completions, and how many responses were not counted."""
        every = [*self.attempts, *(t for group in self.groups for t in (*group.trajectories, *group.errored))]
        turns = [turn for trajectory in every for turn in trajectory.turns]
        usages = [turn.usage for turn in turns if turn.usage is not None]
        return {
            "prompt": sum(len(turn.context_ids) for turn in turns) + sum(usage.prompt_tokens for usage in usages),
            "completion": sum(turn.num_tokens for turn in turns),
            "reasoning": sum(usage.reasoning_tokens for usage in usages),
            "cached": sum(usage.cached_tokens for usage in usages),
            "responses": len(turns),
            "uncounted": sum(1 for turn in turns if turn.usage is None and not turn.context_ids),
        }

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
        plan = evaluation_plan(pool, num_prompts, samples)
        return sampler.collect(plan, sampling, stage=stage, pool=pool, first_turn_only=first_turn_only)


def evaluation_plan(pool: EnvPool, num_prompts: int | None, samples: int) -> list[EpisodeSeeds]:
    """The episodes of an evaluation; `num_prompts` as in `evaluate`."""
    if num_prompts == 0:
        raise BadInput("an evaluation plays at least 1 prompt, and evaluation.prompts is 0; give --prompts 512")
    sizes = [num_instances(spec) for spec in pool.specs]
    if num_prompts is None:
        num_prompts = sizes[0] if len(sizes) == 1 and sizes[0] else DEFAULT_PROMPTS
    return validation_plan(num_prompts, samples, pool.weights, sizes)


def _metrics(groups: Sequence[Group], mixed: bool = False) -> dict[str, float]:
    summary = rollout_summary(groups, mixed=mixed)
    names = ("success", "reward_mean", "turns", "response_tokens", "format_valid", "lenient", "errors")
    played = [group for group in groups if group.trajectories]  # a prompt whose every episode errored says nothing about the policy
    if not played:  # nothing was measured: a rate of 0 would look like a collapsed policy
        return {"errors": summary["errors"], "prompts": 0}
    outcomes = [[won for group in unit for won in group.successes] for unit in instances(played).values()]
    low, high = clustered_interval(outcomes)
    if any(turn.usage is None and not turn.context_ids for group in played for t in group.trajectories for turn in t.turns):
        del summary["response_tokens"]  # of a server that does not count
    return {
        **{name: summary[name] for name in summary if name in names or name.startswith("env/")},
        **pass_rates(groups),
        "success_low": low,
        "success_high": high,
        "prompts": len(played),
        "instances": len(outcomes),
    }


def instances(groups: Sequence[Group]) -> dict[tuple[str, str], list[Group]]:
    """The prompts of each distinct instance, of those that were played. Instances are told apart by the first observation of their episodes."""
    found: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        if group.trajectories:
            first = group.trajectories[0].turns
            shown = first[0].observation if first else f"prompt {group.index}"  # an episode without a turn is an instance of its own
            found.setdefault((group.env, shown), []).append(group)
    return found


def validation_specs(specs: Sequence[EnvSpec]) -> list[EnvSpec]:
    """The specs with the validation split, where an environment has splits."""
    found = []
    for spec in specs:
        known = env_factory(spec.name).options
        # A served environment tells its options once it is asked.
        names: Any = known.model_fields if known is not None else getattr(make_env(spec.name, **spec.options), "options", {})
        found.append(dataclasses.replace(spec, options={**spec.options, "split": "validation"}) if "split" in names else spec)
    return found


def num_instances(spec: EnvSpec) -> int | None:
    """How many instances an environment has, where they are a list; a served environment does not tell."""
    return getattr(make_env(spec.name, **spec.options), "num_instances", None)
