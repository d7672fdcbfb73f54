"""The words and numbers of a word problem: random draws, people, how numbers are written, and the equations that lead to an answer.

data/problems.toml holds what each problem says and its equations without their right sides; answers are exact.
"""

import ast
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

from tether.envs.dataset import read_packaged

T = TypeVar("T")
Number = int | Fraction


@dataclass(frozen=True, slots=True)
class Person:
    """A person in a story, with the pronouns."""

    name: str
    they: str
    their: str

    @property
    def They(self) -> str:
        return self.they.capitalize()

    def __format__(self, _: str) -> str:
        return self.name


_WOMEN = "Amara Beatriz Chloe Divya Elena Farah Grace Hana Ingrid Jasmine Keiko Lucia Maya Nadia Olga Priya Rosa Sofia Tessa Yara"
_MEN = "Ahmed Bruno Carlos Dmitri Emeka Felix Gabriel Hugo Ivan Jonas Kenji Liam Mateo Nikhil Omar Pavel Rafael Samuel Tomas Victor"
PEOPLE = (*(Person(name, "she", "her") for name in _WOMEN.split()), *(Person(name, "he", "his") for name in _MEN.split()))


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


class _Shown(Fraction):
    """A number in a sentence: {x} as an answer gives it, {x:/} as a fraction, {x:$} as money, {x:hour} with its noun (1 hour, 3 hours)."""

    def __format__(self, form: str) -> str:
        if form in ("", "/"):
            return str(Fraction(self)) if form else show(self)
        return money(self) if form == "$" else f"{show(self)} {form}{'' if self == 1 else 's'}"


@dataclass(frozen=True, slots=True)
class ProblemDraft:
    """A problem as its kind wrote it."""

    question: str
    answer: Fraction
    parameters: dict[str, Fraction]
    """The numbers in the question, by name."""
    steps: tuple[str, ...]
    """Equations that lead from them to the answer."""
    form: str = ""
    """What is asked, for kinds that ask more than one thing."""


class Story:
    """The random draws of one problem, and its words."""

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

    def say(self, problem: str, values: Mapping[str, Any]) -> str:
        """One of the wordings of a problem; nothing is drawn where there is only one."""
        wordings = _written(problem)["says"]
        return (self.choose(wordings) if len(wordings) > 1 else wordings[0]).format_map(_shown(values))

    def told(self, problem: str, numbers: Mapping[str, Number], *, form: str | None = None, **words: Any) -> ProblemDraft:
        """The problem of this name ("ages.sum": its form is "sum"), with the numbers of the question and whatever else its words need."""
        values = _shown({**words, **numbers})
        question = self.say(problem, values)
        steps, answer = [], Fraction(0)
        for place, template in enumerate(_written(problem)["steps"], 1):
            step = template.format_map(values)
            if "=" not in step:
                answer = compute(step)
                values[f"s{place}"] = _Shown(answer)
                step = f"{step} = {show(answer)}"
            steps.append(step)
        exact = {name: Fraction(value) for name, value in numbers.items()}
        return ProblemDraft(question, answer, exact, tuple(steps), problem.partition(".")[2] if form is None else form)


def _written(problem: str) -> Mapping[str, Any]:
    kind, _, form = problem.partition(".")
    table: Mapping[str, Any] = read_packaged(__package__, "problems.toml")[kind]
    return table[form] if form else table


def _shown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _Shown(value) if isinstance(value, int | Fraction) else value for name, value in values.items()}


def compute(text: str) -> Fraction:
    """The exact value of a sum in digits, + - * / and parentheses.

    >>> compute("12.5 * (1 - 2/5)")
    Fraction(15, 2)
    """
    return _value(ast.parse(text, mode="eval").body)


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):  # an earlier step may have come out below zero
            return -_value(operand)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _value(left) + _value(right)
        case ast.BinOp(left=left, op=ast.Sub(), right=right):
            return _value(left) - _value(right)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _value(left) * _value(right)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _value(left) / _value(right)
    raise ValueError(f"{ast.unparse(node)} is no sum of numbers")
