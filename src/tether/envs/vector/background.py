"""One asyncio loop in a thread of its own, and blocking calls beside it, each in a daemon thread of its own.

A thread cannot be killed. One that hangs is left behind: whatever it answers later finds nobody waiting, and being a daemon it does
not keep the interpreter alive. That is why there is no thread pool here: a pool waits for its threads.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any, TypeVar

from tether.core.errors import EnvironmentFailure

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long something that is being ended may take to end by itself."""


class Background:
    """Runs coroutines beside the caller."""

    def __init__(self, workers: int | None) -> None:
        self._loop = asyncio.new_event_loop()
        self._slots = asyncio.Semaphore(workers) if workers else None
        self._thread = threading.Thread(target=self._loop.run_forever, name="tether-vector", daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def slot(self) -> AbstractAsyncContextManager[Any]:
        """To be held while working; there are as many as members may work at the same time."""
        return self._slots or contextlib.nullcontext()

    def close(self) -> None:
        """Cancel what is under way and end the loop and its thread."""
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


async def in_thread(what: str, work: Callable[[], T]) -> T:
    """What `work` returns, or the EnvironmentFailure it raises, from a daemon thread of its own."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[T] = loop.create_future()
    threading.Thread(target=_report, args=(what, work, loop, answer), name="tether-env", daemon=True).start()
    return await answer


def _report(what: str, work: Callable[[], T], loop: asyncio.AbstractEventLoop, answer: asyncio.Future[T]) -> None:
    outcome: T | EnvironmentFailure = EnvironmentFailure(f"{what}: the environment ended its thread")  # by a KeyboardInterrupt, say
    try:
        outcome = work()
    except EnvironmentFailure as failure:
        outcome = failure
    except SystemExit as end:  # a thread would end of it without a word
        outcome = EnvironmentFailure(f"{what}: SystemExit: {end.code}")
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has been closed meanwhile: nobody waits any more
            loop.call_soon_threadsafe(_settle, answer, outcome)


def _settle(answer: asyncio.Future[Any], outcome: Any) -> None:
    if answer.done():  # cancelled: it came too late
        return
    if isinstance(outcome, EnvironmentFailure):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)
