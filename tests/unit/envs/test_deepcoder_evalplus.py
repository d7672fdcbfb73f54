"""EvalPlus's tests: the loop over two lists taken apart, its other comparisons run without numpy."""

from typing import Any

import pytest

from tether.envs.dataset import Row
from tether.envs.deepcoder.dataset import read_problem
from tether.envs.deepcoder.env import DeepCoder, DeepCoderOptions
from tether.envs.deepcoder.problem import Near, Problem
from tether.envs.deepcoder.sandbox.jobs import CallTask, Report, ScriptTask
from tether.envs.deepcoder.sandbox.sandbox import describe_isolation

ISOLATION = describe_isolation().name or "process"
IS_FLOATS = """
def is_floats(x) -> bool:
    # check if it is float; List[float]; Tuple[float]
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)) and x:
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype == np.float64 or x.dtype == np.float32
    return False
"""
ASSERTION = """
def assertion(out, exp, atol):
    exact_match = out == exp

    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if not exact_match and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert exact_match, f"out: {out}, exp: {exp}"
"""
OLDER = ASSERTION.replace("assert np.allclose(out, exp, rtol=1e-07, atol=atol)", "np.testing.assert_allclose(out, exp, atol=atol)")
AS_SETS = """
def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    out = set(out)
    exp = set(exp)
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"
"""
LOOP = """
inputs = [[1, [2]], [inf, []], [0, []]]
results = [3, 0.5, [1.0, 2.0]]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(CALL(*inp), exp, 0)
"""


def humaneval_plus(assertion: str, loop: str) -> Problem:
    body = "".join(f"    {line}\n" for line in loop.replace("CALL", "candidate").strip().splitlines())
    test = f"import numpy as np\n{IS_FLOATS}{assertion}\ndef check(candidate):\n{body}"
    return read_problem(Row({"prompt": "def g(a, b):\n    ...\n", "entry_point": "g", "test": test}, "row"))


def mbpp_plus(assertion: str, loop: str) -> Problem:
    test = f"import numpy as np\nfrom math import inf\n{IS_FLOATS}{assertion}{loop.replace('CALL', 'g')}"
    fields = {"prompt": "Write g.", "test_list": ["assert g(1, [2]) == 3"], "test_imports": [], "code": "def g(a, b): ...", "test": test}
    return read_problem(Row(fields, "row"))


def reward(problem: Problem, code: str) -> float:
    env = DeepCoder(DeepCoderOptions(isolation=ISOLATION), generator=lambda seed, split: problem)
    env.reset(0)
    return env.step(f"```python\n{code}\n```").reward


def values_passed(case: Any, *values: object) -> list[bool]:
    return [case.passed(Report("ok", value=value)) for value in values]


@pytest.mark.parametrize("assertion", [ASSERTION, OLDER])
def test_the_loop_becomes_one_case_per_item(assertion: str) -> None:
    problem = humaneval_plus(assertion, LOOP)
    assert [case.task for case in problem.cases] == [CallTask("g", (1, [2])), CallTask("g", (float("inf"), [])), CallTask("g", (0, []))]
    assert [case.check for case in problem.cases] == [Near(3, 0, 0), Near(0.5, 1e-6, 1e-7), Near([1.0, 2.0], 1e-6, 1e-7)]
    first, second, third = problem.cases
    assert values_passed(first, 3, 3.0000001, "3") == [True, False, False]
    assert values_passed(second, 0.5, 0.500001, 0.50001, None, 10**400) == [True, True, False, False, False]
    assert values_passed(third, [1.0, 2.0], [1, 2.0000001], [1.0], 1.0) == [True, True, False, False]


def test_mbpp_plus_adds_them_to_its_list() -> None:
    problem = mbpp_plus(ASSERTION, LOOP.replace(", 0)", ", 0.01)"))
    assert [case.task for case in problem.cases][:2] == [CallTask("g", (1, [2]))] * 2
    assert [case.check for case in problem.cases][1:] == [Near(3, 0.01, 1e-7), Near(0.5, 0.01, 1e-7), Near([1.0, 2.0], 0.01, 1e-7)]
    assert [case.public for case in problem.cases] == [True, False, False, False]


def test_a_reference_function_is_run_without_numpy() -> None:
    loop = "def ref_func(a, b):\n    return a / 3\n\ninputs = [[1, 0], [2, 0]]\nfor i, inp in enumerate(inputs):\n    assertion(CALL(*inp), ref_func(*inp), 0)\n"
    problem = mbpp_plus(ASSERTION, loop)
    assert isinstance(problem.cases[1].task, ScriptTask)
    assert "numpy" not in problem.cases[1].task.script
    assert reward(problem, "def g(a, b):\n    return 3 if b == [2] else a / 3 + 1e-9") == 1.0
    assert reward(problem, "def g(a, b):\n    return 3 if b == [2] else a / 3 + 1e-4") == 0.5


def test_another_comparison_is_run_without_numpy() -> None:
    loop = LOOP.replace("[3, 0.5, [1.0, 2.0]]", "[(1, 2), (1, 2), (2, 1)]").replace("inf", "5")
    problem = mbpp_plus(AS_SETS, loop)
    assert [type(case.task) for case in problem.cases] == [CallTask, ScriptTask]
    assert reward(problem, "def g(a, b):\n    return 3 if hasattr(g, 'x') else [2, 1, 1]") == 0.5
    assert reward(problem, "def g(a, b):\n    return [2, 3]") == 0.0


def test_a_comparison_that_asserts_nothing_adds_no_test() -> None:
    assert len(mbpp_plus("\ndef assertion(out, exp, atol):\n    exact_match = out == exp\n", LOOP).cases) == 1
