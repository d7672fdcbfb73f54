"""What the model sees of earlier turns: everything, the last few, a summary, or nothing.

Every mode begins with the same prompt. `full` always appends. `last_k` appends while at most k turns have passed; after that every turn
begins a new context: the first observation, the number of turns left out, and the last k turns as the very tokens that were fed and sampled.
`single_turn` begins a new context at every turn with one message: the first observation, a line about each turn so far, and the present
observation. `markov` begins a new context at every turn with the present observation alone. Tokens that begin a new context are a
`ContextReset`; the engine then forgets the earlier ones.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from tether.core.errors import UnknownName, did_you_mean
from tether.core.protocols import ContextReset
from tether.core.types import Exchanges, Turn
from tether.models.chat import PromptFormat

SUMMARY_TURNS = 16
"""Turns that a summary tells of; of earlier ones it gives the number."""

SUMMARY_CHARS = 80
"""Characters of an answer in a summary."""


class Context(ABC):
    """The prompts of one episode, turn by turn."""

    def __init__(self, chat: PromptFormat, last_k: int) -> None:
        """`last_k`: earlier turns that the mode of that name shows."""
        self._chat, self._last_k = chat, last_k
        self._instructions = ""
        self._few_shot: Exchanges = ()
        self._first = ""

    def begin(self, instructions: str, observation: str, few_shot: Exchanges = ()) -> tuple[int, ...]:
        """The prompt of the first turn."""
        self._instructions, self._few_shot, self._first = instructions, few_shot, observation
        return ContextReset(self._chat.first_prompt(instructions, observation, few_shot))

    @abstractmethod
    def advance(self, turn: Turn, answer: str, observation: str) -> tuple[int, ...]:
        """The tokens to feed after a turn with this answer, to show the next observation."""

    def _opening(self, between: str, observation: str) -> tuple[int, ...]:
        """A first prompt that shows the first observation, what lies between, and this one (unless it says what the first said)."""
        parts = [self._first, between, *[observation] * (observation != self._first)]
        return self._chat.first_prompt(self._instructions, "\n\n".join(parts), self._few_shot)


class FullContext(Context):
    """The whole history."""

    def advance(self, turn: Turn, answer: str, observation: str) -> tuple[int, ...]:
        return self._chat.next_prompt(observation, turn.response_ids)


class LastTurns(Context):
    """The first observation and the last k turns."""

    def __init__(self, chat: PromptFormat, last_k: int) -> None:
        super().__init__(chat, last_k)
        self._turns: list[Turn] = []
        self._joints: list[tuple[int, ...]] = []
        """What was fed after each turn, up to the next response."""

    def advance(self, turn: Turn, answer: str, observation: str) -> tuple[int, ...]:
        self._turns.append(turn)
        self._joints.append(self._chat.next_prompt(observation, turn.response_ids))
        left_out = len(self._turns) - self._last_k
        if left_out <= 0:
            return self._joints[-1]
        opening = self._opening(f"[{_count(left_out)} left out here.]", self._turns[left_out].observation)
        behind = zip(self._turns[left_out:], self._joints[left_out:], strict=True)
        return ContextReset((*opening, *(token for turn, joint in behind for token in (*turn.response_ids, *joint))))


class SingleTurn(Context):
    """One message a turn, with a summary of the turns behind."""

    def __init__(self, chat: PromptFormat, last_k: int) -> None:
        super().__init__(chat, last_k)
        self._lines: list[str] = []

    def advance(self, turn: Turn, answer: str, observation: str) -> tuple[int, ...]:
        said = " ".join(answer.split())
        if len(said) > SUMMARY_CHARS:
            said = f"{said[: SUMMARY_CHARS - 3]}..."
        validity, reward = "" if turn.valid else " (not valid)", turn.reward + 0.0  # -0.0 reads as 0
        self._lines.append(f"{len(self._lines) + 1}. {said or 'no answer'}{validity}: reward {reward:.3g}")
        earlier = max(0, len(self._lines) - SUMMARY_TURNS)
        heading = f"Turns so far ({_count(earlier)} before these):" if earlier else "Turns so far:"
        return ContextReset(self._opening("\n".join([heading, *self._lines[earlier:]]), observation))


class PresentTurn(Context):
    """The present observation alone: for environments whose observation tells the whole state."""

    def advance(self, turn: Turn, answer: str, observation: str) -> tuple[int, ...]:
        return ContextReset(self._chat.first_prompt(self._instructions, observation, self._few_shot))


def _count(turns: int) -> str:
    return f"{turns} turn{'' if turns == 1 else 's'}"


CONTEXTS: dict[str, Callable[[PromptFormat, int], Context]] = {
    "full": FullContext,
    "last_k": LastTurns,
    "single_turn": SingleTurn,
    "markov": PresentTurn,
}


def make_context(mode: str, last_k: int, chat: PromptFormat) -> Context:
    """The context of an episode; `last_k` is for the mode of that name."""
    if mode not in CONTEXTS:
        raise UnknownName(f"unknown context '{mode}': {did_you_mean(mode, CONTEXTS)}")
    return CONTEXTS[mode](chat, last_k)
