"""Where one environment lives: in the caller's thread, or beside it in a thread under a deadline (in a process: `process`).

A host is made for one environment and dies with it: an environment that hangs or whose process crashed is never spoken to again, a new
host takes its place. The clock of a call begins when the call begins, not while it queues for its turn; building the environment has
a clock of its own.
"""

import asyncio
import inspect
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from typing import Any

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.envs.vector.background import Background, in_thread
from tether.envs.vector.calls import Call, close_env, perform, perform_async

_LOG = logging.getLogger(__name__)

START_SECONDS = 300.0
"""What building an environment may take; the first one may have to load its data."""


class Host(ABC):
    """A place for one environment."""

    dead = False
    """The environment hung or crashed and must not be used again."""

    @abstractmethod
    def submit(self, call: Call) -> Future[Any]:
        """Begin a call; its future holds the result or an EnvironmentFailure."""

    @abstractmethod
    def hang_up(self) -> None:
        """Let the environment end; a dead one is ended by force, or left behind."""

    @abstractmethod
    def see_off(self) -> None:
        """Make sure that it has ended."""


class InlineHost(Host):
    """Calls are carried out at once, in the caller's thread: for environments that need microseconds. No deadline."""

    def __init__(self, make: Callable[[], Env], env: Env | None = None) -> None:
        self._make, self._env = make, env

    def submit(self, call: Call) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            if self._env is None:
                with environment_boundary("start"):
                    self._env = self._make()
            future.set_result(perform(self._env, call))
        except EnvironmentFailure as failure:
            future.set_exception(failure)
        return future

    def hang_up(self) -> None:
        if self._env is not None:
            _close(self._env)

    def see_off(self) -> None:
        """It has ended."""


class BesideHost(Host):
    """Calls run beside the caller, each under a deadline."""

    def __init__(self, background: Background, step_seconds: float) -> None:
        self._background, self._step_seconds = background, step_seconds
        self._built = False

    def submit(self, call: Call) -> Future[Any]:
        return self._background.submit(self._play(call))

    @abstractmethod
    async def _build(self) -> None:
        """Bring the environment to life."""

    @abstractmethod
    async def _perform(self, call: Call) -> Any:
        """Carry out a call."""

    async def _play(self, call: Call) -> Any:
        try:
            async with self._background.slot():
                if not self._built:
                    await self._within(START_SECONDS, "start", self._build())
                    self._built = True
                return await self._within(self._step_seconds, call.what, self._perform(call))
        except asyncio.CancelledError:
            self.dead = True
            raise EnvironmentFailure(f"{call.what}: the vector of environments was closed meanwhile") from None
        except (OSError, RuntimeError, EOFError) as error:  # no more processes, threads or files to be had
            self.dead = True
            raise EnvironmentFailure(f"{call.what}: {type(error).__name__}: {error}") from error

    async def _within(self, seconds: float, what: str, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of `work`, unless it takes too long. It is not waited for beyond that, even if it will not be cancelled."""
        task = asyncio.ensure_future(work)
        try:
            done, _ = await asyncio.wait({task}, timeout=seconds)
        except asyncio.CancelledError:
            task.cancel()
            raise
        if not done:
            self.dead = True
            task.cancel()
            raise EnvironmentFailure(f"{what}: timed out after {seconds:g} s")
        return task.result()


class ThreadHost(BesideHost):
    """For environments that mostly wait: each call in a thread, or on the loop itself where there is an `areset` and an `astep`."""

    def __init__(self, make: Callable[[], Env], background: Background, step_seconds: float, env: Env | None = None) -> None:
        super().__init__(background, step_seconds)
        self._make, self._env, self._built = make, env, env is not None

    async def _build(self) -> None:
        self._env = await in_thread("start", self._made)

    def _made(self) -> Env:
        with environment_boundary("start"):
            return self._make()

    async def _perform(self, call: Call) -> Any:
        env = self._env
        assert env is not None  # built before
        if all(inspect.iscoroutinefunction(getattr(env, name, None)) for name in ("areset", "astep")):
            return await perform_async(env, call)
        return await in_thread(call.what, partial(perform, env, call))

    def hang_up(self) -> None:
        if self._env is not None and not self.dead:
            _close(self._env)

    def see_off(self) -> None:
        """It has ended, or its thread was left behind."""


def _close(env: Env) -> None:
    try:
        close_env(env)
    except EnvironmentFailure as failure:  # the others are still to be closed
        _LOG.warning("%s: %s", env.name, failure)
