"""Conversations with a model behind a chat endpoint: many at a time, each in an environment of its own, reported as they end.

A slot is the right to one conversation at a time: there are as many as `concurrency`, and each keeps its environment.

What fails in one conversation ends that one: it is recorded with its reason and is no evidence. What would fail in all of them (a refused key, an
unknown model, a server that is gone) ends the run with one line; conversations that have ended stay recorded.

An episode builds its prompts by appending numbers, which are token ids where the model is loaded here. A `MessageFormat` gives every message
a number instead. So the episode, the environments and all context modes are the same code for both; what differs is how numbers become a
request: tokens are fed to an engine, messages are looked up here and sent.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import EngineUnavailable, ModelUnavailable, TetherError
from tether.core.grammar import answer_end
from tether.core.images import with_data_urls
from tether.core.protocols import PromptFuture, Sampling
from tether.core.types import Completion, Exchanges, Trajectory
from tether.models.chat_endpoint import ChatEndpoint, ChatReply, ContextFull
from tether.models.endpoint import NoSuchRoute, ServerUnreachable
from tether.rollout.engines.driver import ConversationDriver, Track
from tether.rollout.episode import Episode, EpisodeRules, EpisodeSeeds
from tether.rollout.sampler import EnvPool

MOST_FAILURES = 20
"""Conversations in a row that may fail by the server before it is given up."""
END_OF_TURN = 0
"""The number behind a response that the model ended by itself; it stands for no message."""


class MessageFormat:
    """The messages of one conversation by number."""

    sees = True
    """Whether the model does, its server knows."""

    def __init__(self) -> None:
        self._sent: list[dict[str, Any]] = [{}]
        """As the server gets them."""
        self._texts: list[str] = [""]
        """As the parser reads them: the same but for reasoning that a server keeps apart."""

    def first_prompt(self, system: str | None, user: str, few_shot: Exchanges = ()) -> tuple[int, ...]:
        opening = [] if system is None else [self._add("system", system)]
        for shown, reply in few_shot:
            opening += [self._add("user", shown), self._add("assistant", reply)]
        return (*opening, self._add("user", user))

    def next_prompt(self, user: str, response_ids: tuple[int, ...]) -> tuple[int, ...]:
        return (self._add("user", user),)

    def decode(self, ids: tuple[int, ...]) -> str:
        return "".join(self._texts[number] for number in ids)

    def tokens_before(self, ids: tuple[int, ...], num_chars: int) -> int:
        """Nothing: a message is never only reasoning."""
        return 0

    def completion(self, reply: ChatReply, tags: tuple[str, ...]) -> Completion:
        """A reply as the episode takes it. What stands behind the answer is cut off: an engine here would have stopped there."""
        end = answer_end(reply.text, tags)
        behind = 0 if end is None else len(reply.text) - end
        text, content = (part[: len(part) - behind] for part in (reply.text, reply.content))
        number = self._add("assistant", content, text)
        if end is not None or reply.cut:
            return Completion((number,), (), FinishReason.LENGTH if end is None else FinishReason.STOP_TEXT, usage=reply.usage)
        return Completion((number, END_OF_TURN), (), FinishReason.END_OF_TURN, usage=reply.usage)

    def messages(self, ids: list[int]) -> list[dict[str, Any]]:
        """What to send for a conversation."""
        return [self._sent[number] for number in ids if number != END_OF_TURN]

    def _add(self, role: str, content: str, text: str = "") -> int:
        self._sent.append({"role": role, "content": with_data_urls(content)})
        self._texts.append(text or content)
        return len(self._sent) - 1


def forget_numbers(trajectory: Trajectory) -> None:
    """Leave out the numbers of messages, once the conversation is over: whoever reads a trajectory takes them for token ids."""
    for turn in trajectory.turns:
        turn.context_ids, turn.response_ids, turn.reasoning_span = (), (), None


@dataclass(slots=True, eq=False, kw_only=True)
class _Chat(Track):
    """An episode in its slot."""

    conversation: Episode
    seeds: EpisodeSeeds
    slot: int
    format: MessageFormat
    attempt: int


class RemotePlayer(ConversationDriver[_Chat]):
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
        super().__init__(concurrency)
        self._pool, self._endpoint, self._sampling, self._rules = pool, endpoint, sampling, rules
        self._concurrency, self._error_retries = concurrency, error_retries
        self._slots = deque(range(concurrency))
        self._num_answered = self._num_failed = 0

    def play(self, plan: Sequence[EpisodeSeeds], on_finished: Callable[[Trajectory, bool], None]) -> None:
        """Play every episode. `on_finished` gets each when it has ended, in whatever order, and whether it is played again."""
        self._on_finished = on_finished
        self.drive(partial(self._open, seeds) for seeds in plan)

    def _open(self, seeds: EpisodeSeeds, slot: int | None = None, attempt: int = 0) -> _Chat:
        slot = self._slots.popleft() if slot is None else slot
        messages = MessageFormat()
        episode = self._pool.episode(seeds, messages, self._rules, slot, self._concurrency)
        return _Chat(conversation=episode, seeds=seeds, slot=slot, format=messages, attempt=attempt)

    def wait(self, track: _Chat, future: PromptFuture) -> None:
        """Messages are not tokenised, so a thread can wait for the environment too."""
        self.send(track, future)

    def ask(self, track: _Chat, num_fed: int) -> None:
        messages = track.format.messages(track.tokens)
        seed = int(track.conversation.uniforms.integers(2**31))
        self.send(track, partial(self._endpoint.complete, messages, self._sampling, seed))

    def settle(self, track: _Chat, answer: Any) -> None:
        trajectory = track.conversation.trajectory
        if isinstance(answer, ChatReply):
            self._num_answered, self._num_failed = self._num_answered + 1, 0
            self.deliver(track, track.format.completion(answer, track.conversation.tags))
        elif isinstance(answer, ContextFull):
            trajectory.stop_reason = StopReason.CONTEXT_FULL
            self.end(track)
        elif isinstance(answer, Exception):
            self._fail(trajectory, answer)
            self.end(track)
        else:  # of an environment
            self.feed(track, answer)

    def end(self, track: _Chat) -> None:
        super().end(track)
        trajectory = track.conversation.trajectory
        trajectory.retries = track.attempt
        forget_numbers(trajectory)
        again = trajectory.stop_reason is StopReason.ENV_ERROR and track.attempt < self._error_retries
        self._on_finished(trajectory, again)
        if again:
            self.begin(self._open(track.seeds, track.slot, track.attempt + 1))
        else:
            self._slots.append(track.slot)

    def _fail(self, trajectory: Trajectory, error: Exception) -> None:
        """Record what the server did to one conversation; raise it where it is about all of them."""
        if not isinstance(error, TetherError):
            raise error
        common = isinstance(error, ModelUnavailable | NoSuchRoute) and not isinstance(error, ServerUnreachable)
        if common and not self._num_answered:
            raise error
        self._num_failed += 1
        if self._num_failed == 1 and not self._num_answered:  # the conversation, or the server? It is asked once more, for anything at all
            try:
                self._endpoint.probe(self._sampling)
            except TetherError as again:
                raise EngineUnavailable(
                    f"the first conversation failed ({error}), and so did one more request: {again}; see to the server and repeat the command"
                ) from error
        if self._num_failed >= MOST_FAILURES:
            raise EngineUnavailable(f"{self._num_failed} conversations in a row failed, the last one: {error}") from error
        trajectory.stop_reason, trajectory.error = StopReason.MODEL_ERROR, str(error)
