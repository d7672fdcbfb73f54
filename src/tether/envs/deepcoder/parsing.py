"""Python source as a syntax tree, from text nobody has checked: an answer, or the tests of a data row.

Whatever is wrong with the text (no Python, a NUL, nested too deep for the parser) comes out as one kind of error with one line of
words. Nothing is ever executed here. The compiler's warnings about such text (an unknown escape in a string) are of no use to
whoever trains a model and are silenced by the name the text is compiled under; the filter is looked for at each use because test
runners and libraries reset the list of filters, and never removed because restoring the list is not safe among threads.
"""

import ast
import re
import warnings

_NAME = "<program>"
_PATTERN = re.escape(_NAME)
MAX_CHARACTERS = 200_000
"""The longest answer that is looked at: parsing happens in the trainer's own process."""


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
    _compiled(source, 0)


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
    _silence_warnings()
    try:
        return compile(source, _NAME, "exec", flags=flags, dont_inherit=True)
    except SyntaxError as error:
        place = f" (line {error.lineno})" if error.lineno else ""
        raise NotPython(f"{type(error).__name__}: {error.msg}{place}") from error
    except (ValueError, RecursionError, MemoryError, OverflowError) as error:  # surrogates, NUL before 3.11.4, too deep
        raise NotPython(f"SyntaxError: {str(error) or 'too deeply nested'}") from error


def _silence_warnings() -> None:
    """Have no warning about text of this name; every change of the list makes Python forget which warnings it has shown already."""
    first = warnings.filters[0] if warnings.filters else None
    if first is None or getattr(first[3], "pattern", None) != _PATTERN:
        warnings.filterwarnings("ignore", module=_PATTERN)
