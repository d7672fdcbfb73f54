"""Whether an answer is the gold one: exact routes first, math-verify for what they cannot decide.

An answer equal to the gold text is right whatever it is. Otherwise both are put into canonical spelling and taken apart; the parts
are compared as numbers where both are numbers, as words where either is a word, and only then, as mathematics, by the worker process.
Numbers are exact: 0.33 is not 1/3. The exact routes are final in both directions, so a number never depends on the worker.
Answers in words (days, names, choices, times of day) and numerals of another base are compared as text.
"""

import re
import time
from functools import lru_cache
from typing import Literal

from tether.envs.metamathqa.latex import MAX_LENGTH, Matrix, Node, Parts, Scalar, as_list, canonical, structure
from tether.envs.metamathqa.quantity import number, same_measure, split_unit
from tether.envs.metamathqa.symbolic import COMPARISON, for_worker

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SYMBOLS = re.compile(r"[\\^_+*/<>|=]")
_LONG_WORD = re.compile(r"[A-Za-z]{3,}")
_SPACED_GROUPS = re.compile(r"[+-]?(?:\\?\$)?[1-9]\d{0,2}(?:, \d{3})+(?:\.\d+)?(?: [A-Za-z ]+)?")
_NUMERAL = re.compile(r"(-?(?=[0-9A-Z.]*[0-9])[0-9A-Z.]+)_\{([0-9]+)\}")


def is_words(text: str) -> bool:
    """Whether a canonical scalar is text: it says so, has the colon of a time or a ratio, or a word that is no product of variables."""
    bare = _TEXT.sub(r" \1 ", text)
    return not _SYMBOLS.search(bare) and (r"\text{" in text or ":" in bare or bool(_LONG_WORD.search(bare)))


def words(text: str) -> str:
    """What is compared of a text: its words without case and punctuation.

    >>> words(r"\\text{(A)}"), words("9:00 a.m."), words("Tuesday")
    ('a', '9:00 am', 'tuesday')
    """
    bare = _TEXT.sub(r" \1 ", text).casefold().replace(".", "")
    stripped = (word.strip(",;!'\"()") for word in bare.split())
    return " ".join(word for word in stripped if word)


def same_numeral(gold: str, answer: str) -> bool | None:
    """Whether two numerals with their base, 1011_2, are the same; None if neither is one. Their values are not compared: asked for
    base 2, neither 11 nor a numeral that leaves its base open is an answer."""
    left, right = (_NUMERAL.fullmatch(_TEXT.sub(r"\1", text)) for text in (gold, answer))
    if left is None and right is None:
        return None
    return left is not None and right is not None and left.groups() == right.groups()


Match = Literal["math", "strict"]
"""How answers are compared: as mathematics, or as upstream does, letter by letter without case and spaces."""

MAX_QUESTIONS = 40
"""Put to the worker for one answer; a list of lists of formulas could otherwise ask for hundreds."""
MAX_SECONDS = 20.0
"""On the clock, for the questions of one answer together; after that no further one is put, and the answer counts as wrong."""


def same(gold: str, answer: str, match: Match) -> bool:
    """Whether the answer is the gold one."""
    return _strictly(gold) == _strictly(answer) != "" if match == "strict" else same_mathematics(gold, answer)


def _strictly(text: str) -> str:
    return "".join(text.lower().split())


@lru_cache(maxsize=20_000)
def same_mathematics(gold: str, answer: str) -> bool:
    """Whether two answers mean the same."""
    gold, answer = gold.strip(), answer.strip()
    if gold == answer:
        return bool(gold)
    if not gold or not answer or max(len(gold), len(answer)) > MAX_LENGTH:
        return False
    values = number(gold), number(answer)
    if None not in values:
        return values[0] == values[1]
    if _SPACED_GROUPS.fullmatch(answer) and number(split_unit(canonical(gold)).body) is not None:
        answer = answer.replace(", ", ",")  # the gold answer is one number, so 58, 500 is no list
    left, right = canonical(gold), canonical(answer)
    if not left or not right:
        return False
    return left == right or _Comparison().nodes(structure(left), structure(right))


