"""What every kind of word problem shares: random draws, people, how numbers are written, and the draft of a problem.

A kind draws its numbers so that the story makes sense (whole people, positive change), writes the question, and computes the answer
exactly. `parameters` are the numbers in the question, by name; `steps` are equations that lead from them to the answer.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

T = TypeVar("T")
Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Person:
    """A person in a story, with the pronouns."""

    name: str
    they: str
    their: str


_WOMEN = "Amara Beatriz Chloe Divya Elena Farah Grace Hana Ingrid Jasmine Keiko Lucia Maya Nadia Olga Priya Rosa Sofia Tessa Yara"
_MEN = "Ahmed Bruno Carlos Dmitri Emeka Felix Gabriel Hugo Ivan Jonas Kenji Liam Mateo Nikhil Omar Pavel Rafael Samuel Tomas Victor"
PEOPLE = (*(Person(name, "she", "her") for name in _WOMEN.split()), *(Person(name, "he", "his") for name in _MEN.split()))


@dataclass(frozen=True, slots=True)
class ProblemDraft:
    """A problem as its kind wrote it."""

    question: str
    answer: Fraction
    parameters: dict[str, Fraction]
    steps: tuple[str, ...]
    form: str = ""
    """What is asked, for kinds that ask more than one thing."""


ProblemKind = Callable[["Story"], ProblemDraft | None]
"""Writes a problem; None where the numbers drawn make no good one."""


class Story:
    """The random draws of one problem."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def between(self, low: int, high: int, step: int = 1) -> int:
        """A number from low to high, both included, in steps."""
        return low + step * int(self._rng.random() * ((high - low) // step + 1))

    def choose(self, options: Sequence[T]) -> T:
        return options[int(self._rng.random() * len(options))]

    def people(self, count: int) -> list[Person]:
        """Different people."""
        return self._rng.sample(PEOPLE, count)

    def person(self) -> Person:
        return self.choose(PEOPLE)


def draft(question: str, answer: Number, steps: Sequence[str], *, form: str = "", **parameters: Number) -> ProblemDraft:
    """A draft with every number exact."""
    return ProblemDraft(question, Fraction(answer), {name: Fraction(value) for name, value in parameters.items()}, tuple(steps), form)


def show(value: Number) -> str:
    """A number as an answer gives it: whole, as a decimal of at most four places, or as a fraction.

    >>> show(12), show(Fraction(25, 2)), show(Fraction(1, 3))
    ('12', '12.5', '1/3')
    """
    value = Fraction(value)
    if value.denominator == 1:
        return str(value.numerator)
    if 10_000 % value.denominator == 0:
        return f"{float(value):.4f}".rstrip("0")
    return f"{value.numerator}/{value.denominator}"


def money(value: Number) -> str:
    """An amount in dollars: $7 or $7.50."""
    value = Fraction(value)
    return f"${value.numerator}" if value.denominator == 1 else f"${float(value):.2f}"


def plural(count: Number, noun: str) -> str:
    """A count with its noun: 1 ticket, 3 tickets."""
    return f"{show(count)} {noun}" if count == 1 else f"{show(count)} {noun}s"
