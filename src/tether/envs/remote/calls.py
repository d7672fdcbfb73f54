"""What both bridges share: the two calls that an environment takes, what it says about itself, and how it is closed.

The process pool (`hosts`, `vector`) and the HTTP server (`sessions`, `http_server`) execute the same `Call` records, under the same
checks. Any exception of environment code becomes an `EnvironmentFailure` with the type and the text of the error. A failure can therefore
always be sent back, even if the exception itself cannot be pickled or written as JSON.
"""

import logging
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.grammar import ANSWER_TAGS
from tether.core.protocols import Env, few_shot_of
from tether.core.types import Exchanges, Observation, Step

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EnvDescription:
    """What is known about an environment before its first reset; the attributes that are optional have their defaults here."""

    name: str
    max_turns: int
    instructions: str = ""
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    reply_tags: tuple[str, ...] = ANSWER_TAGS
    """The tags that an agent may put its answer into."""
    actions: tuple[str, ...] = ()
    """The names of actions, where answers consist of them."""

    @classmethod
    def of(cls, env: Env) -> "EnvDescription":
        optional = {
            key: tuple(getattr(env, key)) for key in ("reward_range", "reply_tags", "actions") if getattr(env, key, None) is not None
        }
        return cls(str(env.name), int(env.max_turns), str(env.instructions), **optional)


@dataclass(frozen=True, slots=True)
class Begun:
    """The result of a reset: the first observation, and the instructions and examples, which may depend on the instance."""

    observation: Observation
    instructions: str
    few_shot: Exchanges = ()

    @classmethod
    def of(cls, env: Env, observation: Any) -> "Begun":
        return cls(_checked(observation, Observation), str(env.instructions), few_shot_of(env))


@dataclass(frozen=True, slots=True)
class Reset:
    """reset(seed, env_seed=env_seed)"""

    what: ClassVar[str] = "reset"
    seed: int
    env_seed: int | None

    def on(self, env: Env) -> Begun:
        return Begun.of(env, env.reset(self.seed, env_seed=self.env_seed))

    async def on_async(self, env: Any) -> Begun:
        return Begun.of(env, await env.areset(self.seed, env_seed=self.env_seed))


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
    """Execute a call; EnvironmentFailure if the environment raises or returns a wrong type."""
    with environment_boundary(call.what):
        return call.on(env)


async def perform_async(env: Env, call: Call) -> Any:
    """The same for an environment with `areset` and `astep`."""
    with environment_boundary(call.what):
        return await call.on_async(env)


def build_env(make: Callable[[], Env]) -> Env:
    """Build an environment; EnvironmentFailure if its code raises."""
    with environment_boundary("start"):
        return make()


def close_env(env: object) -> None:
    """Close an environment that has a method `close`; EnvironmentFailure if it raises."""
    close: Callable[[], None] | None = getattr(env, "close", None)
    if close is not None:
        with environment_boundary("close"):
            close()


def close_logged(env: object) -> None:
    """Close an environment; a failure is logged, so that the environments after it are still closed."""
    try:
        close_env(env)
    except EnvironmentFailure as failure:
        _LOG.warning("closing environment %s: %s", getattr(env, "name", type(env).__name__), failure)


def close_in_thread(env: object) -> None:
    """Close an environment without waiting for it. Used where the caller must not block: on an event loop, and for late environments."""
    if getattr(env, "close", None) is not None:
        threading.Thread(target=close_logged, args=(env,), daemon=True, name="tether-close").start()


def _checked(value: Any, kind: type[T]) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"it returned a {type(value).__name__} instead of a {kind.__name__}")
    return value
