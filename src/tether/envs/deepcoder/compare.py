"""Whether what a program printed or returned is what was expected; made outside the sandbox, where the program cannot reach it.

Printed text is compared line by line: blank lines at both ends and blanks at both ends of a line do not count, the number of lines
must agree, and a line is right if it is the same text or a row of numbers of the same values (1.50 is 1.5, 007 is 7). Where the
expected number is written as a fraction (with a point or an exponent) one within `TOLERANCE` of it will do; whole numbers must be
exact. LiveCodeBench allows no tolerance, APPS a hundred-thousandth; both are wrong for somebody: a sum of floats may differ in its
last digits from one order of adding to another, and 0.33333 is not a third.

An expected number of at least `ROUNDED_DIGITS` decimals and as many significant digits was rounded when the test was written, so whatever
rounds to it is right: 0.3333333333 where 0.333333 is expected. A number of fewer decimals may be exact, and 1.54 is not 1.5.

Returned values are compared as JSON would have them: a tuple is a list, a dictionary's keys are their texts, True is 1 as in Python
itself, an expected float may be missed by as much as a printed one, NaN is NaN. A set is equal to a set only.
"""

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from tether.envs.deepcoder.parsing import show, written

TOLERANCE = 1e-9
"""Relative, and absolute below 1."""
ROUNDED_DIGITS = 4
"""Decimals, and significant digits, from which on an expected number counts as rounded."""

_NUMBER = re.compile(r"[+-]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][+-]?[0-9]{1,4})?")


def same_output(printed: str, expected: str, *, ignore_case: bool = False) -> bool:
    """Whether a program printed what was expected."""
    if ignore_case:
        printed, expected = printed.lower(), expected.lower()
    got_lines, expected_lines = _lines(printed), _lines(expected)
    if len(got_lines) != len(expected_lines):
        return False
    for got, wanted in zip(got_lines, expected_lines, strict=True):
        got_words, wanted_words = got.split(), wanted.split()
        if got != wanted and (len(got_words) != len(wanted_words) or not all(map(_same_number, got_words, wanted_words))):
            return False
    return True


def same_value(returned: Any, expected: Any) -> bool:
    """Whether a function returned what was expected, the expected value having come from JSON or a literal."""
    try:
        return _same(returned, expected)
    except RecursionError:
        return False


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().split("\n")]


def _same_number(got: str, expected: str) -> bool:
    wanted = _NUMBER.fullmatch(expected)
    if wanted is None or _NUMBER.fullmatch(got) is None:
        return False
    if Decimal(got) == Decimal(expected):
        return True
    return any(wanted.groups()) and (_close(float(got), float(expected)) or _rounds_to(Decimal(got), expected))


def _close(got: float, expected: float) -> bool:
    return math.isfinite(got) and math.isfinite(expected) and abs(got - expected) <= TOLERANCE * max(1.0, abs(expected))


def _rounds_to(got: Decimal, expected: str) -> bool:
    """Whether a number is the expected one at the digits that are written of it, where it is written with enough of them."""
    _, digits, exponent = Decimal(expected).as_tuple()
    assert isinstance(exponent, int)  # a number, by the pattern that it has matched
    if -exponent < ROUNDED_DIGITS or len(digits) < ROUNDED_DIGITS:
        return False
    return abs(got - Decimal(expected)) <= Decimal(5).scaleb(exponent - 1)


def _same(got: Any, expected: Any) -> bool:
    if isinstance(expected, list | tuple):
        return isinstance(got, list | tuple) and len(got) == len(expected) and all(map(_same, got, expected))
    if isinstance(expected, Mapping):
        if not isinstance(got, Mapping):
            return False
        by_key = {_key(key): value for key, value in got.items()}
        wanted = {_key(key): value for key, value in expected.items()}
        same_keys = len(by_key) == len(got) and by_key.keys() == wanted.keys()
        return same_keys and all(_same(by_key[key], value) for key, value in wanted.items())
    if isinstance(expected, float) and isinstance(got, int | float):
        return _same_float(got, expected)
    return bool(got == expected)


def _key(key: Any) -> Any:
    """A key as JSON writes it, so that 1 and "1" are the same; other keys as they are."""
    if isinstance(key, bool) or key is None:
        return {True: "true", False: "false", None: "null"}[key]
    return show(key) if isinstance(key, int | float) else key


def _same_float(got: float, expected: float) -> bool:
    if got == expected:
        return True
    if math.isnan(expected):
        return isinstance(got, float) and math.isnan(got)
    try:
        if not math.isfinite(got) or math.isinf(expected):
            return False
    except OverflowError:  # an integer beyond every float
        return False
    return _close(float(got), expected) or _rounds_to(Decimal(got), written(expected))
