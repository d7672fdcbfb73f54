"""From an answer to the program that is run.

`extract` takes the program out of the answer: its last code fence, or else the whole of it. A fence is a line of at least three backticks or
tildes with any language tag; it ends at a line of as many of the same or at the end of the answer. Models are careless with the closing one:
it may stand at the end of the last line of code, or be missing. A fence with nothing in it is skipped.

A program that reads standard input is run as it is. Where the problem wants a function, an answer may be a whole program, or the code
that completes what the problem opened (the prompt of HumanEval, a class Solution with an empty method), with or without its
indentation; it may leave out what the problem's own code defined or imported; and it may use the names that LeetCode's starter code
takes for granted (`List`, `math`, `deque`), which are then imported. What the answer defines itself always wins.
"""

import ast
import builtins
import importlib
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from tether.envs.deepcoder.parsing import MAX_CHARACTERS, NotPython, check_compiles, parse
from tether.envs.deepcoder.problem import TRUTH_OF

_OPENING = re.compile(r"(?P<indent>[ \t]*+)(?P<fence>`{3,}+|~{3,}+)[ \t]*+(?P<tag>[^`\n]*)")
_ONE_LINE = re.compile(r"[ \t]*`{3,}(?P<inside>[^`]+)`{3,}[ \t]*")
_TAGGED = re.compile(r"(?:python[0-9.]*\b|py\b)?(?P<code>.+)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Extracted:
    """A program taken out of an answer."""

    code: str
    fenced: bool
    """It stood in a code fence, so it is meant as a program."""


def extract(answer: str) -> Extracted:
    """The last non-empty code fence of an answer, or the whole answer."""
    lines = answer.replace("\r\n", "\n").split("\n")
    blocks = [block for block in _blocks(lines) if block.strip()]
    if blocks:
        return Extracted(blocks[-1], True)
    return Extracted("\n".join(line for line in lines if not _OPENING.fullmatch(line)), False)  # stray fence lines are no code


def _blocks(lines: list[str]) -> list[str]:
    """The contents of every fence, in order."""
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        one_line, opening = _ONE_LINE.fullmatch(lines[at]), _OPENING.fullmatch(lines[at])
        at += 1
        if one_line:
            tagged = _TAGGED.fullmatch(one_line["inside"])
            blocks.append(tagged["code"].strip() if tagged else "")
        elif opening:
            block, at = _fenced(lines, at, opening["fence"], opening["indent"])
            blocks.append(block)
    return blocks


def _fenced(lines: list[str], at: int, fence: str, indent: str) -> tuple[str, int]:
    """The lines from `at` to the closing fence without the fence's own indentation, and the line after it."""
    block: list[str] = []
    while at < len(lines):
        line = lines[at].removeprefix(indent)
        opening = _OPENING.fullmatch(line)
        if opening and opening["tag"].strip() and opening["fence"][0] == fence[0]:  # the fence before was never closed
            break
        at += 1
        bare = line.rstrip()
        rest = bare.rstrip(fence[0])
        if len(bare) - len(rest) >= len(fence):
            block += [rest] if rest.strip() else []
            break
        block.append(line)
    return "\n".join(block), at


_SOLUTION = "Solution"
_TRUTH = f"\n\ndef {TRUTH_OF}(function, arguments):\n    return bool(globals()[function](*arguments))\n"
_FREE_NAMES_OF = ("collections", "typing", "heapq", "bisect", "itertools", "functools", "math")
"""Modules whose names may be used without importing them. If two modules have the same name, the first one is used."""
_FREE_MODULES = (*_FREE_NAMES_OF, "copy", "datetime", "json", "operator", "random", "re", "statistics", "string", "sys", "time")


def assemble(code: str, starter: str, entry_point: str) -> str:
    """The program to run for an answer; NotPython if no way of reading it compiles. `entry_point` is empty for whole programs."""
    if not entry_point:
        check_compiles(code)
        return code
    flush = textwrap.dedent(code)
    try:
        check_compiles(flush)
    except NotPython:
        completed = _completed(code, starter, entry_point)
        if completed is None:
            raise
        return _with_imports(completed) + _TRUTH
    return _with_imports(_whole(flush, starter, entry_point)) + _TRUTH


def _whole(code: str, starter: str, entry_point: str) -> str:
    """Code that compiles by itself: used behind the starter's other definitions if it defines anything, else as a completion."""
    tree = parse(code, limit=MAX_CHARACTERS)
    defines_something = any(isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef) for node in tree.body)
    if not defines_something and entry_point not in _bound(tree):
        return _completed(code, starter, entry_point) or code
    program = _behind(_prelude(starter, entry_point), code)
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    has_class = any(isinstance(node, ast.ClassDef) and node.name == _SOLUTION for node in tree.body)
    if not has_class and any(node.name == entry_point and [arg.arg for arg in node.args.args[:1]] == ["self"] for node in functions):
        # The method of class Solution was written outside it, with `self`.
        program += f"\n\nclass {_SOLUTION}:\n" + "".join(f"    {node.name} = {node.name}\n" for node in functions)
    return program


