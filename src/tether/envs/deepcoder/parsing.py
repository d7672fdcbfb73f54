"""Python source as a syntax tree, from untrusted text: an answer, or the tests of a data row; and values read from data files.

Whatever is wrong with the text (no Python, a NUL, nested too deep for the parser) raises one kind of error with one line of
text. Nothing is ever executed here. The compiler's warnings about such text (an unknown escape in a string) are of no use to
whoever trains a model and are silenced by the name the text is compiled under; the filter is looked for at each use because test
runners and libraries reset the list of filters, and never removed because restoring the list is not safe among threads.

Data files hold JSON, or Python literals, with integers of any length. Python refuses to read or write more than some thousand digits at
once, so those go through `decimal` or are written in hexadecimal, and no process-wide limit is changed. What is shown to an agent, and what
the hash of a test is made of, is Python's own notation with sets in a fixed order.
"""

import ast
import json
import re
import warnings
from typing import Any

from tether.envs.dataset import whole_number

_NAME = "<program>"
_PATTERN = re.escape(_NAME)
MAX_CHARACTERS = 200_000
"""The longest answer that is looked at: parsing happens in the trainer's own process."""


MAX_LAMBDAS = 100
"""Inside of each other; as many as Python allows indented blocks."""


class NotPython(ValueError):
    """The text does not compile; the message is the compiler's, with the line."""


def parse(source: str, *, limit: int | None = None) -> ast.Module:
    """The syntax tree of a program; `limit` is the most characters it may have."""
    _check_length(source, limit)
    tree = _compiled(source, ast.PyCF_ONLY_AST)
    assert isinstance(tree, ast.Module)
    return tree


def check_compiles(source: str) -> None:
    """Raise NotPython unless the source compiles; that is more than parsing: `return` outside a function parses."""
    _check_length(source, MAX_CHARACTERS)
    if source.count("lambda") > MAX_LAMBDAS and _lambdas_deep(_compiled(source, ast.PyCF_ONLY_AST)) > MAX_LAMBDAS:
        raise NotPython(f"SyntaxError: more than {MAX_LAMBDAS} lambdas inside of each other")
    _compiled(source, 0)


def _lambdas_deep(tree: Any) -> int:
    """How many lambdas stand inside of each other. The compiler names each by all those around it, which takes quadratic time and memory."""
    deepest, waiting = 0, [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [(part, depth + isinstance(part, ast.Lambda)) for part in ast.iter_child_nodes(node)]
    return deepest


def literal(text: str) -> object:
    """The value of a Python literal."""
    tree = parse(text.strip())
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.Expr):
        raise NotPython("is not a single value")
    try:
        return ast.literal_eval(tree.body[0].value)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPython(f"is not a literal ({error})") from error


def _check_length(source: str, limit: int | None) -> None:
    if limit is not None and len(source) > limit:
        raise NotPython(f"the program has {len(source)} characters; the most is {limit}")


def _compiled(source: str, flags: int) -> object:
    first = warnings.filters[0] if warnings.filters else None
    if first is None or getattr(first[3], "pattern", None) != _PATTERN:  # every change of the list makes Python forget what it has shown
        warnings.filterwarnings("ignore", module=_PATTERN)
    try:
        return compile(source, _NAME, "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno else ""
        raise NotPython(f"{type(error).__name__}: {error.msg}{place}") from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # surrogates, NUL before 3.11.4, too deep
        raise NotPython(f"SyntaxError: {str(error) or 'too deeply nested'}") from error


def read_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none."""
    try:
        return json.loads(text, parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


class WrittenFloat(float):
    """A number of a data file together with its digits: 2.00000 says more than 2.0 about how exact it is."""

    text: str

    def __new__(cls, text: str) -> "WrittenFloat":
        value = super().__new__(cls, text)
        value.text = text
        return value


def written(value: float) -> str:
    """The digits of a float: those of the file, or else Python's own."""
    return value.text if isinstance(value, WrittenFloat) else repr(float(value))


def read_expected(text: str) -> Any:
    """As `read_value`, with the digits of numbers in JSON kept."""
    try:
        return json.loads(text, parse_int=whole_number, parse_float=WrittenFloat)
    except (ValueError, RecursionError):
        return read_value(text)


def read_value(text: str) -> Any:
    """The value of a JSON text or else of a Python literal; ValueError if it is neither."""
    try:
        return read_json(text)
    except ValueError:
        try:
            return literal(text)
        except NotPython as error:
            raise ValueError(f"neither JSON nor a Python literal: {clip(text.strip(), 80)!r}") from error


def show(value: Any) -> str:
    """Python's notation of a value, the same in every process."""
    try:
        return _notation(value)
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to show"


def clip(text: str, limit: int) -> str:
    """The text, or its two ends with the number of characters left out between them."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]} ... ({len(text) - limit} characters left out) ... {text[-(limit - limit // 2) :]}"


def _notation(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_notation, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_notation, value))}{',' if len(value) == 1 else ''})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_notation, value)))}}}" if value else "set()"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_notation(key)}: {_notation(item)}' for key, item in value.items())}}}"
    try:
        return repr(value)
    except ValueError:  # an integer of more digits than repr() writes; hexadecimal takes no time
        return hex(value)
