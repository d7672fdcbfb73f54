"""What may be asked of the worker: short, shallow formulas without towers of powers or giant factorials, spelled for its parser.

The worker survives anything, but a hopeless question costs seconds. So what would only run into its limit is refused here.
"""

import re

MAX_SYMBOLIC = 300
"""Characters; the longest formula among the public answers has about eighty."""
MAX_NESTING = 15
MAX_EXPONENT = 9999
"""Of a number, as in 3^{2007}."""
MAX_EXPONENT_OF_BRACKETS = 30
"""Of anything in brackets, which may be a sum to be multiplied out, or a power already."""
MAX_FACTORIAL = 200

_TEXT = re.compile(r"\\text\{([A-Za-z])\}")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_SCIENTIFIC = re.compile(r"(\d)[eE]([+-]?\d{1,3})(?![\d^])")
_SPACED_DIGITS = re.compile(r"\d \d")
_EXPONENT = re.compile(r"\^\{?\(?[+-]?(\d+)")
_EXPONENT_OF_BRACKETS = re.compile(r"[)\]}]\^\{?\(?[+-]?(\d+)")
_FACTORIAL = re.compile(r"(\d*)!")
_FACTORIALS = re.compile(r"!\)*!")
_UNREADABLE = re.compile(r"[^ -~°]")
_TOWER = re.compile(r"[\d)}]\s*\^")


def for_worker(text: str) -> str | None:
    """The formula in LaTeX for the worker; None if it should not be asked."""
    formula = _TEXT.sub(r"\1", text)
    if (
        len(formula) > MAX_SYMBOLIC
        or r"\text" in formula
        or ":" in formula
        or _SPACED_DIGITS.search(formula)
        or _UNREADABLE.search(formula)
    ):
        return None
    if _nesting(formula) > MAX_NESTING or _is_tower(formula) or _is_giant(formula):
        return None
    formula = _DECIMAL.sub(_as_fraction, _SCIENTIFIC.sub(r"\1\\cdot 10^{\2}", formula))
    return formula.replace("°", r"^{\circ}").replace("*", r"\cdot ").replace(";", ",").replace("%", r"\%")


def _nesting(text: str) -> int:
    deepest = depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    return deepest


def _is_tower(text: str) -> bool:
    """Whether an exponent holds a power of a number: 2^{3^{4}}, but not e^{x^{2}}."""
    for found in re.finditer(r"\^\{", text):
        depth, at = 1, found.end()
        while at < len(text) and depth:
            depth += (text[at] == "{") - (text[at] == "}")
            at += 1
        if _TOWER.search(text[found.end() : at]):
            return True
    return False


def _is_giant(text: str) -> bool:
    limits = ((_EXPONENT, MAX_EXPONENT), (_EXPONENT_OF_BRACKETS, MAX_EXPONENT_OF_BRACKETS), (_FACTORIAL, MAX_FACTORIAL))
    too_large = any(int(found.group(1) or 0) > limit for pattern, limit in limits for found in pattern.finditer(text))
    return too_large or bool(_FACTORIALS.search(text))


def _as_fraction(found: re.Match[str]) -> str:
    """A decimal as an exact fraction, which sympy would otherwise round."""
    whole, decimals = found.groups()
    return rf"\frac{{{int(whole + decimals)}}}{{{10 ** len(decimals)}}}"
