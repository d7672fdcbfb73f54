"""What counts as the right output and the right value, in both ways of being wrong: too strict, too lenient."""

import math

import pytest

from tether.envs.deepcoder.compare import same_output, same_value
from tether.envs.deepcoder.parsing import clip, read_expected, read_json, read_value, show

DIGITS = "7" * 6000
"""More digits than int() and str() take by default."""


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("3\n", "3"),
        ("3", "3\n"),
        ("\n\n3\n\n", "3"),  # blank lines at both ends
        ("  a b  \n", "a b"),  # blanks at both ends of a line
        ("1 2\r\n3\r\n", "1 2\n3"),
        ("", ""),
        ("\n", ""),
        ("1.50", "1.5"),
        ("2.0", "2"),
        ("2", "2.0"),
        ("007", "7"),
        ("+5", "5"),
        ("1e3", "1000"),
        ("1   2", "1 2"),  # blanks between numbers
        (".5", "0.5"),
        ("0.3333333333333333", "0.33333333333333331"),  # the last digits of a float
        ("3.141592653589793", "3.1415926536"),
        ("-0.0", "0.0"),
        ("1000000000.1", "1000000000.2"),  # within a billionth of it
        (DIGITS, DIGITS + ".0"),
        ("0.3333333333", "0.333333"),  # rounds to what is expected, at the digits it is written with
        ("0.33333333", "0.3333"),
        ("3.141592653589793", "3.14159"),
        ("2.00000049", "2.000000"),
        ("0.66666666", "0.6667"),
        ("123456.78912", "123456.7891"),
        ("-0.33333333", "-0.333333"),
        ("1.23456789e-7", "1.2346e-7"),
        ("1 0.3333333 2", "1 0.3333 2"),
    ],
)
def test_right_output(printed: str, expected: str) -> None:
    assert same_output(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("4", "3"),
        ("3\n3", "3"),  # a line too many
        ("3", "3\n3"),
        ("1\n\n2", "1\n2"),  # a blank line in between
        ("1 2", "12"),
        ("1 2 3", "1 2"),
        ("a  b", "a b"),  # blanks within a text
        ("yes", "YES"),
        ("0.33333", "0.3333333333"),
        ("0.34", "0.33"),
        ("100000000000000001", "100000000000000000"),  # whole numbers are exact: as floats these are equal
        ("1.0000000001", "1"),  # a whole number was expected
        ("1_000", "1000"),
        ("nan", "0"),
        ("inf", "1e400"),
        ("x", ""),
        ("1e99999999999999999999", "1"),
        ("٣", "3"),  # a digit, but not one that a judge would take
        ("1.54", "1.5"),  # of few digits an expected number may be exact
        ("2.504", "2.50"),
        ("0.1254", "0.125"),
        ("0.00014", "0.0001"),  # four decimals, one digit
        ("0.3334", "0.3333"),
        ("0.33336", "0.3333"),
        ("0.333332", "0.333333"),
        ("3.14160", "3.14159"),
        ("0.66666", "0.666667"),  # cut off, not rounded
        ("12345.4", "12345"),  # whole numbers are exact
        ("-0.333333333", "0.333333"),
        ("nan", "0.333333"),
        ("1e9999", "0.333333"),
    ],
)
def test_wrong_output(printed: str, expected: str) -> None:
    assert not same_output(printed, expected)


@pytest.mark.parametrize(
    ("printed", "expected", "right"),
    [
        ("yes\nNo\n", "YES\nNO", True),
        ("Yes 1.50", "YES 1.50", True),
        ("0.3333333333", "0.333333", True),
        ("1E3", "1000", True),
        ("yes\nno", "YES\nYES", False),
        ("ye", "YES", False),
        ("yes no", "YES", False),
        ("4", "3", False),
    ],
)
def test_output_in_any_case(printed: str, expected: str, right: bool) -> None:
    assert same_output(printed, expected, ignore_case=True) is right


