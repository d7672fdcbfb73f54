"""An environment of one's own, whole: put numbers into order. docs/environments/custom.md explains it part by part."""

import random
from dataclasses import dataclass

from pydantic import Field

from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.splits import draw


class SortOptions(TurnOptions):
    max_turns: int = Field(default=3, ge=1)
    count: int = Field(default=4, ge=2, le=20)


@dataclass(frozen=True)
class Numbers:
    fingerprint: str


class SortNumbers(TextEnv[SortOptions]):
    name = "sort_numbers"
    Options = SortOptions
    reward_range = (0.0, 1.0)
    task = "Put the numbers into ascending order. Answer with all of them, separated by spaces."

    def generate(self, seed: int) -> None:
        self.numbers = draw(self.name, seed, self.options.split, self._propose)

    def _propose(self, rng: random.Random) -> Numbers:
        return Numbers(" ".join(map(str, rng.sample(range(100), self.options.count))))

    @property
    def instance(self) -> str:
        return self.numbers.fingerprint

    def opening(self) -> str:
        return f"Numbers: {self.instance}"

    def take(self, answer: str) -> Outcome:
        given, right = answer.split(), sorted(self.instance.split(), key=int)
        if sorted(given) != sorted(right):
            return Outcome(f"These are not the numbers. {self.opening()}", valid=False)
        if given != right:
            return Outcome(f"That is not the order. {self.opening()}")
        return Outcome("They are in order.", reward=1.0, done=True, success=True)
