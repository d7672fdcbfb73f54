"""The arena: the environments of a run, several kinds if it mixes them, and the playing of plans in them.

Environments are built when a plan first needs them and are kept from step to step; a plan that needs more of a kind than there are
replaces that kind by as many. To be closed, best by `with`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from tether.core.protocols import Engine, Env, Sampling
from tether.core.types import Group
from tether.envs.registry import find_class, is_address
from tether.envs.remote import WorkerPool, make_envs
from tether.models.chat import ChatFormat
from tether.rollout.collect import collect
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.mixture import EnvSpec


class EnvPool:
    """Every environment that a run plays in."""

    def __init__(self, specs: Sequence[EnvSpec]) -> None:
        self._specs = tuple(specs)
        self._pools: dict[int, WorkerPool] = {}

    @property
    def weights(self) -> tuple[float, ...]:
        """For the plans."""
        return tuple(spec.weight for spec in self._specs)

    def play(
        self,
        plan: Sequence[EpisodeSeeds],
        engine: Engine,
        chat: ChatFormat,
        sampling: Sampling,
        rules: EpisodeRules,
        on_finished: Callable[[], None] | None = None,
    ) -> list[Group]:
        """Play every episode of the plan, each in an environment of its own, and group the trajectories by prompt."""
        counts = Counter(seeds.env_index for seeds in plan)
        envs = {index: iter(self._environments(index, count)) for index, count in counts.items()}
        metrics = {index: _metrics_of(self._specs[index].name) for index in counts}
        episodes = [
            Episode(next(envs[seeds.env_index]), chat, seeds, rules, self._specs[seeds.env_index].label, metrics[seeds.env_index])
            for seeds in plan
        ]
        return collect(episodes, engine, sampling, on_finished)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _environments(self, index: int, count: int) -> list[Env]:
        """At least so many environments of a stage."""
        pool, spec = self._pools.get(index), self._specs[index]
        if pool is not None and len(pool.envs) >= count:
            return pool.envs
        if pool is not None:
            self._pools.pop(index).close()
        self._pools[index] = make_envs(spec.name, spec.options, count, spec.step_timeout)
        return self._pools[index].envs


def _metrics_of(name: str) -> tuple[str, ...]:
    """The numbers that an environment calls worth averaging; a served one does not tell."""
    return () if is_address(name) else getattr(find_class(name), "metrics", ())
