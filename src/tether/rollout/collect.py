"""Collecting: a plan lists the episodes of a step, an engine plays them, and the trajectories come back in groups.

Every random choice of a plan comes from core.seeding. Groups come back in plan order, members in member order, whatever the order in
which the episodes ended.
"""

from collections.abc import Callable, Sequence

from tether.core.protocols import Engine, Sampling
from tether.core.seeding import env_seed, generator, instance_seed, sampling_seed, validation_seed
from tether.core.types import Group
from tether.rollout.episode import Episode, EpisodeSeeds
from tether.rollout.mixture import spread_groups

ALONE = (1.0,)
"""The weights of a run with one environment."""

CENTRE = 0.5
"""The offset of validation prompts: the nearest whole numbers to the shares."""


def training_plan(
    run: int, step: int, num_groups: int, group_size: int, first_group: int = 0, weights: Sequence[float] = ALONE
) -> list[EpisodeSeeds]:
    """The episodes of one training step: a group shares its instance, members have their own luck and their own draws.

    A further round of the same step goes on counting from `first_group`, so no round repeats another's episodes.
    """
    stages = spread_groups(weights, num_groups, generator("mixture", run, step, first_group).random())
    return [
        EpisodeSeeds(g, m, instance_seed(run, step, g), env_seed(run, step, g, m), sampling_seed(run, step, g, m), env_index)
        for g, env_index in enumerate(stages, start=first_group)
        for m in range(group_size)
    ]


def validation_plan(num_prompts: int, group_size: int = 1, weights: Sequence[float] = ALONE) -> list[EpisodeSeeds]:
    """The fixed validation episodes: the same for every run and every step, luck and draws included.

    Each environment of a mixture plays its own first prompts, the same that it would play alone.
    """
    stages = spread_groups(weights, num_prompts, CENTRE)
    numbers = [group - stages.index(env_index) for group, env_index in enumerate(stages)]
    return [
        EpisodeSeeds(g, m, validation_seed(i), env_seed(0, -1, i, m), sampling_seed(0, -1, i, m), env_index)
        for g, (i, env_index) in enumerate(zip(numbers, stages, strict=True))
        for m in range(group_size)
    ]


def collect(episodes: Sequence[Episode], engine: Engine, sampling: Sampling, on_finished: Callable[[], None] | None = None) -> list[Group]:
    """Play every episode and group the trajectories by prompt."""
    engine.run(episodes, sampling, on_finished)
    groups: dict[int, Group] = {}
    for episode in episodes:
        trajectory = episode.trajectory
        groups.setdefault(trajectory.group, Group(trajectory.group, trajectory.seed, [])).trajectories.append(trajectory)
    return list(groups.values())
