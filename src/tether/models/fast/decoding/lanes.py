"""Two lanes of work on a CUDA device, for steps of decoding and for feeds, that may run at the same time.

A lane has a stream and memory of its own for the graphs that are recorded on it: graphs that share their memory, or the library's workspace,
which belongs to a stream, must not run at once. Steps of decoding are replayed on the caller's stream, behind the learner's work. Feeds run beside
them, behind what came before the step that is under way; the host waits for both before either lane goes on, so nothing else has to be ordered.
Without a CUDA device there is one lane, and work is done at once.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Lane:
    """A stream, and the memory of what was recorded on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._pool: Any = None

    def record(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """A graph of this work, and what the work returns: the same tensors after every replay."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            work()  # kernels are compiled and chosen before anything is recorded
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            result = work()
        self._pool = graph.pool()
        return graph, result


class DecodeLane(Lane):
    """The caller's stream does the work; this one only records it."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.begun: torch.cuda.Event | None = None
        """What came before the step that is under way; None while there is none."""

    def begin(self) -> None:
        if self._stream is not None:
            self.begun = torch.cuda.current_stream(self._device).record_event()

    def end(self) -> None:
        self.begun = None


class FeedLane(Lane):
    """Work beside a step of decoding."""

    @contextmanager
    def beside(self, lane: DecodeLane) -> Iterator[None]:
        """What is launched here runs behind all that came before the other lane's step, and not behind the step."""
        if self._stream is None:
            yield
            return
        if lane.begun is None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        else:
            self._stream.wait_event(lane.begun)
        with torch.cuda.stream(self._stream):
            yield
