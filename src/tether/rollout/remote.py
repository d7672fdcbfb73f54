"""Conversations with a model behind a chat endpoint: many at a time, each in an environment of its own, reported as they end.

One thread drives the episodes; others carry requests, and wait for environments that work beside this process. So an environment is stepped by
one thread, as everywhere. A slot is the right to one conversation at a time: there are as many as `concurrency`, and each keeps its environment.

What fails in one conversation ends that one: it is recorded with its reason and is no evidence. What would fail in all of them (a refused key, an
unknown model, a server that is gone) ends the run with one line; conversations that have ended stay recorded.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tether.core.enums import StopReason
from tether.core.errors import EngineUnavailable, ModelUnavailable, TetherError
from tether.core.protocols import ContextReset, PromptFuture, PromptTokens, Sampling
from tether.core.types import Trajectory
from tether.models.chat_endpoint import ChatEndpoint, ChatReply, ContextFull
from tether.models.endpoint import NoSuchRoute, ServerUnreachable
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.messages import MessageFormat, forget_numbers
from tether.rollout.sampler import EnvPool

MOST_FAILURES = 20
"""Conversations in a row that may fail by the server before it is given up."""


@dataclass(slots=True)
class _Track:
    """A conversation in work."""

    seeds: EpisodeSeeds
    slot: int
    format: MessageFormat
    episode: Episode
    ids: list[int] = field(default_factory=list)
    attempt: int = 0


class RemotePlayer:
    """Plays the episodes of a plan.

    Args:
        pool: of the environments.
        endpoint: the model, connected.
        sampling: how replies are drawn.
        rules: of the episodes; budgets in tokens are the server's business.
        concurrency: conversations at a time.
        error_retries: how often an episode that an environment error ended is played again with the same seeds.
    """

    def __init__(
        self, pool: EnvPool, endpoint: ChatEndpoint, sampling: Sampling, rules: EpisodeRules, *, concurrency: int, error_retries: int = 1
    ) -> None:
        self._pool, self._endpoint, self._sampling, self._rules = pool, endpoint, sampling, rules
        self._concurrency, self._error_retries = concurrency, error_retries
        self._jobs: queue.SimpleQueue[tuple[_Track, PromptTokens | PromptFuture, int] | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[_Track, ChatReply | Exception | None]] = queue.SimpleQueue()
        self._num_answered = self._num_failed = 0

    def play(self, plan: Sequence[EpisodeSeeds], on_finished: Callable[[Trajectory, bool], None]) -> None:
        """Play every episode. `on_finished` gets each when it has ended, in whatever order, and whether it is played again."""
        self._on_finished = on_finished
        waiting, slots = deque(plan), deque(range(self._concurrency))
        # Daemons: where the run is interrupted, a thread may still wait for a server, and must not keep the process alive.
        for _ in range(min(self._concurrency, len(plan))):
            threading.Thread(target=self._carry, daemon=True, name="chat endpoint").start()
        try:
            while waiting or len(slots) < self._concurrency:
                while waiting and slots:
                    self._begin(waiting.popleft(), slots.popleft())
                track, answer = self._answers.get()
                if self._settle(track, answer):
                    slots.append(track.slot)
        finally:
            for _ in range(self._concurrency):
                self._jobs.put(None)

    def _begin(self, seeds: EpisodeSeeds, slot: int, attempt: int = 0) -> None:
        messages = MessageFormat()
        episode = self._pool.episode(seeds, messages, self._rules, slot, self._concurrency)
        track = _Track(seeds, slot, messages, episode, attempt=attempt)
        self._send(track, episode.begin())

    def _send(self, track: _Track, prompt: PromptTokens | PromptFuture) -> None:
        seed = int(track.episode.uniforms.integers(2**31))
        self._jobs.put((track, prompt, seed))

    def _settle(self, track: _Track, answer: ChatReply | Exception | None) -> bool:
        """Take what a thread brings; whether the slot is free."""
        trajectory = track.episode.trajectory
        if isinstance(answer, ChatReply):
            self._num_answered, self._num_failed = self._num_answered + 1, 0
            completion = track.format.completion(answer, track.episode.tags)
            track.ids += completion.token_ids
            self._send(track, track.episode.receive(completion))
            return False
        if isinstance(answer, ContextFull):
            trajectory.stop_reason = StopReason.CONTEXT_FULL
        elif answer is not None:
            self._fail(trajectory, answer)
        trajectory.retries = track.attempt
        forget_numbers(trajectory)
        again = trajectory.stop_reason is StopReason.ENV_ERROR and track.attempt < self._error_retries
        self._on_finished(trajectory, again)
        if again:
            self._begin(track.seeds, track.slot, track.attempt + 1)
        return not again

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        """Record what the server did to one conversation; raise it where it is about all of them."""
        if not isinstance(error, TetherError):
            raise error
        common = isinstance(error, ModelUnavailable | NoSuchRoute) and not isinstance(error, ServerUnreachable)
        if common and not self._num_answered:
            raise error
        self._num_failed += 1
        if self._num_failed >= MOST_FAILURES:
            raise EngineUnavailable(f"{self._num_failed} conversations in a row failed, the last one: {error}") from error
        trajectory.stop_reason, trajectory.error = StopReason.MODEL_ERROR, str(error)

    def _carry(self) -> None:
        """One thread: wait for the environment, then for the server."""
        while (job := self._jobs.get()) is not None:
            track, prompt, seed = job
            answer: ChatReply | TetherError | None
            try:
                ready = prompt() if callable(prompt) else prompt
                if ready is None:
                    answer = None
                else:
                    track.ids = [*ready] if isinstance(ready, ContextReset) else [*track.ids, *ready]
                    answer = self._endpoint.complete(track.format.messages(track.ids), self._sampling, seed)
            except TetherError as error:  # judged by the thread that drives the conversations
                answer = error
            except Exception as error:  # a defect: that thread must not wait for ever
                self._answers.put((track, error))
                raise
            self._answers.put((track, answer))
