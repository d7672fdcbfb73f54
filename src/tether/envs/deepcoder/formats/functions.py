"""Rows that open or name one function and test it by assertions: HumanEval, mxeval's MBPP, MBPP itself, and EvalPlus's versions of them.

HumanEval's `test` defines `check(candidate)`; MBPP's `test_list` holds one assertion per text. Both are taken apart by `assertions`,
EvalPlus's larger tests by `evalplus`. Which tests are public: those whose call the prompt shows as an example (`>>> f(1)`), and for
MBPP, whose rows show none, the first, which is then shown.
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
from tether.envs.deepcoder.formats.evalplus import evalplus_cases, is_evalplus
from tether.envs.deepcoder.formats.pairs import text_field
from tether.envs.deepcoder.parsing import NotPython, parse
from tether.envs.deepcoder.problem import Case, Near, Problem, digest_of
from tether.envs.deepcoder.sandbox.jobs import CallTask

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
        before = [node for node in tree.body if node is not check and not _is_noise(node)]
        suite = Suite(entry_point, check.body, alias=check.args.args[0].arg, before=before)
    return evalplus_cases(suite) if is_evalplus(before) else suite.cases()


def _is_noise(node: ast.stmt) -> bool:
    """HumanEval's METADATA, a docstring, the call of check itself."""
    metadata = isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["METADATA"]
    return metadata or isinstance(node, ast.Expr)


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
