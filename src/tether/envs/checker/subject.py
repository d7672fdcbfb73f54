"""The environment under examination: ways to build it, and the episodes that several laws look at, played once."""

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any

from tether.core.errors import environment_boundary
from tether.core.protocols import Env
from tether.core.types import Observation
from tether.envs.checker.episodes import Episode, play
from tether.envs.factory import EnvFactory

NUM_REPEATED = 20
"""How many episodes are played again."""


class NotApplicable(Exception):
    """A law has nothing to say about this environment; the message says why."""


class Subject:
    """What the laws are held against."""

    def __init__(self, plan: EnvFactory, num_episodes: int) -> None:
        self.plan, self.num_episodes = plan, num_episodes

    @cached_property
    def fresh(self) -> Env:
        """One that has not been reset, and is not going to be."""
        return self.plan.make()

    @cached_property
    def episodes(self) -> list[Episode]:
        """Played one after the other in one environment, as in training."""
        env = self.plan.make()
        return [play(env, number) for number in range(self.num_episodes)]

    @property
    def repeated(self) -> list[Episode]:
        """Those that are played again to see whether they come out the same: some of every kind."""
        return self.episodes[:: max(1, self.num_episodes // NUM_REPEATED)][:NUM_REPEATED]

    @property
    def option_names(self) -> list[str]:
        if self.plan.options is None:
            raise NotApplicable("its options are not known here; check it by name or by class")
        return list(self.plan.options.model_fields)


def identities(env: Env, seeds: Iterable[int], env_seed: int | None = None) -> Iterator[tuple[int, str]]:
    """Each seed with what tells its instance from others: the instance itself, or the first observation where it is not told."""
    for seed in seeds:
        with environment_boundary(f"reset({seed})"):
            opening: Any = env.reset(seed, env_seed=env_seed)
            instance = getattr(env, "instance", None)
        shown = opening.text if isinstance(opening, Observation) else repr(opening)
        yield seed, shown if instance is None else instance
