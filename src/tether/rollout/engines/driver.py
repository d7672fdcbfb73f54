"""Drives conversations whose responses come over HTTP, many at a time.

The calling thread drives the conversations (their environments, their tokenizer), so that an environment is stepped by one thread, as everywhere.
Other threads, each for one conversation or for several that were sent together, do nothing but wait for servers. They are daemons: where a run is
interrupted, one may still wait for a server, and must not keep the process alive.

What a server is asked and what its answer means is left to the two subclasses: token ids with log-probs (engines/server.py) and chat messages
(rollout/remote.py).
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from tether.core.errors import TetherError
from tether.core.protocols import ContextReset, Conversation, PromptFuture, PromptTokens
from tether.core.types import Completion

LOOK_SECONDS = 0.2
"""How often a driver that waits looks whether it was cancelled."""


@dataclass(slots=True, eq=False)
class Track:
    """One conversation in work."""

    conversation: Conversation
    tokens: list[int] = field(default_factory=list)
    """All that was fed and received, without the response in progress."""


T = TypeVar("T", bound=Track)
Take = Callable[[int, Any], None]
"""Takes an answer, with the number of whom it is for."""


class ConversationDriver(ABC, Generic[T]):
    """Plays conversations, at most `num_rows` at a time."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._num_open = 0
        """Conversations that have begun and not ended."""
        self._num_sent = self._num_threads = 0
        self._waiting: deque[Callable[[], T]] = deque()
        """Conversations that have not begun."""
        self._pending: deque[tuple[T, PromptFuture]] = deque()
        """Conversations whose environment has not answered."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[T, Any]] = queue.SimpleQueue()

    def drive(self, openings: Iterable[Callable[[], T]]) -> None:
        """Play every conversation to its end. Each is opened when there is a row for it."""
        self.add(openings)
        try:
            while self._waiting or self._num_open:
                while self._waiting and self._num_open < self._num_rows:
                    self.begin(self._waiting.popleft()())
                self.check_cancelled()
                if self._answers.empty():
                    self.flush()
                if self._num_sent and (not self._pending or not self._answers.empty()):
                    try:
                        track, answer = self._answers.get(timeout=LOOK_SECONDS)
                    except queue.Empty:
                        continue
                    self._num_sent -= 1
                    self.settle(track, answer)
                elif self._pending:
                    track, future = self._pending.popleft()
                    self.feed(track, future())
        finally:
            for _ in range(self._num_threads):
                self._jobs.put(None)
            self._num_threads = 0

    def add(self, openings: Iterable[Callable[[], T]]) -> None:
        """More conversations to play."""
        self._waiting.extend(openings)
        for _ in range(min(self._num_rows, self._num_open + len(self._waiting)) - self._num_threads):
            threading.Thread(target=self._work, daemon=True, name=type(self).__name__).start()
            self._num_threads += 1

    def begin(self, track: T) -> None:
        self._num_open += 1
        self.feed(track, track.conversation.begin())

    def deliver(self, track: T, completion: Completion) -> None:
        """Give a conversation its response."""
        track.tokens += completion.token_ids
        self.feed(track, track.conversation.receive(completion))

    def feed(self, track: T, prompt: PromptTokens | PromptFuture) -> None:
        """Go on with a conversation: wait for its environment, end it, or ask for its next response."""
        if callable(prompt):
            self.wait(track, prompt)
        elif prompt is None:
            self.end(track)
        else:
            if isinstance(prompt, ContextReset):
                track.tokens = []
            track.tokens += prompt
            self.ask(track, len(prompt))

    def wait(self, track: T, future: PromptFuture) -> None:
        """Wait for an environment, in the thread that drives: what it said is tokenised there."""
        self._pending.append((track, future))

    def send(self, track: T, job: Callable[[], Any]) -> None:
        """Let a thread do something that waits; `settle` gets what it returns, or its error."""
        self._num_sent += 1
        self._jobs.put(partial(self._carry, track, job))

    def send_together(self, tracks: Sequence[T], job: Callable[[Take], None], alone: Sequence[Callable[[], Any]]) -> None:
        """Let one thread wait for several answers, which `job` hands over with the numbers of their tracks. What it does not hand over is done `alone`."""
        self._num_sent += len(tracks)
        self._jobs.put(partial(self._carry_together, tracks, job, alone))

    def flush(self) -> None:
        """Send what was held back to be sent together: there is nothing else to do."""

    def end(self, track: T) -> None:
        """A conversation is over."""
        self._num_open -= 1

    def check_cancelled(self) -> None:
        """Raise what ends the run early, if anything does."""

    @abstractmethod
    def ask(self, track: T, num_fed: int) -> None:
        """Send the request for the next response; so many of the tokens are new."""

    @abstractmethod
    def settle(self, track: T, answer: Any) -> None:
        """Take what a job returned, or the error that it raised."""

    def _work(self) -> None:
        """One thread: do what waits until there is no more."""
        while (job := self._jobs.get()) is not None:
            job()

    def _carry(self, track: T, job: Callable[[], Any]) -> None:
        """Errors are judged by the thread that drives, which must not wait for ever."""
        try:
            answer = job()
        except (TetherError, ValueError) as error:
            answer = error
        except Exception as error:  # a defect
            self._answers.put((track, error))
            raise
        self._answers.put((track, answer))

    def _carry_together(self, tracks: Sequence[T], job: Callable[[Take], None], alone: Sequence[Callable[[], Any]]) -> None:
        left = dict(enumerate(tracks))
        try:
            with suppress(TetherError):  # each that is left is tried again, and judged, alone
                job(lambda number, answer: self._answers.put((left.pop(number), answer)))
        except Exception as error:  # a defect
            self._answers.put((tracks[0], error))
            raise
        for number, track in left.items():
            self._jobs.put(partial(self._carry, track, alone[number]))
