"""Puzzles from rows of public data: {"target": 98, "nums": [44, 19, 35]}, and a "solution" where the file tells one.

That is the form of Jiayi-Pan/Countdown-Tasks-3to4 and of the files made from it. Whether a row can be solved is not checked: that
is the data's promise, and checking half a million rows would take hours.
"""

from functools import lru_cache
from typing import Any

from tether.envs.countdown.generator import Puzzle
from tether.envs.dataset import BadRows, Pool, Row, RowError, load_instances

MAX_NUMBERS = 6
MAX_VALUE = 10**9


@lru_cache(maxsize=8)
def load(source: str, bad_rows: BadRows) -> Pool[Puzzle]:
    """The puzzles of a file or a named data set; read once per process."""
    puzzles = load_instances(source, _puzzle, env="countdown", default="generated puzzles", bad_rows=bad_rows)
    return Pool(puzzles, env="countdown", source=source)


def _puzzle(row: Row) -> Puzzle:
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
