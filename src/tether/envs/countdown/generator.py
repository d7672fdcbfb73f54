"""Random puzzles that are solvable because they are made from a solution.

The target is drawn first and taken apart: a value becomes a sum, a difference, a product or a quotient of two others until there are
as many values as numbers are wanted. Read backwards that is a solution that uses every number once, with whole, positive values on
the way, as a person would compute them. Targets are thus evenly spread, and all four operations are common.
A generator is any callable from seed and split to a puzzle.

`load` reads puzzles from rows of public data: {"target": 98, "nums": [44, 19, 35]}, and a "solution" where the file has one. That is the
form of Jiayi-Pan/Countdown-Tasks-3to4. Whether a row can be solved is not checked: for half a million rows that would take hours.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt
from typing import Any

from tether.core.enums import Split
from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, load_instances
from tether.envs.splits import draw

Generator = Callable[[int, Split], "Puzzle"]

OPERATIONS = "+-*/"
_SLACK = 10
"""A value that will be taken apart further may be so many times the largest number: 47 = 940 / 20 = (94 * 10) / (79 - 59)."""


@dataclass(frozen=True, slots=True)
class Puzzle:
    """Numbers and what to make of them. Example: Puzzle(24, (1, 5, 6, 7), "1 + ((5 * 6) - 7)")."""

    target: int
    numbers: tuple[int, ...]
    """In the order shown."""
    solution: str | None = None
    """An expression that makes the target of every number, each used once; None where the data has none."""

    @property
    def fingerprint(self) -> str:
        """The order of the numbers does not matter to the task, so it does not matter to the split."""
        return f"{self.target} from {' '.join(map(str, sorted(self.numbers)))}"

    @property
    def summary(self) -> str:
        """In a line, for people."""
        return f"{self.target} from {', '.join(map(str, self.numbers))}"


@dataclass(slots=True, eq=False)
class _Term:
    """A value and, once it is taken apart, the operation that makes it."""

    value: int
    parts: "tuple[_Term, str, _Term] | None" = None

    def __str__(self) -> str:
        if self.parts is None:
            return str(self.value)
        left, symbol, right = self.parts
        return f"({left} {symbol} {right})"


@dataclass(frozen=True, slots=True)
class RandomPuzzle:
    """Puzzles with `count` numbers from 1 to `max_number` and a target in `target`; both ranges include their ends."""

    count: tuple[int, int] = (3, 4)
    max_number: int = 99
    target: tuple[int, int] = (10, 100)

    def __call__(self, seed: int, split: Split) -> Puzzle:
        return draw("countdown", seed, split, self._propose)

    def _propose(self, rng: random.Random) -> Puzzle | None:
        count, target = _between(rng, *self.count), _between(rng, *self.target)
        root = _Term(target)
        terms = [root]
        while len(terms) < count:
            place = max(range(len(terms)), key=lambda at: terms[at].value)
            if terms[place].value <= self.max_number:  # nothing has to be taken apart, so anything may be
                place = int(rng.random() * len(terms))
            term = terms.pop(place)
            limit = self.max_number if len(terms) == count - 2 else _SLACK * self.max_number
            parts = _take_apart(rng, term.value, limit, self.max_number)
            if parts is None:
                return None
            left, symbol, right = parts
            term.parts = _Term(left), symbol, _Term(right)
            terms += term.parts[0], term.parts[2]
        numbers = [term.value for term in terms]
        if max(numbers) > self.max_number or target in numbers:  # a number that is the target leaves nothing to do
            return None
        rng.shuffle(numbers)  # the order must not give the solution away
        return Puzzle(target, tuple(numbers), str(root)[1:-1])


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + int(rng.random() * (high - low + 1))


def _take_apart(rng: random.Random, value: int, limit: int, largest: int) -> tuple[int, str, int] | None:
    """Two values up to the limit and the operation that makes `value` of them, the operation drawn first; None if there is no such pair.

    What is subtracted or divided by is at most `largest`, the largest number of a puzzle.
    """
    first = int(rng.random() * 4)
    for symbol in OPERATIONS[first:] + OPERATIONS[:first]:
        if symbol == "+" and 2 <= value <= 2 * limit:
            left = _between(rng, max(1, value - limit), min(limit, value - 1))
            return left, "+", value - left
        if symbol == "-" and value < limit:
            right = _between(rng, 1, min(largest, limit - value))
            return value + right, "-", right
        if symbol == "*":
            factors = [factor for factor in range(2, isqrt(value) + 1) if value % factor == 0 and value // factor <= limit]
            if factors:
                factor = factors[int(rng.random() * len(factors))]
                return factor, "*", value // factor
        if symbol == "/" and 2 * value <= limit:
            right = _between(rng, 2, min(largest, limit // value))
            return value * right, "/", right
    return None


MAX_NUMBERS = 6
MAX_VALUE = 10**9


@lru_cache(maxsize=8)
def load(source: str, bad_rows: BadRows, fields: Fields = ()) -> Pool[Puzzle]:
    """The puzzles of a file or a named data set; read once per process."""
    puzzles = load_instances(source, read_puzzle, env="countdown", default="generated puzzles", bad_rows=bad_rows, fields=fields)
    return Pool(puzzles, env="countdown", source=source)


def read_puzzle(row: Row) -> Puzzle:
    """The puzzle of a row {target, nums, solution?}."""
    names = row.value if isinstance(row.value, dict) else row.fields("target", "nums")
    if "target" not in names or "nums" not in names:
        raise RowError(
            f"has no {'target' if 'target' not in names else 'nums'}: expected target and nums, got {', '.join(map(str, names)) or 'no columns'}; "
            "name other columns with fields={target: COLUMN, nums: COLUMN}"
        )
    target, numbers = row.fields("target", "nums")
    if not isinstance(numbers, list) or not 1 <= len(numbers) <= MAX_NUMBERS:
        raise RowError(f"nums is {numbers!r:.80}; expected a list of 1 to {MAX_NUMBERS} whole numbers")
    solution = row.value.get("solution")
    if solution is not None and not isinstance(solution, str):
        raise RowError(f"solution is {solution!r:.80}; expected text, or none")
    return Puzzle(_whole("target", target), tuple(_whole("a number of nums", number) for number in numbers), solution)


def _whole(what: str, value: Any) -> int:
    """A positive whole number; in Python True is an int, in a puzzle it is a mistake."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_VALUE:
        raise RowError(f"{what} is {value!r:.80}; expected a whole number from 1 to {MAX_VALUE}")
    return value
