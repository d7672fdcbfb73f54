"""What statements say about their judge: several right answers, letters in any case; and rows of starter classes played as calls."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from tether.core.errors import BadInput
from tether.envs.dataset import Row, RowLeftOut
from tether.envs.deepcoder.dataset import (
    JudgingRules,
    accepts_any_case,
    accepts_several_answers,
    builtin_pool,
    load_pool,
    read_judged_problem,
    read_problem,
)
from tether.envs.deepcoder.env import DeepCoder, DeepCoderOptions
from tether.envs.deepcoder.pair_rows import starter_method
from tether.envs.deepcoder.problem import Prints, Problem, Returns
from tether.envs.deepcoder.sandbox.jobs import CallTask, Report, StdinTask
from tether.envs.registry import make_env


@pytest.mark.parametrize(
    "statement",
    [
        "If there are multiple answers, print any.",
        "If there are multiple possible answers, you can print any of them.",
        "If there are several solutions, output any.",
        "In case there are many ways to do so, find any of them.",
        "There may be more than one solution. Print any one of them.",
        "If there are multiple optimal permutations, print any of them.",
        "Print any valid sequence of moves.",
        "Output any of the possible strings.",
        "If there are several\nsuch arrays, print\nany of them.",
        "You may return any valid answer.",
        "If multiple answers exist, any of them will be accepted.",
        "Any correct answer is accepted.",
        "You can return the answer in any order.",
        "Print the edges in arbitrary order.",
        "This problem has a special judge.",
        "If there are multiple solutions, an arbitrary one may be printed.",
    ],
)
def test_statements_that_accept_several_answers(statement: str) -> None:
    assert accepts_several_answers(f"You are given n numbers. {statement} The first line holds n.")


@pytest.mark.parametrize(
    "statement",
    [
        "If there are multiple answers, print the lexicographically smallest one.",
        "If there are several such pairs, print the one with the least sum.",
        "There are multiple test cases. Print the answer for each of them.",
        "Do not print any other text.",
        "Don't print any of the intermediate values.",
        "The numbers are given in any order. Print their sum.",
        "The edges are listed in arbitrary order.",
        "Print the number of ways to choose any two cells.",
        "Print YES if there is any solution, otherwise NO.",
        "You can print each letter in any case (upper or lower).",
        "Print the answer in any case (for example, YES or yes).",
        "Several friends stand in a row. Each may take any apple.",
        "Print the maximum over any subarray.",
        "Return the only answer.",
    ],
)
def test_statements_with_one_answer(statement: str) -> None:
    assert not accepts_several_answers(f"You are given n numbers. {statement} The first line holds n.")


@pytest.mark.parametrize(
    ("statement", "accepts"),
    [
        ("You can print each letter in any case (upper or lower).", True),
        ("You may print every letter in any case you want (so, for example, the strings yEs, yes, Yes, and YES are all recognized).", True),
        ("Print the word in any register.", True),
        ('Output "YES" (without quotes, in any case) if it is possible.', True),
        ("The names are compared without regard to case.", False),
        ("In any case, print the sum.", False),
        ("Print YES or NO.", False),
        ("Convert the string to upper case.", False),
    ],
)
def test_statements_that_accept_any_case(statement: str, accepts: bool) -> None:
    assert accepts_any_case(statement) is accepts


def row(statement: str, output: str = "YES", **fields: Any) -> dict[str, Any]:
    return {"question": statement, "input_output": json.dumps({"inputs": ["1"], "outputs": [output]}), **fields}


def test_problems_with_a_special_judge_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source = tmp_path / "rows.jsonl"
    rows = [row("Print YES."), row("If there are multiple answers, print any."), row("Print any valid answer.")]
    source.write_text("\n".join(map(json.dumps, rows)))
    with caplog.at_level(logging.WARNING):
        assert len(load_pool(str(source), "error", None)) == 1
    assert any("left out 2 of 3 rows" in message and "special_judge=keep" in message for message in caplog.messages)
    assert len(load_pool(str(source), "error", None, (), JudgingRules(special_judge="keep"))) == 3
    source.write_text(json.dumps(rows[1]))
    with pytest.raises(BadInput, match=r"holds no usable row \(the statement accepts several answers"):
        load_pool(str(source), "skip", None, (), JudgingRules())
    with pytest.raises(RowLeftOut):
        read_judged_problem(Row(rows[1], "here"))


def test_assertions_judge_themselves_and_the_built_in_problems_need_no_judge() -> None:
    mbpp = {"text": "Write a function to return any of the numbers.", "test_list": ["assert f([1, 1]) == 1"]}
    assert isinstance(read_judged_problem(Row(mbpp, "here")), Problem)
    pool = builtin_pool(None, None)
    assert len(pool) == 80


@pytest.mark.parametrize(
    ("statement", "option", "ignored"),
    [
        ("You can print each letter in any case.", None, True),
        ("You can print each letter in any case.", False, False),
        ("Print YES or NO.", None, False),
        ("Print YES or NO.", True, True),
    ],
)
def test_case_is_ignored_where_the_statement_or_the_option_says_so(statement: str, option: bool | None, ignored: bool) -> None:
    problem = JudgingRules(ignore_case=option).applied(read_problem(Row(row(statement), "here")))
    (case,) = problem.cases
    assert case.check == Prints("YES", ignored)
    assert case.passed(Report("ok", stdout="yes\n")) is ignored
    assert case.passed(Report("ok", stdout="YES\n")) and not case.passed(Report("ok", stdout="no"))


def test_the_rules_are_options(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row("If there are multiple answers, print any.")))
    env = make_env("deepcoder", data=str(source), split="all", special_judge="keep", ignore_case=True)
    env.reset(0)
    assert env.step("```python\nprint('yes')\n```").success
    env.reset(0)
    assert not env.step("```python\nprint('no')\n```").success


# --- starter classes ---

TWO_SUM = "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
GEEKS = "#User function Template for python3\n\nclass Solution:\n    def isSubsetSum (self, N, arr, sum):\n        # code here \n"


def test_the_method_of_a_starter() -> None:
    assert starter_method(TWO_SUM) == ("twoSum", ["nums", "target"])
    assert starter_method(GEEKS) == ("isSubsetSum", ["N", "arr", "sum"])
    two = "class Solution:\n    def a(self, x):\n        pass\n    def b(self, x):\n        pass\n"
    for none in (
        "",
        "def f(x):",
        two,
        "class Other:\n    def f(self, x):\n        pass",
        "class Solution:\n    def f(self):\n        pass",
    ):
        assert starter_method(none) is None


@pytest.mark.parametrize(
    ("starter", "given", "arguments"),
    [
        (TWO_SUM, "[2, 7, 11]\n9", ([2, 7, 11], 9)),
        (TWO_SUM, "nums = [2, 7, 11], target = 9", ([2, 7, 11], 9)),
        (TWO_SUM, "target = 9\nnums = [2, 7, 11]", ([2, 7, 11], 9)),
        (TWO_SUM, [[2, 7, 11], 9], ([2, 7, 11], 9)),
        (TWO_SUM, ["[2, 7, 11]", "9"], ([2, 7, 11], 9)),
        (GEEKS, "N = 3\narr[] = {3, 34, 4}\nsum = 9", (3, [3, 34, 4], 9)),
        (GEEKS, "N = 3, arr[] = {3, 34, 4}, sum = 9", (3, [3, 34, 4], 9)),
    ],
)
def test_starter_classes_are_played_by_calls(starter: str, given: Any, arguments: tuple[Any, ...]) -> None:
    tests = {"inputs": [given], "outputs": ["[0, 1]"]}
    problem = read_problem(Row({"question": "Find them.", "input_output": json.dumps(tests), "starter_code": starter}, "here"))
    (case,) = problem.cases
    assert isinstance(case.task, CallTask) and case.task.args == arguments
    assert case.check == Returns([0, 1])
    assert case.passed(Report("ok", value=(0, 1))) and not case.passed(Report("ok", value=[1, 0]))
    assert problem.entry_point == starter_method(starter)[0] and not problem.reads_stdin  # type: ignore[index]


@pytest.mark.parametrize(
    ("given", "output", "more"),
    [
        ("3\n1 2 3", "6", {}),  # a line of numbers is no value
        ("[1, 2]", "3", {}),  # one value for two parameters
        ("[1]\n2\n3", "3", {}),
        ("[1, 2]\n3", "1 2 3", {}),  # no value is expected
        ("s = abc\nt = 3", "3", {}),
    ],
)
def test_other_tests_stay_text_for_standard_input(given: str, output: str, more: dict[str, Any]) -> None:
    tests = {"inputs": ["[1, 2]\n3", given], "outputs": ["5", output]}
    problem = read_problem(Row({"question": "q", "input_output": json.dumps(tests), "starter_code": TWO_SUM}, "here"))
    assert [case.task for case in problem.cases] == [StdinTask("[1, 2]\n3"), StdinTask(given)]


def test_a_row_that_says_standard_input_means_it() -> None:
    tests = [{"input": "[1, 2]\n3", "output": "5", "testtype": "stdin_stdout"}]
    problem = read_problem(Row({"problem": "q", "tests": tests, "starter_code": TWO_SUM}, "here"))
    assert problem.reads_stdin


def test_a_starter_class_is_played() -> None:
    tests = {"inputs": ["nums = [2, 7], target = 9", "nums = [1, 5, 3], target = 8"], "outputs": ["[0, 1]", "[1, 2]"]}
    problem = read_problem(Row({"question": "Find the two.", "input_output": tests, "starter_code": TWO_SUM}, "here"))
    env = DeepCoder(DeepCoderOptions(), generator=lambda seed, split: problem)
    assert "Write the class Solution with its method twoSum." in env.reset(0).text
    right = "for i, a in enumerate(nums):\n            for j in range(i + 1, len(nums)):\n                if a + nums[j] == target:\n                    return [i, j]"
    assert env.step(f"```python\n{TWO_SUM}{right}\n```").success
    env.reset(0)
    assert env.step(f"```python\n{TWO_SUM}return [0, 1]\n```").reward == 0.5
