"""Blocking calls beside an event loop: each runs in a daemon thread of its own, under a deadline.

The process pool has its event loop in a background thread (`Background`); the HTTP server brings its own. Both run environment code
through `in_thread` and limit it with `within`.

A thread cannot be killed. A call that hangs is left behind: its late result goes to `on_late`, and because the thread is a daemon it does
not keep the interpreter alive. This is why no thread pool is used: a pool waits for its threads at exit.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from tether.core.errors import EnvironmentFailure

T = TypeVar("T")

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

    def slot(self) -> AbstractAsyncContextManager[Any]:
        """Held while a call runs; there are as many slots as calls may run at the same time."""
        return self._slots or contextlib.nullcontext()

    def close(self) -> None:
        """Cancel the calls in progress and end the loop and its thread."""
        self.submit(_cancel_all()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=GRACE_SECONDS)


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
