"""A small evaluator for the expressions that tests are written in: literals, arithmetic, comparisons, a few pure functions.

The tests of a data set are text from elsewhere and are never executed in this process. Most of them are `assert f(1, 2) == 3` or
near it; evaluating those here, with the value that f returned in the sandbox put in place of the call, keeps the comparison out of
the program's reach. Whatever this evaluator does not know raises `Unsupported`, and such a test runs in the sandbox as it stands.
The returned value is the program's to choose, so it may only enter operations whose cost stays in proportion to its size: no
powers, no repetition, no formatting.
"""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

RESULT = "_result_"
"""The name that stands for what the function returned."""

_LARGEST_POWER_BITS = 4096
_LONGEST_RANGE = 100_000

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Div: operator.truediv,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_BINARY_ON_RESULT = (ast.Add, ast.Sub, ast.Div)
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}
_CALLS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (abs, bool, float, int, len, list, max, min, round, set, sorted, tuple)
} | {"sum": lambda items: sum(items), "math.isclose": math.isclose, "isclose": math.isclose, "math.fabs": math.fabs}
_CONSTANT_CALLS: dict[str, Callable[..., Any]] = {"range": lambda *bounds: list(_short(range(*bounds)))}
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (bool, int, float, str, list, tuple, dict, set)}
_NAMES: dict[str, Any] = {"inf": math.inf, "nan": math.nan, "math.inf": math.inf, "math.nan": math.nan, "math.pi": math.pi}
_EVALUATION_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, RecursionError, MemoryError)


class Unsupported(Exception):
    """An expression this evaluator does not know."""


def constant(node: ast.expr) -> Any:
    """The value of an expression that does not depend on the program; Unsupported if it has none."""
    try:
        _check_known(node)
        if _has_result(node):
            raise Unsupported("depends on the program")
        return _value(node, None)
    except _EVALUATION_ERRORS as error:
        raise Unsupported(f"fails: {error}") from error


def check_supported(expression: ast.expr) -> None:
    """Raise Unsupported unless `holds` can evaluate this whatever the program returns: its parts are known, its constants have values."""
    try:
        _check_known(expression)
        waiting = [expression]
        while waiting:
            part = waiting.pop()
            if _has_result(part):
                waiting += _operands(part)
            else:
                _value(part, None)
    except _EVALUATION_ERRORS as error:
        raise Unsupported(f"fails: {error}") from error


def holds(expression: ast.expr, result: Any) -> bool:
    """Whether a supported expression is true of what the program returned; one that fails on it is not."""
    try:
        return bool(_value(expression, result))
    except _EVALUATION_ERRORS:
        return False


def _check_known(node: ast.expr) -> None:
    match node:
        case ast.Constant(value=value):
            known = value is not Ellipsis
        case ast.Name() | ast.Attribute():
            known = _dotted(node) == RESULT or _dotted(node) in _NAMES
        case ast.UnaryOp(op=op):
            known = type(op) in _UNARY
        case ast.BinOp(op=op):
            known = isinstance(op, _BINARY_ON_RESULT) if _has_result(node) else type(op) in _BINARY
        case ast.Compare(ops=ops, comparators=others):
            identities = [other for op, other in zip(ops, others, strict=True) if isinstance(op, ast.Is | ast.IsNot)]
            known = all(isinstance(other, ast.Constant) and isinstance(other.value, bool | None) for other in identities)
        case ast.Dict(keys=keys):
            known = None not in keys
        case ast.Call():
            known = _is_known_call(node)
        case _:
            known = isinstance(node, ast.List | ast.Tuple | ast.Set | ast.BoolOp | ast.Subscript)
    if not known:
        raise Unsupported(type(node).__name__)
    for part in _operands(node):
        _check_known(part)


def _operands(node: ast.expr) -> list[ast.expr]:
    """The expressions that evaluating this one evaluates; not the function's name in a call, nor the type's in isinstance."""
    if isinstance(node, ast.Call):
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        return arguments[:1] if _dotted(node.func) == "isinstance" else arguments
    if isinstance(node, ast.Attribute):
        return []
    return [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]


def _is_known_call(call: ast.Call) -> bool:
    name = _dotted(call.func)
    if name == "isinstance":
        return len(call.args) == 2 and not call.keywords and _dotted(call.args[1]) in _TYPES
    known = name in _CALLS or (name in _CONSTANT_CALLS and not _has_result(call))
    return known and all(keyword.arg is not None for keyword in call.keywords)


def _value(node: ast.expr, result: Any) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name() | ast.Attribute():
            return result if _dotted(node) == RESULT else _NAMES[_dotted(node)]
        case ast.List(elts=items):
            return [_value(item, result) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, result) for item in items)
        case ast.Set(elts=items):
            return {_value(item, result) for item in items}
        case ast.Dict(keys=keys, values=values):
            return {_value(key, result): _value(item, result) for key, item in zip(keys, values, strict=True) if key is not None}
        case ast.Subscript(value=container, slice=index):
            return _value(container, result)[_value(index, result)]
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, result))
        case ast.BinOp(left=left, op=op, right=right):
            return _binary(op, _value(left, result), _value(right, result))
        case ast.BoolOp(op=op, values=parts):
            for part in parts[:-1]:
                decided = _value(part, result)
                if bool(decided) is not isinstance(op, ast.And):
                    return decided
            return _value(parts[-1], result)
        case ast.Compare(left=left, ops=ops, comparators=others):
            before = _value(left, result)
            for comparison, other in zip(ops, others, strict=True):
                following = _value(other, result)
                if not _COMPARISONS[type(comparison)](before, following):
                    return False
                before = following
            return True
        case ast.Call():
            return _called(node, result)
        case _:
            raise Unsupported(type(node).__name__)


def _binary(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Pow) and isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _LARGEST_POWER_BITS:
        raise ValueError("too large")
    if isinstance(op, ast.Mult):
        for text, times in ((left, right), (right, left)):
            if isinstance(text, str | bytes | list | tuple) and isinstance(times, int) and _size(text) * times > _LONGEST_RANGE:
                raise ValueError("too long")
    if isinstance(op, ast.Mod) and isinstance(left, str | bytes):
        raise ValueError("formats text")
    return _BINARY[type(op)](left, right)


def _size(value: Any) -> int:
    """The items of a value with those inside of them: a list that repeats a long list is longer than its own length."""
    if isinstance(value, list | tuple):
        return 1 + sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 1


def _called(call: ast.Call, result: Any) -> Any:
    name = _dotted(call.func)
    if name == "isinstance":
        return isinstance(_value(call.args[0], result), _TYPES[_dotted(call.args[1])])
    arguments = [_value(argument, result) for argument in call.args]
    keywords = {str(keyword.arg): _value(keyword.value, result) for keyword in call.keywords}
    function = _CALLS[name] if name in _CALLS else _CONSTANT_CALLS[name]
    return function(*arguments, **keywords)


def _dotted(node: ast.expr) -> str:
    """ "f" or "math.f"; empty for anything else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _has_result(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == RESULT for part in ast.walk(node))


def _short(numbers: range) -> range:
    if len(numbers) > _LONGEST_RANGE:
        raise ValueError("too long")
    return numbers