@pytest.mark.parametrize(
    ("returned", "expected", "right"),
    [
        (0.3333333333333333, "0.33333", True),
        (2.0000012, "2.00000", True),  # LeetCode writes five decimals: they are kept
        ([0.3333333, 2], "[0.33333, 2.0]", True),
        ({"a": 0.123456789}, '{"a": 0.1235}', True),
        (0.33334, "0.33333", False),
        (2.0001, "2.0000", False),
        (2.04, "2.0", False),
        (0.5000001, "0.5", False),
        (float("nan"), "0.33333", False),
        (float("inf"), "0.33333", False),
        ("0.33333", "0.33333", False),
    ],
)
def test_returned_numbers_have_the_digits_that_are_written(returned: object, expected: str, right: bool) -> None:
    assert same_value(returned, read_expected(expected)) is right


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ((1, 2), [1, 2]),
        ([(1, 2), (3,)], [[1, 2], [3]]),
        ({1: 2}, {"1": 2}),
        ({True: 1, None: 2, 1.5: 3}, {"true": 1, "null": 2, "1.5": 3}),
        ({"a": (1,)}, {"a": [1]}),
        ({10**6000: 1}, {10**6000: 1}),
        (True, 1),  # as Python's own ==
        (0, False),
        (2.0, 2),
        (2, 2.0),
        (0.1 + 0.2, 0.3),
        ([1.0000000001], [1.0]),
        (math.nan, math.nan),
        (math.inf, math.inf),
        ([10**5000], [10**5000]),
        ({1, 2}, {2, 1}),
        (None, None),
        ("abc", "abc"),
    ],
)
def test_right_value(returned: object, expected: object) -> None:
    assert same_value(returned, expected)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        ([1, 2], [2, 1]),
        ([1], [1, 2]),
        ([1], 1),
        (1, [1]),
        ("1", 1),
        ("[1]", [1]),
        ({1, 2}, [1, 2]),  # a set is a set
        ([1, 2], {1, 2}),
        ({1: 2, "1": 2}, {"1": 2}),  # two keys that JSON could not tell apart
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1, "c": 2}, {"a": 1, "b": 2}),
        (2.0000000001, 2),  # an exact number was expected
        (0.30001, 0.3),
        ([10**400], [1.5]),
        ([10**400], [math.inf]),
        (math.nan, 0.0),
        (0.0, math.nan),
        (None, False),
        ("abc", ["a", "b", "c"]),
        ([1], {"0": 1}),
    ],
)
def test_wrong_value(returned: object, expected: object) -> None:
    assert not same_value(returned, expected)


def test_a_value_nested_too_deep_is_wrong() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    other: list[object] = []
    for _ in range(100_000):
        other = [other]
    assert not same_value(deep, other)
    assert show(deep) == "a list nested too deep to show"


def test_values_are_read_as_json_then_as_python() -> None:
    assert read_value("[1, null, true]") == [1, None, True]
    assert read_value("(1, None, {2: 'a'})") == (1, None, {2: "a"})
    assert read_value(" 'it''s' ") == "its"
    for text in ("[1, 2", "f(1)", "1; 2", "", "[" * 100_000 + "]" * 100_000):
        with pytest.raises(ValueError, match="neither JSON nor a Python literal"):
            read_value(text)


def test_integers_of_any_length() -> None:
    value = read_json(f"[{DIGITS}, -{DIGITS}]")
    assert value[0] == -value[1]
    assert value[0] % 10**9 == 777777777
    assert value[0].bit_length() == 19932
    assert show(value[0]) == hex(value[0])
    assert show([12, -3]) == "[12, -3]"


def test_notation_does_not_depend_on_the_order_of_a_set() -> None:
    assert show({"b", "a", "c"}) == "{'a', 'b', 'c'}"
    assert show(set()) == "set()"
    assert show((1,)) == "(1,)"
    assert show([(1, "a"), {2: None}, True, 1.5]) == "[(1, 'a'), {2: None}, True, 1.5]"


def test_long_texts_are_cut_in_the_middle() -> None:
    assert clip("abcdefghij", 10) == "abcdefghij"
    assert clip("abcdefghijk", 4) == "ab ... (7 characters left out) ... jk"
