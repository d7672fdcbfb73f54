"""Countdown as a text task: make the target from the given numbers; an exact parser checks the answer.

By default one answer decides. With more turns, a wrong answer gets the reason and may be corrected. Only the answer that ends the episode
has a reward, so that failing first never pays more than solving at once. There is no randomness in an episode: `env_seed` changes nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self

from pydantic import Field, model_validator

from tether.core.enums import Split
from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.countdown import prompt
from tether.envs.countdown.expression import ExpressionResult, Use, check_answer
from tether.envs.countdown.generator import MAX_NUMBERS, OPERATIONS, Generator, Puzzle, RandomPuzzle, load, read_puzzle
from tether.envs.countdown.prompt import puzzle_text
from tether.envs.dataset import BadRows
from tether.envs.wording import Example, draw_examples

Reward = Callable[[ExpressionResult], float]
"""From the result of the answer that ends the episode to its reward."""


@dataclass(frozen=True, slots=True)
class TargetReward:
    """The paper's three amounts, by default."""

    solved: float = 1.0
    missed: float = 0.1
    """A well-formed expression over the allowed numbers with another value, or none (it divides by zero)."""
    refused: float = 0.0
    """Not an expression, or not over the allowed numbers."""

    def __call__(self, result: ExpressionResult) -> float:
        if result.solved:
            return self.solved
        return self.missed if result.legal else self.refused


def reply(result: ExpressionResult, puzzle: Puzzle, *, over: bool) -> str:
    """The reply to an answer; while turns are left, with the puzzle once more."""
    if result.solved:
        return f"The expression is {puzzle.target}."
    return result.reason if over else f"{result.reason} Try again.\n{puzzle_text(puzzle)}"


MAX_TARGET = 1_000_000
"""Of a generated puzzle; taking apart larger ones would take noticeable time."""


class CountdownOptions(TurnOptions):
    """Options of countdown."""

    use: Use = "at_most_once"
    """How often each number may be used."""
    numbers: tuple[int, int] = (3, 4)
    """How many numbers a generated puzzle has, at least and at most."""
    max_number: int = Field(default=99, ge=1, le=9999)
    """The largest number of a generated puzzle."""
    target: tuple[int, int] = (10, 100)
    """The least and the largest target of a generated puzzle."""
    data: str | None = None
    """A file or data set of puzzles to use instead of generated ones."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row of it."""
    fields: dict[str, str] = {}
    """Columns of it under other names, such as {nums: numbers}."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        least, most = self.numbers
        if not 2 <= least <= most <= MAX_NUMBERS:
            raise ValueError(f"numbers: got {least}, {most}; give the fewest and the most, from 2 to {MAX_NUMBERS}, such as 3, 4")
        low, high = self.target
        if not 1 <= low <= high <= MAX_TARGET:
            raise ValueError(f"target: got {low}, {high}; give the least and the largest, from 1 to {MAX_TARGET}, such as 10, 100")
        reach = max(self.max_number**most, self.max_number * most)
        if low > reach:
            raise ValueError(f"target: got {low} at least, but {most} numbers up to {self.max_number} make {reach} at most; lower it")
        return self


class Countdown(TextEnv[CountdownOptions]):
    """Make the target of the numbers."""

    name = "countdown"
    Options = CountdownOptions
    default_few_shot = 6
    how_to_think = prompt.HOW_TO_THINK
    read_row = staticmethod(read_puzzle)

    def __init__(
        self, options: CountdownOptions | None = None, *, generator: Generator | None = None, reward: Reward | None = None
    ) -> None:
        super().__init__(options or CountdownOptions())
        self._make: Generator = generator or _generator(self.options)
        self._pay: Reward = reward or TargetReward()

    def generate(self, seed: int) -> None:
        self.puzzle: Puzzle = self._make(seed, self.options.split)

    def take(self, answer: str) -> Outcome:
        result = check_answer(answer, self.puzzle, self.options.use)
        last = self._turns + 1 >= self.max_turns
        over = result.solved or last
        return Outcome(
            text=reply(result, self.puzzle, over=over),
            reward=self._pay(result) if over else 0.0,
            # An empty answer is no attempt: the episode runs out of turns instead of failing.
            done=result.solved or (last and bool(answer.strip())),
            success=result.solved,
            valid=result.legal,
            info={"value": None if result.value is None else str(result.value), "reason": result.reason},
        )

    @property
    def reward_range(self) -> tuple[float, float]:
        if not isinstance(self._pay, TargetReward):
            return super().reward_range
        amounts = (self._pay.solved, self._pay.missed, self._pay.refused, 0.0)
        return min(amounts), max(amounts)

    @property
    def instance(self) -> str:
        return self.puzzle.fingerprint

    @property
    def parameters(self) -> Mapping[str, str]:
        used = "".join(symbol for symbol in OPERATIONS if symbol in (self.puzzle.solution or ""))
        return {"numbers": str(len(self.puzzle.numbers)), "operations": used}

    @property
    def task(self) -> str:
        return prompt.task(self.options.use)

    @property
    def example(self) -> Example:
        return self.other_example([prompt.shown(puzzle, self.options.use) for puzzle in prompt.EXAMPLE_PUZZLES])

    @property
    def refused(self) -> str:
        return prompt.refused(self.options.use)

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.use)

    def worked_examples(self, count: int) -> list[Example]:
        solved = draw_examples(count, lambda seed: prompt.worked_by_sums(self._make(seed, Split.TRAIN)))
        return prompt.with_some_out_of_reach(solved)

    def opening(self) -> str:
        return puzzle_text(self.puzzle)


def _generator(options: CountdownOptions) -> Generator:
    if options.data is not None:
        return load(options.data, options.bad_rows, tuple(options.fields.items()))
    return RandomPuzzle(options.numbers, options.max_number, options.target)
