"""Rows that open or name one function and test it by assertions: HumanEval, mxeval's MBPP, MBPP itself, and EvalPlus's versions of them.

HumanEval's `test` defines `check(candidate)`; MBPP's `test_list` holds one assertion per text. Both are taken apart by `assertions`,
EvalPlus's larger tests here. Which tests are public: those whose call the prompt shows as an example (`>>> f(1)`), and for
MBPP, whose rows show none, the first, which is then shown.

EvalPlus's tests (HumanEval+, MBPP+) are a loop over two long lists, with a comparison of its own that needs numpy:

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
import builtins
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tether.envs.dataset import Row, RowError
from tether.envs.deepcoder.assertions import Suite
from tether.envs.deepcoder.expressions import Unsupported, constant
from tether.envs.deepcoder.pair_rows import text_field
from tether.envs.deepcoder.parsing import NotPython, parse
from tether.envs.deepcoder.problem import Case, Near, Problem, digest_of
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


def evalplus_cases(suite: Suite) -> list[Case] | None:
    """The cases of a suite that has the comparison of EvalPlus's tests; None for any other."""
    comparison = next((node for node in suite.before if isinstance(node, ast.FunctionDef) and node.name == "assertion"), None)
    if comparison is None:
        return None
    usual = _is_usual(comparison)
    return (_items(suite) if usual else []) or _without_numpy(suite, usual).cases()


def _is_usual(comparison: ast.FunctionDef) -> bool:
    """Whether it compares by numpy's tolerance and changes nothing of what it compares."""
    if [argument.arg for argument in comparison.args.args] != ["out", "exp", "atol"]:
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
    if call is None:
        return []
    cases = []
    for given, expected in pairs:
        values = expected if isinstance(expected, list | tuple) else [expected]
        floats = bool(values) and all(isinstance(value, float) for value in values)
        tolerance = float(call["atol"]) or (_FLOAT_TOLERANCE if floats else 0.0)
        cases.append(Case(CallTask(suite.entry_point, tuple(given)), Near(expected, tolerance, _RELATIVE if tolerance else 0.0)))
    return cases


def _without_numpy(suite: Suite, usual: bool) -> Suite:
    rewritten = {"is_floats": _IS_FLOATS} | ({"assertion": _ASSERTION} if usual else {})
    kept = [
        node
        for node in suite.before
        if not (isinstance(node, ast.Import) and node.names[0].name == "numpy")
        and not (isinstance(node, ast.FunctionDef) and node.name in rewritten)
    ]
    before = [*parse("\n".join(rewritten.values())).body, *kept]
    return Suite(suite.entry_point, suite.body, alias=suite.alias, before=before)


_EXAMPLE = re.compile(r"^\s*>>>\s*(?P<call>.+?)\s*$", re.MULTILINE)


def humaneval(row: Row) -> Problem:
    """{prompt, entry_point, test, canonical_solution?, task_id?}: HumanEval, HumanEval+ and mxeval's MBPP."""
    prompt, entry_point, test = row.fields("prompt", "entry_point", "test")
    if not all(isinstance(value, str) and value.strip() for value in (prompt, entry_point, test)):
        raise RowError("has an empty prompt, entry_point or test")
    cases = _check_cases(test, entry_point)
    if not cases:
        raise RowError("has a test that asserts nothing about the function")
    shown = _shown_calls(prompt)
    cases = [replace(case, public=isinstance(case.task, CallTask) and case.given in shown) for case in cases]
    return Problem(
        statement="Complete this function.",
        cases=tuple(cases),
        digest=digest_of(cases),
        starter=prompt,
        entry_point=entry_point,
        solution=f"{prompt.rstrip()}\n{solution}" if (solution := text_field(row, "canonical_solution")) else "",
        source=text_field(row, "task_id"),
    )


def mbpp(row: Row) -> Problem:
    """{text or prompt, test_list, code?, test_setup_code?, test_imports?, challenge_test_list?, test?}: MBPP, sanitized MBPP, MBPP+."""
    (test_list,) = row.fields("test_list")
    statement = text_field(row, "text") or text_field(row, "prompt")
    code = text_field(row, "code").replace("\r\n", "\n")
    if not statement.strip():
        raise RowError("has neither text nor prompt")
    lines = [*_texts(test_list, "test_list"), *_texts(row.value.get("challenge_test_list") or [], "challenge_test_list")]
    statements = [statement for line in lines for statement in _parsed(line, "test_list").body]
    entry_point = _tested_function(statements, code)
    before = _parsed("\n".join(_texts(row.value.get("test_imports") or [], "test_imports")), "test_imports").body
    setup = _parsed(text_field(row, "test_setup_code").replace("\r\n", "\n"), "test_setup_code").body
    cases = Suite(entry_point, statements, before=[*before, *setup]).cases()
    if test := text_field(row, "test"):
        cases += _check_cases(test, entry_point)
    if not cases:
        raise RowError("has no tests")
    cases[0] = replace(cases[0], public=True)
    return Problem(
        statement=statement.strip(),
        cases=tuple(cases),
        digest=digest_of(cases),
        entry_point=entry_point,
        solution=code,
        source=f"MBPP/{text_field(row, 'task_id')}",
        show_examples=True,
    )


def _check_cases(test: str, entry_point: str) -> list[Case]:
    """The cases of a test module: of its function check, or of its top level where it has none."""
    tree = _parsed(test, "test")
    check = next((node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "check" and node.args.args), None)
    if check is None:
        before: Sequence[ast.stmt] = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef)]
        suite = Suite(entry_point, [node for node in tree.body if node not in before], before=before)
    else:
        # HumanEval's METADATA, a docstring and the call of check itself are no part of a test.
        before = [
            node
            for node in tree.body
            if node is not check and not isinstance(node, ast.Expr) and not ast.unparse(node).startswith("METADATA = ")
        ]
        suite = Suite(entry_point, check.body, alias=check.args.args[0].arg, before=before)
    cases = evalplus_cases(suite)
    return suite.cases() if cases is None else cases


def _shown_calls(prompt: str) -> set[str]:
    """The calls that the prompt gives as examples, in the notation of Case.given."""
    calls: set[str] = set()
    for example in _EXAMPLE.finditer(prompt):
        try:
            tree = parse(example["call"])
            call = tree.body[0].value if len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.keywords:
                calls.add(Case(CallTask(call.func.id, tuple(map(constant, call.args))), Near(None, 0, 0)).given)
        except (NotPython, Unsupported):
            continue
    return calls


def _tested_function(statements: Sequence[ast.stmt], code: str) -> str:
    """The function that assertions are about: one they all call, defined by the reference solution if there is one."""
    called = [
        {node.func.id: None for node in ast.walk(statement) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        for statement in statements
        if isinstance(statement, ast.Assert)
    ]
    if not called:
        raise RowError("has a test_list without assertions")
    common = [name for name in called[0] if all(name in names for names in called)]
    defined = {node.name for node in _parsed(code, "code").body if isinstance(node, ast.FunctionDef)}
    for name in common:
        if name in defined if defined else not hasattr(builtins, name):
            return name
    raise RowError("has assertions that do not all call one function")


def _parsed(text: str, what: str) -> ast.Module:
    try:
        return parse(text.replace("\r\n", "\n"))
    except NotPython as error:
        raise RowError(f"has a field '{what}' that is not Python: {error}") from error


def _texts(value: Any, what: str) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise RowError(f"has a field '{what}' that is not a list of texts")
    return value
