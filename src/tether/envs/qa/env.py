"""Questions from a file of the user's own, with a reward of the user's choice: data and grading without writing a class.

By default one answer decides. With more turns, a wrong answer is told as such (a reward may say more), and another may follow. Only the
answer that ends the episode is paid, so that failing first never pays more than being right at once. An empty answer is invalid and uses
its turn. There is no randomness in an episode: `env_seed` changes nothing.
"""

from collections.abc import Callable

from pydantic import field_validator

from tether.core.enums import Split
from tether.envs.base import Outcome, TextEnv, TurnOptions, Work
from tether.envs.dataset import BadRows
from tether.envs.qa import prompt
from tether.envs.qa.dataset import Item, load, read_exact
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


class QA(TextEnv[QAOptions]):
    """Answer a question."""

    name = "qa"
    Options = QAOptions
    metrics = ("attempts",)
    read_row = staticmethod(read_exact)
    owner_options = ("data", "reward")

    def __init__(self, options: QAOptions | None = None, *, generator: Generator | None = None, reward: Grader | None = None) -> None:
        super().__init__(options or QAOptions())
        chosen = self.options
        self._make: Generator = generator or load(
            chosen.data, chosen.reward, chosen.bad_rows, tuple(chosen.fields.items()), chosen.template
        )
        self._grade: Grader = reward or make_grader(chosen.reward)
        self._wording = prompt.wording_of(chosen.reward)

    def generate(self, seed: int) -> None:
        self.item: Item = self._make(seed, self.options.split)
        self._attempts = 0

    def take(self, answer: str) -> Outcome:
        if not answer.strip():
            return Outcome(NO_ANSWER, valid=False, info=self._info(correct=False))
        graded = self._grade(self.item, answer)
        if not graded.valid:
            return Outcome(graded.feedback, valid=False, info=self._info(correct=False))
        self._attempts += 1
        last = self._turns + 1 >= self.max_turns
        done = graded.success or last
        text = graded.feedback or (CORRECT if graded.success else INCORRECT if last else THINK_AGAIN)
        return Outcome(text, graded.reward if done else 0.0, done, graded.success, info=self._info(correct=graded.success))

    def _info(self, *, correct: bool) -> dict[str, bool | int]:
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
        return self._wording.task(self.max_turns)

    @property
    def example(self) -> Example:
        return self._wording.example

    @property
    def refused(self) -> str:
        return self._wording.refused

    @property
    def paper(self) -> str:
        return prompt.paper(self.options.reward, self.max_turns)

    def worked_examples(self, count: int) -> tuple[Example, ...]:
        return self._wording.worked

    def opening(self) -> str:
        return self.item.question
