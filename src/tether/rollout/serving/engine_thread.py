"""The one thread that computes with a served model: it batches the requests of all clients, and runs jobs when nothing decodes.

Requests are appended to a queue that the native engine reads between two calls of its decoder, so a new request joins those that decode
(continuous batching). A job is anything that must not run beside a decoding batch: scoring a prompt, replacing weights. While a job waits,
new requests are held back, so the batch in flight ends and the job gets its turn; then the held requests continue in their order. Weights
therefore never change inside a response, and no key or value of old weights is read with new ones.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from tether.core.http import Refusal
from tether.core.protocols import EngineStatistics
from tether.core.types import Completion
from tether.rollout.engines.continuous_batch import Admission
from tether.rollout.engines.native import NativeEngine
from tether.rollout.serving.response import COMPUTE_ERRORS, ResponseRequest

T = TypeVar("T")


class ServerStopped(RuntimeError):
    """Raised inside the engine to end a batch when the server stops."""

    status_code = 503


class EngineThread:
    """Runs an engine for as long as it is open."""

    def __init__(self, engine: NativeEngine) -> None:
        self._engine = engine
        self.statistics = EngineStatistics()
        """Of all that was played."""
        self._changed = threading.Condition()
        self._queue: deque[Admission] = deque()
        """Read by the engine while it plays."""
        self._held: deque[Admission] = deque()
        """Requests that wait until no job waits."""
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._unfinished: set[ResponseRequest] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def num_requests(self) -> int:
        """Requests that are queued, held back or decoding."""
        return len(self._unfinished)

    def submit(self, request: ResponseRequest) -> Future[Completion]:
        """Queue a request; its future gets the completion, or the error that ended its batch."""

        def check_open() -> None:
            if self._closed:
                raise ServerStopped("the server stopped")

        with self._changed:
            self._check_open()
            self._unfinished.add(request)
            waiting = self._held if self._jobs else self._queue
            waiting.append(Admission(request, request.sampling, check_open))
            self._changed.notify()
        request.done.add_done_callback(lambda _: self._unfinished.discard(request))
        return request.done

    def exclusive(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job when no request decodes."""
        done: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._jobs.append((job, done))
            self._changed.notify()
        return done

    def stop(self) -> None:
        """Let requests that decode fail at their next token, and refuse new ones; takes no lock, so that a signal handler may call it."""
        self._closed = True

    def close(self) -> None:
        """End the thread; whatever is not finished fails."""
        with self._changed:
            self.stop()
            self._changed.notify()
        self._thread.join()

    def _check_open(self) -> None:
        if not self.is_alive:
            raise Refusal(503, "the server is stopping")

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._queue or self._jobs or self._closed)
                if self._closed:
                    return
                if self._queue:
                    self._play()
                else:
                    self._run_job()
        finally:  # also where something unforeseen ends the thread: nobody may wait forever
            self._closed = True
            self._fail_all(ServerStopped("the server stopped"))
            for _, done in self._jobs:
                with suppress(InvalidStateError):  # it was cancelled
                    done.set_exception(ServerStopped("the server stopped"))

    def _play(self) -> None:
        try:
            self._engine.play(self._queue)
            self.statistics += self._engine.statistics
        except COMPUTE_ERRORS as error:
            with self._changed:
                self._queue.clear()
                self._held.clear()
                self._fail_all(error)

    def _fail_all(self, error: Exception) -> None:
        for request in list(self._unfinished):
            with suppress(InvalidStateError):  # its client has cancelled it
                request.done.set_exception(error)

    def _run_job(self) -> None:
        with self._changed:
            job, done = self._jobs[0]
        if done.set_running_or_notify_cancel():  # else whoever wanted it has gone; from here on it cannot be cancelled
            try:
                done.set_result(job())
            except (*COMPUTE_ERRORS, Refusal) as error:
                done.set_exception(error)
        with self._changed:
            self._jobs.popleft()
            if not self._jobs:  # nothing holds requests back any more
                self._queue.extend(self._held)
                self._held.clear()
                self._changed.notify()
