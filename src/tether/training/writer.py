"""Writing beside training: jobs that a thread of its own does one after the other.

A job that fails is never passed over: those behind it are not done, and its error is raised in the run's own thread, by `check` at the
border of a step or by `wait`.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for


class BackgroundWriter:
    """A queue of jobs and the thread that does them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._jobs: deque[Future[None]] = deque()
        self._failed = threading.Event()

    def submit(self, job: Callable[[], object]) -> None:
        """Do a job once those before it are done."""
        self._jobs.append(self._thread.submit(self._do, job))

    @property
    def busy(self) -> bool:
        return any(not job.done() for job in self._jobs)

    def check(self) -> None:
        """Raise what a job failed with."""
        while self._jobs and self._jobs[0].done():
            self._raise_failure(self._jobs.popleft())

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every job is done, or for so many seconds; returns whether they are, and raises what one failed with."""
        wait_for(self._jobs, timeout)
        self.check()
        return not self._jobs

    def _do(self, job: Callable[[], object]) -> None:
        if self._failed.is_set():
            return
        try:
            job()
        except BaseException:
            self._failed.set()
            raise

    def _raise_failure(self, job: "Future[None]") -> None:
        failure = job.exception()
        if failure is not None:
            wait_for(self._jobs)  # those behind it end at once, having done nothing
            self._jobs.clear()
            self._failed.clear()
            raise failure
