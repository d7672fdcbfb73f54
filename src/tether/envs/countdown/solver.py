"""An exact solver, for demonstrations and tests: an expression that makes the target, or the certainty that there is none.

A set of numbers makes what its two parts make, joined. Instead of listing everything that all the numbers make, the search goes
backwards: for each part and each of its values, the value the other part would have to make follows from the target, and is looked
up in a table (up to `TABLED` numbers) or searched for in turn. Negative values are never needed on the way to a positive target:
where one occurs, the same expression with the terms of a difference exchanged does without it.
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import combinations

from tether.envs.countdown.expression import Use

TABLED = 3
"""Sets of up to so many numbers are listed in full; four numbers make some thousand values, five a hundred thousand."""

_Table = dict[Fraction, str]

_INNERMOST = re.compile(r"\(([\d/]+) ([-+*/]) ([\d/]+)\)")
_SINGLE = re.compile(r"([\d/]+) ([-+*/]) ([\d/]+)")


def solve(target: int, numbers: Sequence[int], use: Use = "at_most_once") -> str | None:
    """An expression with the target's value that uses the numbers as the rule says, the shortest first; None if there is none.

    >>> solve(24, [4, 7, 8, 8])
    '(7 - (8 / 8)) * 4'
    """
    search = _Search(tuple(numbers))
    least = len(numbers) if use == "exactly_once" else 1
    for count in range(least, len(numbers) + 1):
        for chosen in combinations(range(len(numbers)), count):
            found = search.make(Fraction(target), chosen)
            if found is not None:
                return found[1:-1] if found.startswith("(") else found
    return None


def near_misses(target: int, numbers: Sequence[int], count: int) -> list[str]:
    """Expressions near the target that miss it, whole numbers all the way: the nearest first, no two of one value.

    >>> near_misses(29, [7, 3, 12], 3)
    ['12 + (7 * 3)', '7 + (3 + 12)', '3 * 12']
    """
    search = _Search(tuple(numbers))
    found: _Table = {}
    for size in range(2, min(TABLED, len(numbers)) + 1):
        for chosen in combinations(range(len(numbers)), size):
            for value, text in search.make_all(chosen).items():
                if 0 < value != target and all(step.rpartition(" = ")[2].isdecimal() for step in sums(text[1:-1])):
                    found.setdefault(value, text[1:-1])
    nearest = sorted(found, key=lambda value: (abs(value - target), value))
    return [found[value] for value in nearest[:count]]


class _Search:
    """What the members of one list of numbers make; a set is a sorted tuple of places in the list."""

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self._numbers = numbers
        self._table = cache(self._listed)

    def make_all(self, places: tuple[int, ...]) -> _Table:
        """Every value that all these places make, with an expression."""
        return self._table(places)

    def make(self, target: Fraction, places: tuple[int, ...]) -> str | None:
        """An expression of all these places with the target's value (not negative)."""
        if len(places) <= TABLED:
            return self._table(places).get(target)
        for small, large in _halves(places):
            for value, text in self._table(small).items():
                for wanted, form in _missing(value, target):
                    other = self.make(wanted, large)
                    if other is not None:
                        return form.format(text, other)
        return None

    def _listed(self, places: tuple[int, ...]) -> _Table:
        """Everything these places make, each value with one expression."""
        if len(places) == 1:
            number = self._numbers[places[0]]
            return {Fraction(number): str(number)}
        table: _Table = {}
        for small, large in _halves(places):
            for left, left_text in self._table(small).items():
                for right, right_text in self._table(large).items():
                    for value, form in _joined(left, right):
                        if value not in table:
                            table[value] = form.format(left_text, right_text)
        return table


def _halves(places: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Every way to part a set in two, the smaller part first."""
    for count in range(1, len(places) // 2 + 1):
        for small in combinations(places, count):
            large = tuple(place for place in places if place not in small)
            if count < len(large) or small[0] == places[0]:  # two halves of one size: once, not twice
                yield small, large


def _joined(left: Fraction, right: Fraction) -> Iterator[tuple[Fraction, str]]:
    yield left + right, "({0} + {1})"
    yield (left - right, "({0} - {1})") if left >= right else (right - left, "({1} - {0})")
    yield left * right, "({0} * {1})"
    if right:
        yield left / right, "({0} / {1})"
    if left:
        yield right / left, "({1} / {0})"


def _missing(value: Fraction, target: Fraction) -> Iterator[tuple[Fraction, str]]:
    """What must stand at {1} for the form, with the value at {0}, to be the target; never negative."""
    if target >= value:
        yield target - value, "({0} + {1})"
    if value >= target:
        yield value - target, "({0} - {1})"
    yield value + target, "({1} - {0})"
    if value:
        yield target / value, "({0} * {1})"
        yield target * value, "({1} / {0})"
        if target:
            yield value / target, "({0} / {1})"


def sums(expression: str) -> list[str]:
    """The steps of an expression in full parentheses, innermost first.

    >>> sums("1 + ((5 * 6) - 7)")
    ['5 * 6 = 30', '30 - 7 = 23', '1 + 23 = 24']
    """
    steps = []
    while (step := _INNERMOST.search(expression) or _SINGLE.fullmatch(expression)) is not None:
        left, right = Fraction(step[1]), Fraction(step[3])
        value = {"+": left + right, "-": left - right, "*": left * right, "/": left / right if right else left}[step[2]]
        steps.append(f"{left} {step[2]} {right} = {value}")
        expression = f"{expression[: step.start()]}{value}{expression[step.end() :]}"
    return steps
