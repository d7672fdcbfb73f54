"""Arithmetic as an agent writes it, read by a parser of our own and computed in exact rationals; nothing is ever evaluated as code.

The grammar: whole numbers in the digits 0 to 9, the operators + - * / (also written × ÷ −), parentheses, minus signs in front of a
number or a parenthesis. No power, no equals sign, no decimals, no multiplication without a sign. The parser keeps its own stacks, so
nesting cannot exhaust Python's, and refuses texts beyond a length that no honest answer needs: any text is read in microseconds.
`check_answer` then decides whether an expression uses the numbers as the rules allow, and whether it equals the target.
"""

import operator
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from tether.envs.countdown.generator import Puzzle

MAX_LENGTH = 1000
"""Characters. Six numbers with all their operators and a spare pair of parentheses around each come to well under a hundred."""

_SAME = str.maketrans({"×": "*", "÷": "/", "−": "-"})
_DIGITS = frozenset("0123456789")
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2, "negate": 3}


class Malformed(ValueError):
    """The text is no expression; the message says why and reads on from "it"."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A well-formed expression. Example: parse("(6 - 2) / 3") has value 4/3 and numbers (6, 2, 3)."""

    value: Fraction | None
    """Exact; None if it divides by zero somewhere."""
    numbers: tuple[int, ...]
    """Every number written, in order, as often as it occurs."""


def parse(text: str) -> Expression:
    """The expression a text spells; Malformed if it spells none.

    >>> parse("2 + 5 − 3").value
    Fraction(4, 1)
    """
    if len(text) > MAX_LENGTH:
        raise Malformed(f"has {len(text)} characters (at most {MAX_LENGTH} are read)")
    reader = _Reader()
    characters = text.translate(_SAME)
    at = 0
    while at < len(characters):
        if characters[at] in _DIGITS:
            end = at + 1
            while end < len(characters) and characters[end] in _DIGITS:
                end += 1
            reader.number(characters[at:end])
            at = end
        else:
            if not characters[at].isspace():
                reader.symbol(characters[at])
            at += 1
    return reader.finished()


@dataclass(slots=True)
class _Reader:
    """Shunting-yard: values and operators wait on two stacks until an operator that binds less tightly, or the end, settles them."""

    values: list[Fraction | None] = field(default_factory=list)
    operators: list[str] = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)
    wants_value: bool = True
    """A number or an opening parenthesis must come next, rather than an operator or a closing one."""

    def number(self, digits: str) -> None:
        if not self.wants_value:
            raise Malformed(f"has no operator before {_cut(digits)}")
        self.numbers.append(int(digits))
        self.values.append(Fraction(self.numbers[-1]))
        self.wants_value = False

    def symbol(self, character: str) -> None:
        if character == "(":
            if not self.wants_value:
                raise Malformed("has no operator before a parenthesis")
            self.operators.append(character)
        elif character == ")":
            self._close()
        elif character not in _PRECEDENCE:
            raise Malformed(f"holds {character!r}; only whole numbers, + - * / and parentheses are allowed")
        elif not self.wants_value:
            self._settle(_PRECEDENCE[character])
            self.operators.append(character)
            self.wants_value = True
        elif character == "-":
            self.operators.append("negate")
        else:
            raise Malformed(f"has no number before {character!r}")

    def _close(self) -> None:
        if self.wants_value:
            raise Malformed("has no number before ')'")
        self._settle(0)
        if not self.operators:
            raise Malformed("closes a parenthesis that was never opened")
        self.operators.pop()

    def _settle(self, precedence: int) -> None:
        """Carry out the waiting operators that bind at least so tightly, back to the innermost open parenthesis."""
        while self.operators and self.operators[-1] != "(" and _PRECEDENCE[self.operators[-1]] >= precedence:
            symbol = self.operators.pop()
            right = self.values.pop()
            if symbol == "negate":
                self.values.append(None if right is None else -right)
            else:
                self.values.append(_compute(self.values.pop(), symbol, right))

    def finished(self) -> Expression:
        if not self.numbers:
            raise Malformed("holds no number")
        if self.wants_value:
            raise Malformed("ends without a number")
        self._settle(0)
        if self.operators:
            raise Malformed("opens a parenthesis that is never closed")
        return Expression(self.values[0], tuple(self.numbers))


def _compute(left: Fraction | None, symbol: str, right: Fraction | None) -> Fraction | None:
    return None if left is None or right is None or (symbol == "/" and right == 0) else _OPERATIONS[symbol](left, right)


def _cut(digits: str) -> str:
    return digits if len(digits) <= 12 else f"{digits[:12]}..."


Use = Literal["at_most_once", "exactly_once"]
"""How often each given number may be used."""


@dataclass(frozen=True, slots=True)
class ExpressionResult:
    """The result of checking an answer against its puzzle."""

    solved: bool
    legal: bool
    """A well-formed expression over the allowed numbers, whatever its value."""
    value: Fraction | None
    """Of any well-formed expression; None if it is malformed or divides by zero."""
    reason: str
    """What is wrong with it, as a sentence; empty where it is solved."""


def check_answer(answer: str, puzzle: Puzzle, use: Use) -> ExpressionResult:
    """Parse an answer and compare it with the puzzle."""
    if not answer.strip():
        return ExpressionResult(False, False, None, "There is no answer.")
    try:
        expression = parse(answer)
    except Malformed as error:
        return ExpressionResult(False, False, None, f"Not an expression: it {error}.")
    if misuse := _misuse(Counter(expression.numbers), Counter(puzzle.numbers), use):
        return ExpressionResult(False, False, expression.value, misuse)
    if expression.value is None:
        return ExpressionResult(False, True, None, "The expression divides by zero.")
    if expression.value != puzzle.target:
        return ExpressionResult(False, True, expression.value, f"The expression is {expression.value}, not {puzzle.target}.")
    return ExpressionResult(True, True, expression.value, "")


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
