"""The one thread that computes with a served model: it batches the requests of all clients, and runs jobs when nothing decodes.

Requests are appended to a queue that the native engine reads between two calls of its decoder, so a new request joins those that decode
(continuous batching). A job is anything that must not run beside a decoding batch: scoring a prompt, replacing weights. While a job waits,
new requests are held back, so the batch in flight ends and the job gets its turn; then the held requests continue in their order. Weights
therefore never change inside a response, and no key or value of old weights is read with new ones.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeVar

from tether.core.errors import DivergedModel
from tether.core.http import Refusal
from tether.core.protocols import EngineStatistics
from tether.core.telemetry import STUCK_SECONDS, Telemetry
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

    def __init__(self, engine: NativeEngine, stuck_after: float = STUCK_SECONDS) -> None:
        """`stuck_after`: seconds without progress while work waits, after which the thread has a `problem`."""
        self._engine, self._stuck_after = engine, stuck_after
        self._played, engine.statistics = EngineStatistics(), EngineStatistics()
        """Of the batches that are done; the engine has those of the last."""
        self._progress = time.monotonic()
        """When something was computed last, or when work came in while there was none."""
        self._changed = threading.Condition()
        self._queue: deque[Admission] = deque()
        """Read by the engine while it plays."""
        self._held: deque[Admission] = deque()
        """Requests that wait until no job waits."""
        self._jobs: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._unfinished: set[ResponseRequest] = set()
        self._closed = False
        self.diverged = False
        """The latest batch ended because log-probs are not finite: the server is not ready until a batch goes well, or weights are replaced."""
        self._thread = threading.Thread(target=self._work, daemon=True, name="engine")
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and not self._closed

    @property
    def num_requests(self) -> int:
        """Requests that are queued, held back or decoding."""
        return len(self._unfinished)

    @property
    def statistics(self) -> EngineStatistics:
        """Of all that was played, the batch in flight included."""
        with self._changed:
            return self._played + self._engine.statistics

    def problem(self) -> str | None:
        """Why the engine does not work, in one line; None while it does."""
        if not self.is_alive:
            return "the engine has stopped; look at the server's output and start it again"
        silent = time.monotonic() - self._progress
        if silent < self._stuck_after or not (self._unfinished or self._jobs):
            return None
        return f"{len(self._unfinished) + len(self._jobs)} requests wait, and the engine computed nothing for {silent:.0f} s; restart the server"

    def report(self, telemetry: Telemetry) -> None:
        """Add the engine's numbers to the metrics of its server."""
        telemetry.gauge("tether_queue_requests", "Responses that wait for a row.", lambda: len(self._queue) + len(self._held))
        telemetry.gauge("tether_running_requests", "Responses that wait, or are being sampled.", lambda: len(self._unfinished))
        telemetry.gauge(
            "tether_cache_used_ratio", "Share of the key/value cache in use, kept prefixes included.", lambda: self._engine.cache_used
        )
        for name, what in (
            ("sampled", "Tokens of responses."),
            ("fed", "Tokens of prompts that were computed."),
            ("shared", "Tokens of prompts that the cache held."),
            ("recomputed", "Tokens computed again after their cache was evicted."),
        ):
            telemetry.counter(f"tether_{name}_tokens_total", what, lambda field=f"{name}_tokens": float(getattr(self.statistics, field)))  # type: ignore[misc]

    def submit(self, request: ResponseRequest) -> Future[Completion]:
        """Queue a request; its future gets the completion, or the error that ended its batch."""
        self.submit_all((request,))
        return request.done

    def submit_all(self, requests: Sequence[ResponseRequest]) -> None:
        """Queue requests at once, so that their prompts are computed together."""

        def on_progress() -> None:
            self._progress = time.monotonic()
            if self._closed:
                raise ServerStopped("the server stopped")

        admissions = [Admission(request, request.sampling, on_progress) for request in requests]
        with self._changed:
            self._check_open()
            self._note_arrival()
            self._unfinished.update(requests)
            waiting = self._held if self._jobs else self._queue
            waiting.extend(admissions)
            self._changed.notify()
        for request in requests:
            request.done.add_done_callback(lambda _, request=request: self._unfinished.discard(request))  # type: ignore[misc]

    def exclusive(self, job: Callable[[], T]) -> "Future[T]":
        """Run a job when no request decodes."""
        done: Future[T] = Future()
        with self._changed:
            self._check_open()
            self._note_arrival()
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

    def _note_arrival(self) -> None:
        if not self._unfinished and not self._jobs:
            self._progress = time.monotonic()

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
        with self._changed:  # the engine counts every batch from zero
            self._played, self._engine.statistics = self.statistics, EngineStatistics()
        try:
            self._engine.play(self._queue)
            self.diverged = False
        except COMPUTE_ERRORS as error:
            self.diverged = isinstance(error, DivergedModel)
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
            self._progress = time.monotonic()
            try:
                done.set_result(job())
            except (*COMPUTE_ERRORS, Refusal) as error:
                done.set_exception(error)
        self._progress = time.monotonic()
        with self._changed:
            self._jobs.popleft()
            if not self._jobs:  # nothing holds requests back any more
                self._queue.extend(self._held)
                self._held.clear()
                self._changed.notify()
