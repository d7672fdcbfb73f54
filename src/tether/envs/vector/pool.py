"""The environments of a run: plain ones where a step takes microseconds, members of a vector where it takes longer."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tether.core.protocols import Env
from tether.envs.env_factory import env_factory
from tether.envs.vector.calls import close_env
from tether.envs.vector.members import STEP_SECONDS, VectorEnv, work_of


class WorkerPool:
    """Environments that belong together and are closed together."""

    def __init__(self, envs: list[Env], vector: VectorEnv | None = None) -> None:
        self.envs = envs
        self._vector = vector

    def close(self) -> None:
        if self._vector is not None:
            self._vector.close()
        else:
            for env in self.envs:
                close_env(env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def make_envs(name: str, options: Mapping[str, Any], count: int, step_timeout: float = STEP_SECONDS) -> WorkerPool:
    """`count` environments of this name and these options."""
    plan = env_factory(name, options)
    first = plan.make()
    if work_of(first) == "inline":
        return WorkerPool([first, *(plan.make() for _ in range(count - 1))])
    close_env(first)
    vector = VectorEnv(name, count, options=options, step_timeout=step_timeout)
    return WorkerPool(list(vector.members), vector)
