"""Questions of mathematics with a number of attempts: the reward halves with every wrong answer, and a right one ends the episode.

A reply without an answer uses a turn but no attempt, so `max_turns` may be larger than `attempts` to leave room for such replies. There is
no randomness in an episode: `env_seed` changes nothing. Comparing answers as mathematics may wait for a worker process (`answers/`), so
the steps of many such episodes run in threads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from pydantic import Field, model_validator

from tether.envs.base import Outcome, TextEnv, TurnOptions, Work
from tether.envs.dataset import BadRows
from tether.envs.metamathqa import prompt
from tether.envs.metamathqa.compare import Match, same
from tether.envs.metamathqa.dataset import load, read_problem
from tether.envs.metamathqa.generator import Generator, Problem, WordProblems
from tether.envs.metamathqa.symbolic import NUM_WORKERS
from tether.envs.wording import Example

Reward = Callable[[bool, int], float]
"""From whether an attempt was right, and its number counted from 0, to its reward."""


@dataclass(frozen=True, slots=True)
class HalvingReward:
    """1, 1/2, 1/4 and so on, by default."""

    first: float = 1.0
    factor: float = 0.5

    def __call__(self, correct: bool, attempt: int) -> float:
        return self.first * self.factor**attempt if correct else 0.0


CORRECT = "Correct!"
INCORRECT = "Incorrect."
THINK_AGAIN = "Incorrect. Please think again."
NO_ANSWER = "No answer was given. Please answer the question."


class MetaMathQAOptions(TurnOptions):
    """Options of metamathqa."""

    max_turns: int = Field(default=1, ge=1)
    """Replies per episode; at least as many as attempts, and by default just as many."""
    attempts: int = Field(default=1, ge=1, le=64)
    """Answers per episode."""
    match: Match = "math"
    """How an answer is compared with the label."""
    kinds: list[str] | None = None
    """Kinds of generated problems; by default all of them."""
    data: str | None = None
    """A file or data set of questions to use instead of generated ones."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row of it."""
    fields: dict[str, str] = {}
    """Columns of it under other names, such as {question: Question, answer: Answer}."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_turns(cls, values: Any) -> Any:
        if isinstance(values, dict) and "max_turns" not in values and isinstance(values.get("attempts"), int):
            return {**values, "max_turns": max(1, values["attempts"])}
        return values

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.max_turns < self.attempts:
            raise ValueError(
                f"max_turns: got {self.max_turns} for {self.attempts} attempts; give at least {self.attempts}, or leave it out"
            )
        if self.kinds is not None:
            WordProblems(tuple(self.kinds))  # complains about unknown names
        return self


class MetaMathQA(TextEnv[MetaMathQAOptions]):
    """Answer a question of mathematics."""

    name = "metamathqa"
    Options = MetaMathQAOptions
    default_few_shot = 1
    metrics = ("attempts",)
    example, refused = prompt.EXAMPLE, prompt.REFUSED
    read_row = staticmethod(read_problem)

    def __init__(
        self, options: MetaMathQAOptions | None = None, *, generator: Generator | None = None, reward: Reward | None = None
    ) -> None:
        super().__init__(options or MetaMathQAOptions())
        self._make: Generator = generator or _generator(self.options)
        self._pay: Reward = reward or HalvingReward()

    def generate(self, seed: int) -> None:
        self.problem: Problem = self._make(seed, self.options.split)
        self._attempts = 0

    def take(self, answer: str) -> Outcome:
        if not answer.strip():
            return Outcome(NO_ANSWER, valid=False, info=self._info(correct=False))
        correct = same(self.problem.label, answer, self.options.match)
        reward = self._pay(correct, self._attempts)
        self._attempts += 1
        spent = self._attempts >= self.options.attempts
        text = CORRECT if correct else INCORRECT if spent else THINK_AGAIN
        return Outcome(text, reward, done=correct or spent, success=correct, info=self._info(correct=correct))

    def _info(self, *, correct: bool) -> dict[str, Any]:
        return {"attempts": self._attempts, "correct": correct}

    @property
    def work(self) -> Work:
        return "wait" if self.options.match == "math" else "inline"

    @property
    def workers(self) -> int:
        """A few worker processes compare for all: steps queue for them with their clocks not yet running."""
        return NUM_WORKERS

    @property
    def reward_range(self) -> tuple[float, float]:
        if not isinstance(self._pay, HalvingReward):
            return super().reward_range
        amounts = [self._pay(True, attempt) for attempt in range(self.options.attempts)]
        return min(0.0, *amounts), max(0.0, *amounts)

    @property
    def instance(self) -> str:
        return self.problem.fingerprint

    @property
    def categories(self) -> Mapping[str, str]:
        return self.problem.categories or ({"kind": self.problem.kind} if self.problem.kind else {})

    @property
    def task(self) -> str:
        return prompt.task(self.options.attempts)

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.attempts)

    def worked_examples(self, count: int) -> tuple[Example, ...]:
        return prompt.WORKED

    def opening(self) -> str:
        return self.problem.question


def _generator(options: MetaMathQAOptions) -> Generator:
    if options.data is not None:
        return load(options.data, options.bad_rows, tuple(options.fields.items()))
    return WordProblems(tuple(options.kinds)) if options.kinds is not None else WordProblems()
