"""An environment that costs nothing and whose lengths are known: iteration.py plays it where a run would play a task.

Observations are a number and so many words, answers are not read. An episode lasts `max_turns` turns and pays 0 or 1 at the end. How often it
pays is drawn for each prompt from Beta(0.3, 0.3): some prompts nearly always, some nearly never, few in between, as in a run with an agent that has
learned part of a task. Groups therefore differ in reward variance, and a filter that follows it finds something to leave out.
"""

from pydantic import Field

from tether.core.seeding import generator
from tether.core.types import Observation
from tether.envs.base import Outcome, TurnEnv, TurnOptions, Work

WORD = " go"
TAG = "never"
"""Of answers: a tag that no model writes, so that none ends a response."""
SPREAD = 0.3
"""Both parameters of the Beta distribution."""


class FixedOptions(TurnOptions):
    first_words: int = Field(default=100, ge=0)
    """Of the first observation."""
    words: int = Field(default=50, ge=0)
    """Of every other one."""


def shown(number: int, words: int) -> str:
    """The text of an observation."""
    return f"{number % 1_000_000:06d}{WORD * words}"


class FixedTask(TurnEnv[FixedOptions]):
    """Turns of fixed lengths and a reward by chance."""

    name = "fixed_task"
    Options = FixedOptions
    work: Work = "inline"
    reply_tags = (TAG,)

    @property
    def instructions(self) -> str:
        return "Go on."

    def generate(self, seed: int) -> None:
        self._number = seed
        self._chance = float(generator("benchmark", "difficulty", seed).beta(SPREAD, SPREAD))

    def seed_randomness(self, env_seed: int) -> None:
        self._solves = generator("benchmark", "outcome", env_seed).random() < self._chance

    def take(self, answer: str) -> Outcome:
        done = self._turns + 1 == self.max_turns
        success = done and bool(self._solves)
        return Outcome("", reward=float(success), done=done, success=success)

    def observe(self, head: str, body: str | None = None) -> Observation:
        return Observation(shown(self._number, self.options.first_words if body is None else self.options.words))
