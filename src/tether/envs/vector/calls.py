"""The two calls an environment takes, as records that travel to wherever it lives, and what is made of them there.

Whatever the environment's code raises becomes an EnvironmentFailure with the type and the text of the error, so that a failure can
always travel back, even if the error itself could not.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tether.core.errors import environment_boundary
from tether.core.protocols import Env
from tether.core.types import Observation, Step

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Begun:
    """What a reset brings: the first observation, and the instructions, which may depend on the instance."""

    observation: Observation
    instructions: str


@dataclass(frozen=True, slots=True)
class Reset:
    """reset(seed, luck=luck)"""

    what: ClassVar[str] = "reset"
    seed: int
    env_seed: int | None

    def on(self, env: Env) -> Begun:
        return Begun(_checked(env.reset(self.seed, env_seed=self.env_seed), Observation), env.instructions)

    async def on_async(self, env: Any) -> Begun:
        return Begun(_checked(await env.areset(self.seed, env_seed=self.env_seed), Observation), env.instructions)


@dataclass(frozen=True, slots=True)
class Take:
    """step(answer)"""

    what: ClassVar[str] = "step"
    answer: str

    def on(self, env: Env) -> Step:
        return _checked(env.step(self.answer), Step)

    async def on_async(self, env: Any) -> Step:
        return _checked(await env.astep(self.answer), Step)


Call = Reset | Take


def perform(env: Env, call: Call) -> Any:
    """Carry out a call; EnvironmentFailure if the environment raises."""
    with environment_boundary(call.what):
        return call.on(env)


async def perform_async(env: Env, call: Call) -> Any:
    """The same for an environment with `areset` and `astep`."""
    with environment_boundary(call.what):
        return await call.on_async(env)


def close_env(env: Env) -> None:
    """Close an environment, if it is of a kind that can be closed."""
    close: Callable[[], None] | None = getattr(env, "close", None)
    if close is not None:
        with environment_boundary("close"):
            close()


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it returned a {type(value).__name__} instead of a {kind.__name__}")
    return value
