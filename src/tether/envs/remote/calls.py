"""What both bridges share: the two calls that an environment takes, what it says about itself, how it is closed, and threads for blocking calls.

The process pool (`hosts`, `vector`) and the HTTP server (`sessions`, `http_server`) execute the same `Call` records, under the same
checks. Any exception of environment code becomes an `EnvironmentFailure` with the type and the text of the error. A failure can therefore
always be sent back, even if the exception itself cannot be pickled or written as JSON.

Blocking calls run beside an event loop: each in a daemon thread of its own (`in_thread`), under a deadline (`within`). The process pool has its
event loop in a background thread (`Background`); the HTTP server brings its own. A thread cannot be killed. A call that hangs is left behind: its
late result goes to `on_late`, and because the thread is a daemon it does not keep the interpreter alive. This is why no thread pool is used: a
pool waits for its threads at exit.
"""

import asyncio
import contextlib
import logging
import math
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, ClassVar, TypeVar

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.grammar import ANSWER_TAGS
from tether.core.output import show_output
from tether.core.protocols import Env, checked_observation, checked_step, few_shot_of
from tether.core.types import Exchanges, Observation

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
    shows_images: bool = False
    """Observations carry pictures, so that only a model that sees can play."""

    @classmethod
    def of(cls, env: Env) -> "EnvDescription":
        optional = {
            key: tuple(getattr(env, key)) for key in ("reward_range", "reply_tags", "actions") if getattr(env, key, None) is not None
        }
        images = getattr(env, "shows_images", False) is True
        return cls(str(env.name), int(env.max_turns), str(env.instructions), **optional, shows_images=images)


@dataclass(frozen=True, slots=True)
class Begun:
    """The result of a reset: the first observation, and the instructions and examples, which may depend on the instance."""

    observation: Observation
    instructions: str
    few_shot: Exchanges = ()

    @classmethod
    def of(cls, env: Env, observation: Any) -> "Begun":
        return cls(checked_observation(observation), str(env.instructions), few_shot_of(env))


@dataclass(frozen=True, slots=True)
class Reset:
    """reset(seed, env_seed=env_seed)"""

    what: ClassVar[str] = "reset"
    seed: int
    env_seed: int | None


@dataclass(frozen=True, slots=True)
class Take:
    """step(answer)"""

    what: ClassVar[str] = "step"
    answer: str


Call = Reset | Take


def perform(env: Env, call: Call) -> Any:
    """Execute a call; EnvironmentFailure if the environment raises or returns a wrong type."""
    with environment_boundary(call.what):
        if isinstance(call, Reset):
            return Begun.of(env, env.reset(call.seed, env_seed=call.env_seed))
        return checked_step(env.step(call.answer))


async def perform_async(env: Any, call: Call) -> Any:
    """The same for an environment with `areset` and `astep`."""
    with environment_boundary(call.what):
        if isinstance(call, Reset):
            return Begun.of(env, await env.areset(call.seed, env_seed=call.env_seed))
        return checked_step(await env.astep(call.answer))


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


GRACE_SECONDS = 1.0
"""How long something that is being ended may take to end by itself."""


class Background:
    """One event loop in a thread of its own."""

    def __init__(self, workers: int | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(workers) if workers else None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tether-vector", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def show_output(self, printed: Connection) -> None:
        """Show what comes from a pipe, until it ends or the loop does."""

        def read() -> None:
            data = os.read(printed.fileno(), 1 << 16)
            if data:
                show_output(data.decode("utf-8", "replace"))
            else:
                self._loop.remove_reader(printed.fileno())
                printed.close()

        self._loop.call_soon_threadsafe(lambda: self._loop.add_reader(printed.fileno(), read))

    def slot(self) -> AbstractAsyncContextManager[Any]:
        """Held while a call runs; there are as many slots as calls may run at the same time."""
        return self._slots or contextlib.nullcontext()

    def close(self) -> None:
        """Cancel the calls in progress and end the loop and its thread."""

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE_SECONDS)

        self.submit(cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`; TimeoutError once the seconds have passed.

    `asyncio.wait_for` would wait until the cancelled work has ended. Environment code may ignore its cancellation, so this function returns
    without waiting for it.
    """
    task = asyncio.ensure_future(work)
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if not done:
        task.cancel()
        raise TimeoutError(f"timed out after {seconds:g} s")
    return task.result()


async def in_thread(what: str, work: Callable[[], T], on_late: Callable[[T | None], None] | None = None) -> T:
    """The result of `work`, or the EnvironmentFailure it raises, from a daemon thread.

    If the caller has stopped waiting (a time-out, a cancelled request), the result goes to `on_late` on the event loop instead; None stands
    for a failure. `work` must raise nothing else than EnvironmentFailure.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()

    def settle(outcome: T | EnvironmentFailure) -> None:
        if answer.done():  # cancelled: the result is late
            if on_late is not None:
                on_late(None if isinstance(outcome, EnvironmentFailure) else outcome)
        elif isinstance(outcome, EnvironmentFailure):
            answer.set_exception(outcome)
        else:
            answer.set_result(outcome)

    threading.Thread(target=_run, args=(what, work, loop, settle), name="tether-env", daemon=True).start()
    return await answer


def _run(what: str, work: Callable[[], T], loop: asyncio.AbstractEventLoop, settle: Callable[[T | EnvironmentFailure], None]) -> None:
    outcome: T | EnvironmentFailure = EnvironmentFailure(f"{what}: the environment ended its thread")  # for example by KeyboardInterrupt
    try:
        outcome = work()
    except EnvironmentFailure as failure:
        outcome = failure
    except SystemExit as end:  # a thread ends silently on SystemExit
        outcome = EnvironmentFailure(f"{what}: SystemExit: {end.code}")
    finally:
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits for the result
            loop.call_soon_threadsafe(settle, outcome)