class _Comparison:
    """One comparison of two answers, with what it may still ask of the worker."""

    def __init__(self) -> None:
        self._questions = MAX_QUESTIONS
        self._seconds = 0.0

    def nodes(self, gold: Node, answer: Node) -> bool:
        if isinstance(gold, Scalar) and isinstance(answer, Scalar):
            return self._scalars(gold.text, answer.text)
        if isinstance(gold, Matrix) or isinstance(answer, Matrix):
            return isinstance(gold, Matrix) and isinstance(answer, Matrix) and self._matrices(gold, answer)
        if isinstance(gold, Parts) and isinstance(answer, Parts):
            return self._parts(gold, answer)
        return self._part_and_scalar(gold, answer)

    def _matrices(self, gold: Matrix, answer: Matrix) -> bool:
        shapes = [[len(row) for row in matrix.rows] for matrix in (gold, answer)]
        if gold.kind != answer.kind or shapes[0] != shapes[1]:
            return False
        return all(self.nodes(*cells) for rows in zip(gold.rows, answer.rows, strict=True) for cells in zip(*rows, strict=True))

    def _parts(self, gold: Parts, answer: Parts) -> bool:
        # Brackets may stand for each other: none for round ones or braces; an interval says which ends belong to it.
        brackets = {gold.brackets, answer.brackets}
        if len(gold.items) != len(answer.items) or (len(brackets) > 1 and brackets not in ({"", "()"}, {"", "{}"})):
            return False
        if "()" in (gold.brackets, answer.brackets) or "[" in gold.brackets or "]" in gold.brackets:
            return self._in_order(gold, answer)
        # x = 1, y = 2 may be given without the unknowns, but not in another order then.
        one_is_named = (len(_unknowns(gold)) > 1) != (len(_unknowns(answer)) > 1)
        return self._in_order(gold, answer) if one_is_named else self._in_any_order(gold, answer)

    def _in_order(self, gold: Parts, answer: Parts) -> bool:
        return all(self.nodes(left, right) for left, right in zip(gold.items, answer.items, strict=True))

    def _in_any_order(self, gold: Parts, answer: Parts) -> bool:
        left = list(answer.items)
        for item in gold.items:
            found = next((place for place, other in enumerate(left) if self.nodes(item, other)), None)
            if found is None:
                return False
            left.pop(found)
        return True

    def _part_and_scalar(self, gold: Node, answer: Node) -> bool:
        """An interval may be given as an inequality, a set of one as its member; 125,343 may have been meant as a list."""
        parts, scalar = (gold, answer) if isinstance(gold, Parts) else (answer, gold)
        assert isinstance(parts, Parts) and isinstance(scalar, Scalar)
        listed = as_list(scalar) if parts.brackets == "" else None
        if listed is not None:
            return self._parts(parts, listed) if parts is gold else self._parts(listed, parts)
        if len(parts.items) == 1:
            return self.nodes(parts.items[0], scalar) if parts is gold else self.nodes(scalar, parts.items[0])
        is_interval = parts.brackets == "u" or (len(parts.items) == 2 and parts.brackets not in ("", "{}"))
        if not is_interval or not _INEQUALITY.search(scalar.text):
            return False
        return self._asked(parts.text, scalar.text) if parts is gold else self._asked(scalar.text, parts.text)

    def _scalars(self, gold: str, answer: str) -> bool:
        if _squeezed(gold) == _squeezed(answer):
            return True
        if "=" in gold or "=" in answer:
            return self._equations(gold.split("="), answer.split("="))
        left, right = split_unit(gold), split_unit(answer)
        decided = same_measure(left, right)
        if decided is None:
            decided = same_numeral(gold, answer)
        if decided is not None:
            return decided
        if is_words(gold) or is_words(answer) or (len(gold) == len(answer) == 1):
            return words(gold) == words(answer)
        # Formulas, with units that must not contradict each other.
        if (left.unit and right.unit and left.unit != right.unit) or left.multiplier != right.multiplier:
            return False
        return _squeezed(left.body) == _squeezed(right.body) or self._asked(left.body, right.body)

    def _equations(self, gold: list[str], answer: list[str]) -> bool:
        """x = 5 may be given as 5 and the other way round; a chain of equations must hold in every part."""
        if len(gold) == 1:
            values = answer[1:] if _VARIABLE.fullmatch(answer[0]) else answer
            return all(self._scalars(gold[0], value) for value in values)
        if len(answer) == 1:
            return len(gold) == 2 and bool(_VARIABLE.fullmatch(gold[0])) and self._scalars(gold[1], answer[0])
        if len(gold) == len(answer) == 2 and _squeezed(gold[0]) == _squeezed(answer[0]) and _VARIABLE.fullmatch(gold[0]):
            return self._scalars(gold[1], answer[1])
        return self._asked("=".join(gold), "=".join(answer))

    def _asked(self, gold: str, answer: str) -> bool:
        """The worker's answer; formulas that it cannot compare count as different."""
        left, right = for_worker(gold), for_worker(answer)
        if left is None or right is None or self._questions <= 0 or self._seconds >= MAX_SECONDS:
            return False
        self._questions -= 1
        begun = time.monotonic()
        equal_ = COMPARISON.equal(left, right)
        self._seconds += time.monotonic() - begun
        if equal_ is None:
            self._questions = 0  # no answer may take the limit of time more than once
        return bool(equal_)


_INEQUALITY = re.compile(r"[<>]|\\[lg]eq|\\neq")
_VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{\w+\})?'*(?:\^\{-1\})?(?:\([A-Za-z](?:,[A-Za-z])*\))?")
_LOOSE_SPACE = re.compile(r"(?<!\d) | (?!\d)")


def _squeezed(text: str) -> str:
    """Without spaces, but for those between digits: 2 1/2 is not 21/2."""
    return _LOOSE_SPACE.sub("", text)


def _unknowns(parts: Parts) -> set[str]:
    """The unknowns that items give the values of: x and y for "x=1, y=2"."""
    sides = [item.text.partition("=") for item in parts.items if isinstance(item, Scalar)]
    return {left for left, equals, _ in sides if equals and _VARIABLE.fullmatch(left)}
