"""From an answer to the program that is run: fences, completions, starter code, missing imports."""

import warnings

import pytest

from tether.envs.deepcoder.assemble import Extracted, assemble, extract
from tether.envs.deepcoder.parsing import MAX_CHARACTERS, NotPython, check_compiles, literal, parse

HUMANEVAL_PROMPT = (
    'from typing import List\n\n\ndef helper(x):\n    return x + 1\n\n\ndef total(items: List[int]) -> int:\n    """Add them up."""\n'
)
LEETCODE_STARTER = "class Solution:\n    def total(self, items: List[int]) -> int:\n        "


def run(program: str, call: str) -> object:
    """The value of an expression in the namespace of a program that this file wrote itself."""
    namespace: dict[str, object] = {"__name__": "solution"}
    exec(program, namespace)
    return eval(call, namespace)


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\n```", "print(1)"),
        ("~~~py\nprint(1)\n~~~", "print(1)"),
        ("````python\nprint('```')\n````", "print('```')"),
        ("first\n```python\na\n```\nthen\n```python\nb\n```\nend", "b"),  # the last one
        ("```python\na\n```\n```\n\n```", "a"),  # an empty one is passed over
        ("```python\na\n```\n```", "a"),  # so is a stray one
        ("```python\na\nb", "a\nb"),  # never closed
        ("```python\na = 1```", "a = 1"),  # closed at the end of a line
        ("```python\na\n```python\nb\n```", "b"),  # the first was never closed
        ("  ```python\n  if x:\n    y\n  ```", "if x:\n  y"),  # indented as a whole
        ("```python\r\na\r\nb\r\n```", "a\nb"),
        ("```c++ title=x\nint\n```", "int"),
        ("```python print(1)```", "print(1)"),
        ("~~~\n```\na\n```\n~~~", "```\na\n```"),
    ],
)
def test_the_last_fence_is_taken(answer: str, code: str) -> None:
    assert extract(answer) == Extracted(code, True)


@pytest.mark.parametrize(
    ("answer", "code"),
    [("print(1)", "print(1)"), ("print(1)\n```", "print(1)"), ("", ""), ("```\n```", ""), ("a `b` c", "a `b` c")],
)
def test_without_a_fence_the_whole_answer_is_taken(answer: str, code: str) -> None:
    assert extract(answer) == Extracted(code, False)


def test_a_program_that_reads_input_is_left_alone() -> None:
    code = "n = int(input())\nprint(List)"
    assert assemble(code, "", "") == code
    with pytest.raises(NotPython, match=r"SyntaxError: .* \(line 1\)"):
        assemble("for for", "", "")


@pytest.mark.parametrize(
    "answer",
    [
        "def total(items: List[int]) -> int:\n    return sum(items)",  # whole, without the prompt's import
        "from typing import List\ndef total(items):\n    return sum(items)",
        "    return sum(items)",  # the body
        "return sum(items)",  # the body, its indentation lost
        "result = 0\n    for item in items:\n        result += item\n    return result",  # only the first line's lost
        "result = 0\nfor item in items:\n    result += item\nreturn result",  # all of it lost
        "    def inner():\n        return sum(items)\n    return inner()",
        "total = sum",
        HUMANEVAL_PROMPT + "    return sum(items)",  # the prompt repeated
        "from __future__ import annotations\ndef total(items: Unknown) -> int:\n    return sum(items)",
    ],
)
def test_answers_to_a_prompt_that_opens_a_function(answer: str) -> None:
    program = assemble(answer, HUMANEVAL_PROMPT, "total")
    assert run(program, "total([1, 2, 3])") == 6


def test_what_the_prompt_defines_is_there_and_may_be_replaced() -> None:
    program = assemble("def total(items):\n    return helper(sum(items))", HUMANEVAL_PROMPT, "total")
    assert run(program, "total([1, 2]), helper(1)") == (4, 2)
    program = assemble("def helper(x):\n    return x - 1\ndef total(items):\n    return 0", HUMANEVAL_PROMPT, "total")
    assert run(program, "helper(1)") == 0


@pytest.mark.parametrize(
    "answer",
    [
        "class Solution:\n    def total(self, items: List[int]) -> int:\n        return sum(items)",
        "        return sum(items)",
        "return sum(items)",
        "def total(self, items):\n    return self.add(items)\ndef add(self, items):\n    return sum(items)",  # methods without their class
        "    def total(self, items: List[int]) -> int:\n        return sum(items)",  # the same, indented
    ],
)
def test_answers_to_starter_code_with_a_class(answer: str) -> None:
    program = assemble(answer, LEETCODE_STARTER, "total")
    assert run(program, "Solution().total([1, 2, 3])") == 6


def test_a_plain_function_answers_a_class_too() -> None:
    program = assemble("def total(items):\n    return sum(items)", LEETCODE_STARTER, "total")
    assert run(program, "total([4])") == 4


def test_names_that_starter_code_takes_for_granted_are_imported() -> None:
    answer = "def total(items: Optional[List[int]]) -> int:\n    queue = deque(items)\n    return math.floor(reduce(gcd, queue))"
    assert run(assemble(answer, "", "total"), "total([4, 6])") == 2
    own = "def gcd(a, b):\n    return 'mine'\ndef total():\n    return gcd(4, 6)"
    assert run(assemble(own, "", "total"), "total()") == "mine"
    counted = "def total(items):\n    return Counter(items)"
    assert run(assemble(counted, "", "total"), "total('aa') == {'a': 2}")
    assert "import" not in assemble("def total(math, items):\n    return [math for deque in items]", "", "total")


def test_an_unknown_name_stays_unknown() -> None:
    with pytest.raises(NameError, match="'nothing' is not defined"):
        run(assemble("def total():\n    return nothing", "", "total"), "total()")


def test_an_answer_with_another_function_is_not_taken_for_a_completion() -> None:
    program = assemble("def sum_up(items):\n    return 0", HUMANEVAL_PROMPT, "total")
    with pytest.raises(NameError):
        run(program, "total([1])")


@pytest.mark.parametrize(
    "code",
    [
        "for for",
        "a\0b",
        "x = '\ud800'",
        "-" * 100_000 + "1",
        "a" + ".b" * 100_000,
        "(" * 5000,
        "return 1",
        "1" * 10_000,
        "x = 1\n" * (MAX_CHARACTERS // 6 + 1),
    ],
)
def test_what_does_not_compile_is_told_in_one_line(code: str) -> None:
    with pytest.raises(NotPython) as caught:
        check_compiles(code)
    assert "\n" not in str(caught.value)
    assert str(caught.value)


def test_warnings_of_the_compiler_are_not_raised() -> None:
    """The suite turns warnings into errors, which would make an error of an unknown escape."""
    check_compiles(r'x = "\d"')
    filters = list(warnings.filters)
    check_compiles(r'y = "\d"')
    assert warnings.filters == filters
    warnings.simplefilter("error")
    check_compiles(r'z = "\d"')
    assert parse(r'"\d" is 1').body
    assert literal(r'"\d"') == "\\d"
