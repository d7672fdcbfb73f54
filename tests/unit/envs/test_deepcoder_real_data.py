"""Reference solutions of public data pass and changed ones fail: MBPP as mxeval published it, and rows in HumanEval's own form."""

import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.seeding import derive_seed
from tether.envs.dataset import Row
from tether.envs.deepcoder.dataset import read_problem
from tether.envs.deepcoder.env import DeepCoder, DeepCoderOptions
from tether.envs.deepcoder.problem import Problem
from tether.envs.deepcoder.sandbox.jobs import CallTask, ScriptTask
from tether.envs.deepcoder.sandbox.sandbox import describe_isolation

ISOLATION = describe_isolation().name or "process"

MBPP = Path(__file__).parents[4] / "shared" / "data" / "mbpp" / "mbpp_release_v1.jsonl"
BROKEN = {
    "MBPP/64": "its prompt is not indented, so that it is no Python",
    "MBPP/160": "its test expects 'No candidate', a slip of the pen for 'No solution'",
    "MBPP/367": "its test uses root, which nothing defines",
    "MBPP/596": "its test expects the size of a tuple in an older Python",
    "MBPP/601": "its test uses Pair, which is defined inside the function only",
    "MBPP/607": "its solution overwrites its arguments",
    "MBPP/631": "its solution overwrites its argument",
    "MBPP/642": "its solution depends on the order of a set",
    "MBPP/927": "its test uses root, which nothing defines",
    "MBPP/966": "its solution is not indented as its prompt is",
}
"""Rows whose own solution fails their own test when both are run as they stand, without any of our code."""

needs_mbpp = pytest.mark.skipif(not MBPP.exists(), reason="the MBPP file is not beside the checkout")

ROTATE = {
    "task_id": "Ours/0",
    "prompt": (
        "def rotate(text: str, by: int) -> str:\n    return text[by:] + text[:by]\n\n\n"
        'def unrotate(text: str, by: int) -> str:\n    """\n    Undo rotate.\n    >>> unrotate("cdab", 2)\n    \'abcd\'\n    """\n'
    ),
    "entry_point": "unrotate",
    "canonical_solution": "    by = len(text) - by\n    return text[by:] + text[:by]\n",
    "test": (
        "\n\nMETADATA = {'author': 'us'}\n\n\ndef check(candidate):\n    from random import randint, choice\n    import string\n\n"
        "    letters = string.ascii_lowercase\n    assert candidate('cdab', 2) == 'abcd'\n    for _ in range(50):\n"
        "        text = ''.join(choice(letters) for i in range(randint(5, 9)))\n        assert candidate(rotate(text, 3), 3) == text\n\n"
    ),
}
ROOT = {
    "task_id": "Ours/1",
    "prompt": (
        "import math\n\n\ndef cubic(xs: list, x: float):\n    return sum([c * math.pow(x, i) for i, c in enumerate(xs)])\n\n\n"
        'def find_root(xs: list):\n    """ A zero of the polynomial, between -100 and 100.\n    >>> round(find_root([1, 2]), 2)\n    -0.5\n    """\n'
    ),
    "entry_point": "find_root",
    "canonical_solution": (
        "    low, high = -100.0, 100.0\n    for _ in range(200):\n        middle = (low + high) / 2\n"
        "        if cubic(xs, middle) * cubic(xs, low) > 0:\n            low = middle\n        else:\n            high = middle\n    return low\n"
    ),
    "test": (
        "def check(candidate):\n    import math\n    import random\n    rng = random.Random(42)\n    import copy\n    for _ in range(20):\n"
        "        xs = [rng.randint(-9, 9), rng.randint(1, 9)]\n        solution = candidate(copy.deepcopy(xs))\n"
        "        assert math.fabs(cubic(xs, solution)) < 1e-4\n    assert abs(candidate([1, 2]) - -0.5) < 1e-6\n"
    ),
}
TRUTHS = {
    "task_id": "Ours/2",
    "prompt": (
        "from typing import List, Optional\n\n\ndef below(numbers: List[int], limit: Optional[int]) -> bool:\n"
        '    """Whether all numbers are below a limit.\n    >>> below([1], 2)\n    True\n    """\n'
    ),
    "entry_point": "below",
    "canonical_solution": "    return limit is None or all(number < limit for number in numbers)\n",
    "test": (
        "def check(candidate):\n\n    # Simple cases\n    assert candidate([1], 2), 'text'\n    assert not candidate([1, 2], 2)\n"
        "    assert candidate([], 0) is True\n    assert candidate([5], None) == True\n    assert True, 'good for debugging'\n"
        "    assert candidate([3 * 5], 3 * 5 + 1) == (1 < 2)\n\n    # Edge cases\n    assert True\n"
    ),
}
SORTED = {
    "task_id": "Ours/3",
    "prompt": 'def tidy(items: list):\n    """Sorted, each once."""\n',
    "entry_point": "tidy",
    "canonical_solution": "    return sorted(set(items))\n",
    "test": (
        "METADATA = {}\n\n\ndef check(candidate):\n    assert tuple(candidate([2, 1, 2])) == tuple(tidy([2, 1, 2]))\n"
        "    assert tuple(candidate([2, 1, 2])) == tuple([1, 2])\n    x0 = candidate([])\n    assert x0 == []\n"
        "    items = list(range(5, 0, -1))\n    wanted = [i for i in range(1, 6)]\n    assert candidate(items) == wanted, 'message'\n"
    ),
}
HUMANEVAL_STYLE = [ROTATE, ROOT, TRUTHS, SORTED]


