"""Questions from a file of the user's own, with a reward of the user's choice: data and grading without writing a class.

By default one answer decides. With more turns, a wrong answer is told as such (a reward may say more), and another may follow. Only the
answer that ends the episode is paid, so that failing first never pays more than being right at once. An empty answer is invalid and uses
its turn. There is no randomness in an episode: `env_seed` changes nothing.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from pydantic import field_validator

from tether.core.enums import Split
from tether.core.types import Observation
from tether.envs.base import OptionsT, Outcome, TextEnv, TurnOptions, Work
from tether.envs.dataset import BadRows, Pool
from tether.envs.qa import prompt
from tether.envs.qa.dataset import IMAGE_COLUMN, Item, has_pictures, load, read_exact, with_picture
from tether.envs.qa.rewards import Grader, check_reward, make_grader
from tether.envs.wording import Example

Generator = Callable[[int, Split], Item]

CORRECT = "Correct!"
INCORRECT = "Incorrect."
THINK_AGAIN = "Incorrect. Please think again."
NO_ANSWER = "No answer was given. Please answer the question."


class QAOptions(TurnOptions):
    """Options of qa."""

    data: str | None = None
    """A file or data set of questions; without it, questions about capitals."""
    reward: str = "exact_match"
    """How answers are graded: exact_match, math, code, or a function of yours as module:function."""
    fields: dict[str, str] = {}
    """Columns under other names, such as {question: Question, answer: Answer}."""
    template: str | None = None
    """The question composed from columns, such as "{context} Question: {question}"."""
    image_column: str | None = IMAGE_COLUMN
    """The column with a picture of each question, where rows have one; null: none is looked for."""
    bad_rows: BadRows = "error"
    """What to do with a malformed row."""

    @field_validator("reward")
    @classmethod
    def _reward(cls, name: str) -> str:
        return check_reward(name)

    @field_validator("template")
    @classmethod
    def _template(cls, text: str | None) -> str | None:
        if text is not None and "{" not in text:
            raise ValueError("names no column; write columns in braces, such as {context} {question}")
        return text


class Questions(TextEnv[OptionsT]):
    """Answer a question: what draws questions, what grades answers and what the agent is told are handed in."""

    metrics: ClassVar[tuple[str, ...]] = ("attempts",)
    retries: ClassVar[bool] = True
    """A wrong answer may be followed by another one while turns are left."""

    def __init__(self, options: OptionsT, generator: Generator, grader: Grader, wording: prompt.Wording) -> None:
        super().__init__(options)
        self._make, self._grade, self._wording = generator, grader, wording

    def generate(self, seed: int) -> None:
        self.item: Item = self._make(seed, self.options.split)
        self._attempts = 0

    def take(self, answer: str) -> Outcome:
        if not answer.strip():
            return Outcome(NO_ANSWER, valid=False, info=self._info(correct=False))
        graded = self._grade(self.item, answer)
        if not graded.valid:
            failed = {"grading_error": graded.error} if graded.error else {}
            return Outcome(graded.feedback, valid=False, info={**self._info(correct=False), **failed})
        self._attempts += 1
        last = not self.retries or self._turns + 1 >= self.max_turns
        done = graded.success or last
        text = graded.feedback or (CORRECT if graded.success else INCORRECT if last else THINK_AGAIN)
        return Outcome(text, graded.reward if done else 0.0, done, graded.success, info=self._info(correct=graded.success))

    def _info(self, *, correct: bool) -> dict[str, Any]:
        return {"attempts": self._attempts, "correct": correct}

    @property
    def work(self) -> Work:
        return self._grade.work

    @property
    def workers(self) -> int:
        """Answers graded at the same time, where grading waits for other processes or servers."""
        return self._grade.workers

    @property
    def reward_range(self) -> tuple[float, float]:
        return self._grade.bounds

    @property
    def instance(self) -> str:
        return self.item.fingerprint

    @property
    def task(self) -> str:
        return self._wording.task(self.max_turns if self.retries else 1)

    @property
    def example(self) -> Example:
        return self._wording.example

    @property
    def refused(self) -> str:
        return self._wording.refused

    def worked_examples(self, count: int) -> tuple[Example, ...]:
        return self._wording.worked

    def opening(self) -> str:
        return self.item.question

    @property
    def shows_images(self) -> bool:
        return isinstance(self._make, Pool) and has_pictures(self._make)

    def observe(self, head: str, body: str | None = None) -> Observation:
        shown = super().observe(head, body)
        return shown if self.item.image is None or body is not None else Observation(shown.text, self.item.image.image().pixels)


class QA(Questions[QAOptions]):
    """Answer a question of a file."""

    name = "qa"
    Options = QAOptions
    read_row = staticmethod(with_picture(read_exact))
    pictures = "where rows have an image"
    owner_options = ("data", "reward")

    def __init__(self, options: QAOptions | None = None, *, generator: Generator | None = None, reward: Grader | None = None) -> None:
        chosen = options or QAOptions()
        super().__init__(
            chosen,
            generator
            or load(chosen.data, chosen.reward, chosen.bad_rows, tuple(chosen.fields.items()), chosen.template, chosen.image_column),
            reward or make_grader(chosen.reward),
            prompt.wording_of(chosen.reward),
        )

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.reward, self.max_turns)