def _completed(code: str, starter: str, entry_point: str) -> str | None:
    """The starter with the code as the rest of its last function, in the first of three indentations that compiles."""
    indent = _body_indent(starter, entry_point)
    if indent is None:
        return None
    head = starter.rstrip() + "\n"
    for body in (code, indent + code.lstrip(), textwrap.indent(textwrap.dedent(code), indent)):
        program = head + body
        try:
            check_compiles(program)
        except NotPython:
            continue
        return program
    return None


@lru_cache(maxsize=512)
def _body_indent(starter: str, entry_point: str) -> str | None:
    """The indentation of the body that the starter leaves open; None if it opens none."""
    tree = opened(starter)
    if tree is None or not tree.body:
        return None
    last: ast.stmt = tree.body[-1]
    while isinstance(last, ast.ClassDef) and isinstance(last.body[-1], ast.FunctionDef | ast.ClassDef):
        last = last.body[-1]
    if not isinstance(last, ast.FunctionDef) or last.name != entry_point:
        return None
    lines = _closed(starter).split("\n")
    first = lines[last.body[0].lineno - 1]
    return first[: len(first) - len(first.lstrip())]


@lru_cache(maxsize=512)
def _prelude(starter: str, entry_point: str) -> str:
    """What the starter holds before the function (or class) to be written: imports and other definitions."""
    tree = opened(starter)
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in (entry_point, _SOLUTION):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return "\n".join(starter.split("\n")[: first - 1]).strip()
    return ""


def opened(starter: str) -> ast.Module | None:
    """The tree of starter code whose last function may have no body yet."""
    try:
        return parse(_closed(starter))
    except NotPython:
        return None


def _closed(starter: str) -> str:
    """The starter, with a body for its last function where it has none."""
    try:
        parse(starter)
    except NotPython:
        lines = starter.rstrip().split("\n")
        last = lines[-1]
        return "\n".join([*lines, f"{last[: len(last) - len(last.lstrip())]}    pass"])
    return starter


def _behind(prelude: str, code: str) -> str:
    """The code behind a prelude; imports from __future__ must stay first."""
    future = [line for line in code.split("\n") if line.startswith("from __future__ import")]
    if not prelude:
        return code
    rest = code if not future else "\n".join(line for line in code.split("\n") if line not in future)
    return "\n".join([*future, prelude, rest])


def _with_imports(program: str) -> str:
    """The program with imports for the free names it uses and never binds."""
    tree = parse(program)
    bound = set(_bound(tree))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    imports = [_free_imports()[name] for name in sorted(used - bound) if name in _free_imports()]
    return _behind("\n".join(imports), program)


@lru_cache(maxsize=1)
def _free_imports() -> dict[str, str]:
    """By name, the import that an answer may leave out."""
    known = {name: f"import {name}" for name in _FREE_MODULES}
    for module in _FREE_NAMES_OF:
        holder = importlib.import_module(module)
        for name in getattr(holder, "__all__", vars(holder)):
            if not name.startswith("_") and not hasattr(builtins, name):
                known.setdefault(name, f"from {module} import {name}")
    return known


def _bound(tree: ast.Module) -> Iterator[str]:
    """Every name that is bound anywhere in a program."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name):
                yield name
            case ast.alias(name=name, asname=alias):
                yield alias or name.partition(".")[0]
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name
