"""Judging an answer: is it an expression, does it use the numbers as the rules allow, and is it the target."""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from tether.envs.countdown.expression import Malformed, parse
from tether.envs.countdown.generator import Puzzle

Use = Literal["at_most_once", "exactly_once"]
"""How often each given number may be used."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of an answer."""

    solved: bool
    legal: bool
    """A well-formed expression over the allowed numbers, whatever its value."""
    value: Fraction | None
    """Of any well-formed expression; None if it is malformed or divides by zero."""
    reason: str
    """What is wrong with it, as a sentence; empty where it is solved."""


def judge(answer: str, puzzle: Puzzle, use: Use) -> Verdict:
    """The verdict on an answer."""
    if not answer.strip():
        return Verdict(False, False, None, "There is no answer.")
    try:
        expression = parse(answer)
    except Malformed as error:
        return Verdict(False, False, None, f"Not an expression: it {error}.")
    misuse = _misuse(Counter(expression.numbers), Counter(puzzle.numbers), use)
    if misuse:
        return Verdict(False, False, expression.value, misuse)
    if expression.value is None:
        return Verdict(False, True, None, "The expression divides by zero.")
    if expression.value != puzzle.target:
        return Verdict(False, True, expression.value, f"The expression is {expression.value}, not {puzzle.target}.")
    return Verdict(True, True, expression.value, "")


def _misuse(used: Counter[int], given: Counter[int], use: Use) -> str:
    """What the rules say against these numbers; empty if nothing."""
    for number, times in sorted(used.items()):
        if number not in given:
            return f"{_shown(number)} is not among the numbers."
        if times > given[number]:
            return f"{number} is used {_times(times)} but given {_times(given[number])}."
    unused = sorted((given - used).elements())
    if use == "exactly_once" and unused:
        return f"{unused[0]} is not used; every number must be used exactly once."
    return ""


def _shown(number: int) -> str:
    text = str(number)
    return text if len(text) <= 20 else f"{text[:20]}..."


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
