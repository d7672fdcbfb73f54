"""Word problems of grade school, written by us: a seed draws a kind, its numbers, its people and its wording.

Every answer is exact, and the steps that lead to it are part of the problem. The kinds are in kinds.py, their words in data/problems.toml; a kind
whose numbers make no sensible story is drawn again. A generator is any callable from seed and split to a problem.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from tether.core.enums import Split
from tether.core.errors import BadInput, did_you_mean
from tether.envs.metamathqa.kinds import KINDS
from tether.envs.metamathqa.story import Story, show
from tether.envs.splits import draw

Generator = Callable[[int, Split], "Problem"]


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its answer. Example: Problem("What is 2 + 3?", "5")."""

    question: str
    label: str
    """The answer, as the data or the generator writes it."""
    kind: str = ""
    """Which kind of generated problem; empty for one from data."""
    form: str = ""
    """What it asks, for kinds that ask more than one thing."""
    parameters: Mapping[str, Fraction] = field(default_factory=dict, compare=False)
    """The numbers in a generated question, by name."""
    steps: tuple[str, ...] = ()
    """Equations from the parameters to the answer, for a generated one."""
    categories: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What the data says of it: its subject, its level."""

    @property
    def fingerprint(self) -> str:
        return f"{self.question}\n{self.label}"

    @property
    def summary(self) -> str:
        """In a line, for people; the end of a long question is the part that asks."""
        question = " ".join(self.question.split())
        return f"{question if len(question) <= 110 else f'... {question[-106:]}'} -> {self.label}"


@dataclass(frozen=True, slots=True)
class WordProblems:
    """Problems of some kinds, each as often as any other."""

    kinds: tuple[str, ...] = tuple(KINDS)

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in KINDS]
        if unknown:
            raise BadInput(f"kinds: unknown kind '{unknown[0]}': {did_you_mean(unknown[0], KINDS)}")
        if not self.kinds:
            raise BadInput("kinds: got an empty list; name at least one, or leave it out for all of them")

    def __call__(self, seed: int, split: Split) -> Problem:
        return draw("metamathqa", seed, split, self._propose)

    def _propose(self, rng: random.Random) -> Problem | None:
        story = Story(rng)
        kind = story.choose(self.kinds)
        drawn = KINDS[kind](story)
        while drawn is None:  # the same kind again, or kinds that refuse often would be rare
            drawn = KINDS[kind](story)
        return Problem(drawn.question, show(drawn.answer), kind, drawn.form, drawn.parameters, drawn.steps)
