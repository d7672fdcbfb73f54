"""Collecting: seeds and environments in, groups of trajectories out.

A plan lists the episodes of a step; every random choice in it comes from core.seeding. Groups come back in plan order, members in
member order, whatever the order in which the episodes ended.
"""

from collections.abc import Callable, Sequence

from tether.core.protocols import Engine, Env, Sampling
from tether.core.seeding import instance_seed, luck_seed, sampling_seed, validation_seed
from tether.core.types import Group
from tether.models.chat import ChatFormat
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds


def training_plan(run: int, step: int, num_groups: int, group_size: int) -> list[EpisodeSeeds]:
    """The episodes of one training step: a group shares its instance, members have their own luck and their own draws."""
    return [
        EpisodeSeeds(g, m, instance_seed(run, step, g), luck_seed(run, step, g, m), sampling_seed(run, step, g, m))
        for g in range(num_groups)
        for m in range(group_size)
    ]


def validation_plan(num_prompts: int, group_size: int = 1) -> list[EpisodeSeeds]:
    """The fixed validation episodes: the same for every run and every step, luck and draws included."""
    return [
        EpisodeSeeds(i, m, validation_seed(i), luck_seed(0, -1, i, m), sampling_seed(0, -1, i, m))
        for i in range(num_prompts)
        for m in range(group_size)
    ]


def collect(
    envs: Sequence[Env],
    engine: Engine,
    chat: ChatFormat,
    plan: Sequence[EpisodeSeeds],
    sampling: Sampling,
    rules: EpisodeRules,
    on_finished: Callable[[], None] | None = None,
) -> list[Group]:
    """Play every episode of the plan, each in an environment of its own, and group the trajectories by prompt."""
    episodes = [Episode(env, chat, seeds, rules) for env, seeds in zip(envs, plan, strict=True)]
    engine.run(episodes, sampling, on_finished)
    groups: dict[int, Group] = {}
    for episode in episodes:
        trajectory = episode.trajectory
        groups.setdefault(trajectory.group, Group(trajectory.group, trajectory.seed, [])).trajectories.append(trajectory)
    return list(groups.values())
