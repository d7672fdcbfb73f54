"""EvalPlus's tests (HumanEval+, MBPP+): a loop over two long lists, with a comparison of its own that needs numpy.

    def assertion(out, exp, atol): ...
    inputs, results = [...], [...]
    for i, (inp, exp) in enumerate(zip(inputs, results)):
        assertion(f(*inp), exp, 0)

The loop is recognised and becomes one case per item, compared outside the sandbox by the same rule: equal, or, if the expected value is
a float or a list of floats (or the problem has a tolerance), near it. Where the expected values are computed by a reference function
instead, or the comparison is another one (as sets, against two oracles), the test stays a script, with what it needs numpy for
rewritten: there is no numpy in the sandbox.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from tether.envs.deepcoder.assertions import Suite
from tether.envs.deepcoder.expressions import Unsupported, constant
from tether.envs.deepcoder.parsing import parse
from tether.envs.deepcoder.problem import Case, Near
from tether.envs.deepcoder.sandbox.jobs import CallTask

_FLOAT_TOLERANCE = 1e-6
_RELATIVE = 1e-7
_NUMPY_COMPARISONS = ("np.allclose(out, exp, rtol=1e-07, atol=atol)", "np.testing.assert_allclose(out, exp, atol=atol)")
_IS_FLOATS = """
def is_floats(x):
    return isinstance(x, float) or (isinstance(x, (list, tuple)) and bool(x) and all(isinstance(i, float) for i in x))
"""
_ASSERTION = f"""
def is_near(out, exp, atol):
    if isinstance(exp, (list, tuple)):
        return isinstance(out, (list, tuple)) and len(out) == len(exp) and all(is_near(o, e, atol) for o, e in zip(out, exp))
    return abs(out - exp) <= atol + {_RELATIVE} * abs(exp)

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = {_FLOAT_TOLERANCE}
    assert out == exp or (atol != 0 and is_near(out, exp, atol))
"""


def is_evalplus(before: Sequence[ast.stmt]) -> bool:
    """Whether a test has the comparison that EvalPlus's tests have."""
    return _comparison(before) is not None


def evalplus_cases(suite: Suite) -> list[Case]:
    """The cases of a suite that `is_evalplus`."""
    usual = _is_usual(_comparison(suite.before))
    return (_items(suite) if usual else []) or _without_numpy(suite, usual).cases()


def _comparison(before: Sequence[ast.stmt]) -> ast.FunctionDef | None:
    return next((node for node in before if isinstance(node, ast.FunctionDef) and node.name == "assertion"), None)


def _is_usual(comparison: ast.FunctionDef | None) -> bool:
    """Whether it compares by numpy's tolerance and changes nothing of what it compares."""
    if comparison is None or [argument.arg for argument in comparison.args.args] != ["out", "exp", "atol"]:
        return False
    changed = {node.id for node in ast.walk(comparison) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return changed <= {"atol", "exact_match"} and any(usual in ast.unparse(comparison) for usual in _NUMPY_COMPARISONS)


def _items(suite: Suite) -> list[Case]:
    """One case per item of the two lists; none if the loop is another one."""
    loop = next((node for node in suite.body if isinstance(node, ast.For)), None)
    if loop is None or ast.unparse(loop.target) != "(i, (inp, exp))" or ast.unparse(loop.iter) != "enumerate(zip(inputs, results))":
        return []
    name = re.escape(suite.alias or suite.entry_point)
    call = re.fullmatch(rf"assertion\({name}\(\*inp\), exp, (?P<atol>[0-9.e-]+)\)", "; ".join(map(ast.unparse, loop.body)))
    try:
        columns = {ast.unparse(node.targets[0]): constant(node.value) for node in suite.body if isinstance(node, ast.Assign)}
        pairs = list(zip(columns["inputs"], columns["results"], strict=True))
    except (Unsupported, KeyError, ValueError):
        return []
    return [_near_case(suite.entry_point, given, expected, float(call["atol"])) for given, expected in pairs] if call else []


def _near_case(entry_point: str, given: Any, expected: Any, tolerance: float) -> Case:
    absolute = _FLOAT_TOLERANCE if tolerance == 0 and _is_floats(expected) else tolerance
    return Case(CallTask(entry_point, tuple(given)), Near(expected, absolute, _RELATIVE if absolute else 0.0))


def _is_floats(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, list | tuple) and bool(value) and all(isinstance(item, float) for item in value))


def _without_numpy(suite: Suite, usual: bool) -> Suite:
    rewritten = {"is_floats": _IS_FLOATS} | ({"assertion": _ASSERTION} if usual else {})
    kept = [
        node for node in suite.before if not _imports_numpy(node) and not (isinstance(node, ast.FunctionDef) and node.name in rewritten)
    ]
    before = [*parse("\n".join(rewritten.values())).body, *kept]
    return Suite(suite.entry_point, suite.body, alias=suite.alias, before=before)


def _imports_numpy(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and node.names[0].name == "numpy"