def played(problem: Problem, code: str) -> tuple[float, dict[str, Any]]:
    env = DeepCoder(DeepCoderOptions(time_limit=3, isolation=ISOLATION), generator=lambda seed, split: problem)
    env.reset(0)
    step = env.step(f"```python\n{code}\n```")
    return step.reward, step.info


def mbpp_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in MBPP.read_text(encoding="utf-8").splitlines()]


def sample(count: int) -> list[dict[str, Any]]:
    """Always the same rows."""
    usable = [row for row in mbpp_rows() if row["task_id"] not in BROKEN]
    return random.Random(derive_seed("mbpp sample")).sample(usable, count)


def mutants(source: str, entry_point: str) -> Iterator[str]:
    """The program with one operator or constant of it changed, for each that can be."""
    swaps: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Lt: ast.GtE, ast.Gt: ast.LtE, ast.Eq: ast.NotEq}
    for at, _ in enumerate(ast.walk(ast.parse(source))):
        tree = ast.parse(source)
        node = list(ast.walk(tree))[at]
        if isinstance(node, ast.BinOp) and type(node.op) in swaps:
            node.op = swaps[type(node.op)]()
        elif isinstance(node, ast.Compare) and type(node.ops[0]) in swaps:
            node.ops[0] = swaps[type(node.ops[0])]()
        elif isinstance(node, ast.Constant) and type(node.value) is int:
            node.value += 1
        elif isinstance(node, ast.Return) and node.value is not None:
            node.value = ast.Constant(None)
        else:
            continue
        yield ast.unparse(tree)


@needs_mbpp
def test_mbpp_solutions_pass() -> None:
    for row in sample(60):
        reward, info = played(read_problem(Row(row, row["task_id"])), row["prompt"] + row["canonical_solution"])
        assert reward == 1.0, f"{row['task_id']}: {info}"


@needs_mbpp
def test_mbpp_solutions_pass_as_completions() -> None:
    for row in sample(12):
        assert played(read_problem(Row(row, row["task_id"])), row["canonical_solution"].strip())[0] == 1.0, row["task_id"]


@needs_mbpp
def test_changed_mbpp_solutions_fail() -> None:
    """Most changes show: some change nothing that three tests could see."""
    killed = total = 0
    for row in sample(60)[:25]:
        problem = read_problem(Row(row, row["task_id"]))
        changed = list(mutants(row["prompt"] + row["canonical_solution"], row["entry_point"]))
        picked = random.Random(derive_seed("mutant", row["task_id"])).sample(changed, min(2, len(changed)))
        outcomes = [played(problem, code)[0] < 1.0 for code in picked]
        killed, total = killed + sum(outcomes), total + len(outcomes)
    assert total >= 40
    assert killed / total > 0.75


@needs_mbpp
def test_every_mbpp_row_loads_and_nearly_every_assertion_is_compared_outside() -> None:
    problems = [read_problem(Row(row, row["task_id"])) for row in mbpp_rows()]
    assert len(problems) == 974
    tasks = [case.task for problem in problems for case in problem.cases]
    assert len(tasks) == 2922
    inside = {problem.source for problem in problems for case in problem.cases if isinstance(case.task, ScriptTask)}
    assert inside == {"MBPP/367", "MBPP/533", "MBPP/601", "MBPP/927"}
    assert sum(any(case.public for case in problem.cases) for problem in problems) == 970


@needs_mbpp
def test_mbpp_by_path() -> None:
    env = DeepCoder(DeepCoderOptions(data=str(MBPP), split=Split.ALL, isolation=ISOLATION))
    text = env.reset(0).text
    assert text.startswith("Turn 1 of 1.\nComplete this function.\n\nStarter code:\n```python\ndef min_cost(cost, m, n):\n")
    assert env.problem.source == "MBPP/1"


@pytest.mark.parametrize("row", HUMANEVAL_STYLE, ids=lambda row: row["entry_point"])
def test_humaneval_style_solutions_pass_in_every_form(row: dict[str, str]) -> None:
    problem = read_problem(Row(row, "row"))
    body = row["canonical_solution"]
    alone = row["prompt"][row["prompt"].index(f"def {row['entry_point']}") :] + body
    for answer in (problem.solution, body, body.strip(), alone):
        reward, info = played(problem, answer)
        assert reward == 1.0, info


@pytest.mark.parametrize("row", HUMANEVAL_STYLE, ids=lambda row: row["entry_point"])
def test_humaneval_style_solutions_fail_when_changed(row: dict[str, str]) -> None:
    problem = read_problem(Row(row, "row"))
    assert played(problem, "    return None")[0] < 1.0
    assert played(problem, f"def {row['entry_point']}(*args):\n    raise KeyError")[0] == 0.0


def test_which_humaneval_style_tests_are_compared_outside() -> None:
    kinds = {
        row["entry_point"]: [type(case.task) for case in read_problem(Row(row, "row")).cases]
        for row in HUMANEVAL_STYLE
    }  # fmt: skip
    assert kinds == {
        "unrotate": [CallTask, ScriptTask],
        "find_root": [ScriptTask, CallTask],
        "below": [CallTask] * 5,
        "tidy": [ScriptTask, CallTask, CallTask, ScriptTask],
    }
    assert [case.public for case in read_problem(Row(ROTATE, "row")).cases] == [True, False]
    assert [case.public for case in read_problem(Row(TRUTHS, "row")).cases] == [True, False, False, False, False]
