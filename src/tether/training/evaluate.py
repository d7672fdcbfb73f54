"""Evaluation: the fixed validation prompts, played once each, with the interval of the success rate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tether.core.metrics import wilson_interval
from tether.core.protocols import Engine, Sampling
from tether.core.types import Group
from tether.envs.blueprint import blueprint
from tether.envs.registry import make_env
from tether.envs.vector import make_envs
from tether.models.chat import ChatFormat
from tether.rollout.collect import collect, validation_plan
from tether.rollout.episode import EpisodeRules
from tether.rollout.summary import rollout_summary
from tether.training.settings import EnvSettings


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What an evaluation found."""

    metrics: dict[str, float]
    """The "validation/" section of a step's metrics."""
    groups: list[Group]


def evaluate(
    env: EnvSettings,
    engine: Engine,
    chat: ChatFormat,
    num_prompts: int,
    sampling: Sampling,
    rules: EpisodeRules,
    on_finished: Callable[[], None] | None = None,
) -> Evaluation:
    """Play the first `num_prompts` validation prompts of an environment."""
    with make_envs(env.name, _validation_options(env), num_prompts, env.step_timeout) as pool:
        groups = collect(pool.envs, engine, chat, validation_plan(num_prompts), sampling, rules, on_finished)
    summary = rollout_summary(groups)
    low, high = wilson_interval(sum(sum(group.successes) for group in groups), num_prompts)
    names = ("success", "reward_mean", "turns", "response_tokens", "format_valid", "errors")
    return Evaluation({**{name: summary[name] for name in names}, "success_low": low, "success_high": high, "prompts": num_prompts}, groups)


def _validation_options(env: EnvSettings) -> dict[str, Any]:
    """The environment's options with the validation split, if it has splits."""
    known = blueprint(env.name).options
    # A served environment tells its options once it is asked.
    names: Any = known.model_fields if known is not None else getattr(make_env(env.name, **env.options), "options", {})
    return {**env.options, "split": "validation"} if "split" in names else env.options
