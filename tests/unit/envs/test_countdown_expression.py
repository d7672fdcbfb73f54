"""The parser of expressions: what it reads, exactly, what it refuses and why, and that no text can hurt it."""

import random
from contextlib import suppress
from fractions import Fraction

import pytest

from tether.envs.countdown.expression import MAX_LENGTH, Expression, Malformed, parse

VALUES = [
    ("7", Fraction(7)),
    ("007", Fraction(7)),
    ("2 + 5 - 3", Fraction(4)),
    ("2+3*4", Fraction(14)),
    ("(2+3)*4", Fraction(20)),
    ("10-3-2", Fraction(5)),
    ("10-(3-2)", Fraction(9)),
    ("24/4/3", Fraction(2)),
    ("24/(4/3)", Fraction(18)),
    ("6 / (1 - 3/4)", Fraction(24)),
    ("1/3 + 1/3 + 1/3", Fraction(1)),
    ("2/3", Fraction(2, 3)),
    ("-3 + 5", Fraction(2)),
    ("-(3 + 5)", Fraction(-8)),
    ("2 * -3", Fraction(-6)),
    ("2 - -3", Fraction(5)),
    ("--3", Fraction(3)),
    ("-2 * -3 - -1", Fraction(7)),
    ("-6/4", Fraction(-3, 2)),
    ("((((5))))", Fraction(5)),
    ("6 × (7 − 3) ÷ 2", Fraction(12)),
    ("\t8\n/\n2 ", Fraction(4)),
    ("99999999999999999999 - 99999999999999999998", Fraction(1)),
]


@pytest.mark.parametrize(("text", "value"), VALUES)
def test_values(text: str, value: Fraction) -> None:
    assert parse(text).value == value


def test_the_numbers_used_are_told_in_order_with_repeats() -> None:
    assert parse("6*(7-5+1)+6") == Expression(Fraction(24), (6, 7, 5, 1, 6))
    assert parse("-3").numbers == (3,)


@pytest.mark.parametrize("text", ["1/0", "1/(2-2)", "(1/0)*0", "0/0", "3 + 1/(1-1)", "-(5/0)", "1/(1/0)"])
def test_division_by_zero_is_well_formed_without_a_value(text: str) -> None:
    assert parse(text).value is None


REFUSED = [
    ("", "holds no number"),
    (" \n ", "holds no number"),
    ("()", "has no number before ')'"),
    ("(", "holds no number"),
    (")", "has no number before ')'"),
    ("-", "holds no number"),
    ("3 +", "ends without a number"),
    ("3 + (", "ends without a number"),
    ("* 3", "has no number before '*'"),
    ("+3", "has no number before '+'"),
    ("3 + * 4", "has no number before '*'"),
    ("3 4", "has no operator before 4"),
    ("2(3)", "has no operator before a parenthesis"),
    ("(2)(3)", "has no operator before a parenthesis"),
    ("(2)3", "has no operator before 3"),
    ("(2 + 3", "opens a parenthesis that is never closed"),
    ("2 + 3)", "closes a parenthesis that was never opened"),
    ("2 + 5 - 3 = 4", "holds '='"),
    ("3**2", "has no number before '*'"),
    ("3//2", "has no number before '/'"),
    ("3^2", "holds '^'"),
    ("5.0+2", "holds '.'"),
    ("1e3", "holds 'e'"),
    ("foo 3 5 2", "holds 'f'"),
    ("1,000", "holds ','"),
    ("1_000", "holds '_'"),
    ("٣ + 4", "holds '٣'"),
    ("³", "holds '³'"),
    ("\uff13", "holds '\uff13'"),  # the full-width digit three
    ("½", "holds '½'"),
    ("3\x00", "holds '\\x00'"),
    ("__import__('os').system('x')", "holds '_'"),
    ("\ud800", "holds '\\ud800'"),
]


@pytest.mark.parametrize(("text", "why"), REFUSED)
def test_what_is_no_expression_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse(text)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


HOSTILE = [
    "(" * 10**6,
    ")" * 10**6,
    "9" * 10**6,
    "-" * 10**6 + "1",
    "(" * 10**6 + "1" + ")" * 10**6,
    "1+" * 10**6,
    "9**9**9**9",
    "1" + "/3" * 10**5,
]


@pytest.mark.parametrize("text", HOSTILE, ids=lambda text: text[:6])
def test_hostile_texts_are_refused_at_once(text: str) -> None:
    with pytest.raises(Malformed):
        parse(text)


def test_the_longest_text_that_is_read_is_read_whatever_it_holds() -> None:
    half = MAX_LENGTH // 2
    assert parse("(" * (half - 1) + "12" + ")" * (half - 1)).value == 12
    assert parse("-" * (MAX_LENGTH - 1) + "1").value == -1  # an odd number of minus signs
    assert parse("9" * MAX_LENGTH).value == 10**MAX_LENGTH - 1
    product = parse("*".join(["99999"] * (MAX_LENGTH // 6)))
    assert product.value == 99999 ** (MAX_LENGTH // 6)
    assert str(parse("1" + "/99" * 333).value) == f"1/{99**333}"
    with pytest.raises(Malformed, match=r"has 1001 characters \(at most 1000 are read\)"):
        parse("9" * (MAX_LENGTH + 1))


def test_random_expressions_agree_with_pythons_own_arithmetic() -> None:
    """An independent computation: the same text with every number made a Fraction, evaluated by Python."""
    rng = random.Random(5)

    def grow(depth: int) -> str:
        if depth == 0 or rng.random() < 0.2:
            return str(rng.randrange(0, 20))
        text = f"{grow(depth - 1)}{rng.choice('+-*/')}{grow(depth - 1)}"
        return rng.choice([text, f"({text})", f"-({text})"])

    checked = 0
    for _ in range(500):
        text = grow(4)
        spelled = "".join(f" Fraction({part}) " if part.isdigit() else part for part in _parts(text))
        try:
            expected = eval(spelled, {"Fraction": Fraction})
        except ZeroDivisionError:
            expected = None
        assert parse(text).value == expected, text
        checked += expected is not None
    assert checked > 300


def _parts(text: str) -> list[str]:
    parts: list[str] = []
    for character in text:
        if character.isdigit() and parts and parts[-1].isdigit():
            parts[-1] += character
        else:
            parts.append(character)
    return parts


def test_random_characters_never_raise_anything_else() -> None:
    rng = random.Random(7)
    read = []
    for _ in range(3000):
        text = "".join(rng.choice("0123456789+-*/() ×÷−=.x") for _ in range(rng.randrange(12)))
        with suppress(Malformed):
            read.append(parse(text))
    assert 50 < len(read) < 1500 and all(expression.numbers for expression in read)  # both kinds were tried
