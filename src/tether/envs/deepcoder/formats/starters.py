"""Tests of a row whose starter code is a class Solution with one method, and which names no function: LeetCode's and GeeksforGeeks's layout.

Such a row asks for a method, whatever its tests look like: inputs are the arguments, one value a line, or as assignments (`nums = [2,7],
target = 9`; `N = 3`, `arr[] = {1, 2, 3}` in lines). The tests are played as calls if every input gives exactly the method's arguments and every
output is a value. Where one does not, all of them stay what they were, text for standard input.
"""

import ast
import re
from collections.abc import Sequence
from typing import Any

from tether.envs.deepcoder.assemble import opened
from tether.envs.deepcoder.parsing import read_value

_ASSIGNMENT = re.compile(r"(?:^|[,\n])\s*([A-Za-z_]\w*)\s*(?:\[\s*\w*\s*\])*\s*=(?!=)\s*")


def starter_method(starter: str) -> tuple[str, list[str]] | None:
    """Name and parameters of the one method of the starter's class Solution; None if there is not exactly one."""
    tree = opened(starter)
    solution = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Solution"), None) if tree else None
    if solution is None:
        return None
    methods = [node for node in solution.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    if len(methods) != 1 or methods[0].args.vararg or methods[0].args.kwonlyargs or methods[0].args.kwarg:
        return None
    parameters = [argument.arg for argument in methods[0].args.args]
    return (methods[0].name, parameters[1:]) if parameters[:1] == ["self"] and len(parameters) > 1 else None


def call_arguments(given: Sequence[Any], parameters: list[str]) -> list[list[Any]] | None:
    """The arguments of every test; None if some input does not give them."""
    try:
        return [_arguments(value, parameters) for value in given]
    except ValueError:
        return None


def are_values(expected: Sequence[Any]) -> bool:
    """Whether every output is a value: not a text, or a text that is one in JSON or Python."""
    try:
        for text in expected:
            if isinstance(text, str):
                read_value(text)
    except ValueError:
        return False
    return True


def _arguments(given: Any, parameters: list[str]) -> list[Any]:
    if isinstance(given, list | tuple) and not all(isinstance(line, str) for line in given):
        found = list(given)
    else:
        text = given if isinstance(given, str) else "\n".join(given) if isinstance(given, list) else ""
        found = _assigned(text, parameters) or [read_value(line) for line in text.split("\n") if line.strip()]
    if len(found) != len(parameters):
        raise ValueError(f"{len(found)} arguments for {len(parameters)} parameters")
    return found


def _assigned(text: str, parameters: list[str]) -> list[Any]:
    """The values of `name = value` pairs in the order of the parameters, or in their own where the names are others; [] if there are none."""
    found = list(_ASSIGNMENT.finditer(text))
    if not found or text[: found[0].start()].strip():
        return []
    ends = [following.start() for following in found[1:]] + [len(text)]
    values = {match.group(1).lower(): _value(text[match.end() : end].strip()) for match, end in zip(found, ends, strict=True)}
    wanted = [parameter.lower() for parameter in parameters]
    return [values[name] for name in wanted] if set(wanted) == set(values) else list(values.values())


def _value(text: str) -> Any:
    """A value; an array may be written in braces, as in C."""
    return read_value(text.replace("{", "[").replace("}", "]") if text.startswith("{") and ":" not in text else text)
