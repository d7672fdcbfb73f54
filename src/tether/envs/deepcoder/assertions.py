"""Tests written as Python assertions, taken apart into single cases.

`assert f(1, 2) == 3` becomes a call of f in the sandbox and a comparison outside it; so does any assertion with one call of the function
under test (or the same one twice) whose arguments are constants, if the rest is an expression that `expressions` can evaluate. Names
given their value before (`x = f(1)`, then `assert x == 3`) are looked through. Every other assertion, and every loop or helper call with
assertions in it, stays a script of its own together with the statements before it that assert nothing; if a later statement needs
what such a loop computed, the whole remains one script. Each is one test. An assertion that calls nothing (`assert True`) is none.
"""

import ast
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tether.envs.deepcoder.expressions import RESULT, Unsupported, check_supported, constant
from tether.envs.deepcoder.problem import TRUTH_OF, Case, Passes, Satisfies
from tether.envs.deepcoder.sandbox.jobs import CallTask, ScriptTask

_CHANGEABLE = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp, ast.Call)
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Suite:
    """The statements of a test and what they may refer to.

    `alias` is another name of the function under test, such as the `candidate` of HumanEval's check; `before` are imports and functions
    that stand outside the body, and are part of every script.
    """

    def __init__(self, entry_point: str, body: Sequence[ast.stmt], *, alias: str = "", before: Sequence[ast.stmt] = ()) -> None:
        self.entry_point, self.body, self.alias, self.before = entry_point, body, alias, before
        self._bound = [_bound(statement) for statement in body]
        self._read = [_read(statement) for statement in body]
        around = [*before, *body]
        self._asserting_helpers = {node.name for node in around if isinstance(node, ast.FunctionDef) and _holds_assert(node)}
        # Names that the test gives a meaning of its own, so that ours may not be assumed.
        self._redefined = {node.name for node in around if isinstance(node, _DEFINITIONS)} | {
            name for names in self._bound for name in names
        }
        self._values = self._single_values()

    def cases(self) -> list[Case]:
        """One case per assertion."""
        asserts = [self._asserts(statement) for statement in self.body]
        return [self.script(self.body)] if self._entangled(asserts) else self._separate_cases(asserts)

    def script(self, statements: Sequence[ast.stmt]) -> Case:
        """Statements to be run in the sandbox after the program."""
        alias = [f"{self.alias} = {self.entry_point}"] if self.alias and self.alias != self.entry_point else []
        return Case(ScriptTask("\n".join([*map(ast.unparse, self.before), *alias, *map(ast.unparse, statements)]) + "\n"), Passes())

    def _separate_cases(self, asserts: Sequence[bool]) -> list[Case]:
        cases: list[Case] = []
        setup: list[ast.stmt] = []
        for statement, is_test in zip(self.body, asserts, strict=True):
            if isinstance(statement, ast.Assert):
                test = _with_values(statement.test, self._values)
                if any(isinstance(node, ast.Call) for node in ast.walk(test)):
                    cases.append(self._called(test) or self.script([*setup, statement]))
            elif is_test:
                cases.append(self.script([*setup, statement]))
            elif not isinstance(statement, ast.Pass) and not (  # a docstring or a bare name does nothing either
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant | ast.Name)
            ):
                setup.append(statement)
        return cases

    def _called(self, test: ast.expr) -> Case | None:
        """The assertion as a call and an expression about its value; None if it must stay a script."""
        calls: list[ast.Call] = []

        def without_calls(node: ast.AST) -> ast.AST | None:
            if not isinstance(node, ast.Call) or not self._is_own_call(node):
                return None
            calls.append(node)
            return ast.Name(RESULT, ast.Load())

        expression: ast.expr = _changed(test, without_calls)
        if len({ast.dump(call) for call in calls}) != 1 or calls[0].keywords or self._redefined & set(_read(expression)):
            return None
        try:
            arguments = tuple(constant(argument) for argument in calls[0].args)
            check_supported(expression)
        except Unsupported:
            return None
        negated = isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.Not)
        bare = expression.operand if isinstance(expression, ast.UnaryOp) and negated else expression
        if isinstance(bare, ast.Name) and bare.id == RESULT:  # `assert f(1)`, `assert not f(1)`: only whether the result is true
            return Case(CallTask(TRUTH_OF, (self.entry_point, list(arguments))), Satisfies(expression))
        return Case(CallTask(self.entry_point, arguments), Satisfies(expression))

    def _single_values(self) -> dict[str, ast.expr]:
        """Names that are assigned once, where each reader may have a value of its own: it cannot be changed, or is read once, or is what
        the function under test returns."""
        bound, read = Counter(name for names in self._bound for name in names), Counter(name for names in self._read for name in names)
        values: dict[str, ast.expr] = {}
        for statement in self.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if bound[name] == 1:
                    fixed = not any(isinstance(node, _CHANGEABLE) for node in ast.walk(value))
                    if read[name] == 1 or self._is_own_call(value) or fixed:
                        values[name] = _with_values(value, values)
        return values

    def _is_own_call(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in (self.entry_point, self.alias)

    def _asserts(self, statement: ast.stmt) -> bool:
        """Whether a statement asserts, itself or through a function of the test."""
        if isinstance(statement, _DEFINITIONS):
            return False
        called = {part.func.id for part in ast.walk(statement) if isinstance(part, ast.Call) and isinstance(part.func, ast.Name)}
        return _holds_assert(statement) or bool(self._asserting_helpers & called)

    def _entangled(self, asserts: Sequence[bool]) -> bool:
        """Whether a statement reads what an asserting statement before it has bound: then nothing can be taken apart."""
        computed: set[str] = set()
        for bound, read, is_test in zip(self._bound, self._read, asserts, strict=True):
            if computed & (set(read) - set(bound)):
                return True
            if is_test:
                computed |= set(bound)
        return False


def _with_values(expression: ast.expr, values: Mapping[str, ast.expr]) -> ast.expr:
    """The expression with the names that have a value replaced by it."""
    if not values:
        return expression
    changed: ast.expr = _changed(expression, lambda node: values.get(node.id) if isinstance(node, ast.Name) else None)
    return changed


def _changed(node: Any, change: Callable[[ast.AST], ast.AST | None]) -> Any:
    """The tree with each node that `change` answers replaced by its answer; what is unchanged is shared, never copied."""
    replaced = change(node)
    if replaced is not None:
        return replaced
    fields = {name: _changed_field(value, change) for name, value in ast.iter_fields(node)}
    if all(fields[name] is value for name, value in ast.iter_fields(node)):
        return node
    return type(node)(**fields)


def _changed_field(value: Any, change: Callable[[ast.AST], ast.AST | None]) -> Any:
    if isinstance(value, ast.AST):
        return _changed(value, change)
    if not isinstance(value, list):
        return value
    items = [_changed_field(item, change) for item in value]
    return value if all(item is before for item, before in zip(items, value, strict=True)) else items


def _holds_assert(node: ast.AST) -> bool:
    return isinstance(node, ast.Assert) or any(isinstance(part, ast.Assert) for part in ast.walk(node))


def _bound(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load)]


def _read(node: ast.AST) -> list[str]:
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load)]
