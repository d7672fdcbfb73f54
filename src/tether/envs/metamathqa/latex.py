"""One spelling for what LaTeX, plain text and Unicode write in many ways: the text that every comparison of answers begins with.

`canonical` unwraps boxes and dollar signs, drops what only moves things about on the page, writes fractions, roots and exponents with
braces, degrees and per cent as one character, and knows the words of plain text (sqrt, pi). It changes how a thing is written, never
what it is: a comma followed by a space becomes `;`, because 1, 200 is two numbers and 1,200 may be one.

`structure` takes an answer apart: lists, tuples and intervals, sets, unions, matrices. What has no parts is a scalar. Order matters in a tuple, an
interval and a matrix, not in a set, a list or a union. A comma is a separator unless it groups the digits of one number: 1,000,000 is a number
and 1,2,3 a list, but (100,200) is a pair. `a \\pm b` is the list of its two values, and two members of the list or set it stands in.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

MAX_LENGTH = 1000
"""Longer answers are only ever compared as they stand: no answer to a question of school mathematics needs as much."""

_CHARACTERS = str.maketrans(
    {
        "−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∕": "/", "⁄": "/", "°": "°", "º": "°",
        "π": r"\pi ", "θ": r"\theta ", "∞": r"\infty ", "√": r"\sqrt ", "±": r"\pm ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ",
        "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "⟨": "(", "⟩": ")", "，": ", ", "％": "%", "＄": "$",
        "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\ufeff": "", "’": "'",
    }
)  # fmt: skip

_PREFIX = re.compile(r"(?:(?:the\s+)?(?:final\s+)?answer(?:\s+is\b|\s*[:=])|####)[\s:=]*(?=\S)", re.IGNORECASE)
_DOLLAR = re.compile(r"(?<!\\)\$")
_DELIMITER = re.compile(r"(?<!\\)\\[()\[\]]")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")

_COSMETIC: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\s*\\!\s*"), ""),
    (re.compile(r"\{\s*,\s*\}"), ","),
    (re.compile(r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nolimits|phantom\{[^{}]*\})(?![A-Za-z])"), ""),
    (re.compile(r"(?<!\\)\\(?:[,;: ]|quad|qquad|thinspace|enspace|hspace\{[^{}]*\})(?![A-Za-z])|~"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\(?:degrees?|textdegree)(?![A-Za-z])"), "°"),
    (re.compile(r"\\(?:%|percent)"), "%"),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\\(?:mbox|textbf|textrm|textit|textsf|textnormal|mathrm|operatorname\*?)(?=\s*\{)"), r"\\text"),
    (re.compile(r"\\(?:mathbf|mathit|boldsymbol|bm|mathsf)\s*\{([A-Za-z])\}"), r"\1"),
    (re.compile(r"\\(?:lbrace|\{)"), r"\\{"),
    (re.compile(r"\\(?:rbrace|\})"), r"\\}"),
    (re.compile(r"\\(?:langle|lparen)(?![A-Za-z])"), "("),
    (re.compile(r"\\(?:rangle|rparen)(?![A-Za-z])"), ")"),
    (re.compile(r"\\[lr]?vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\le(?:qslant|q)?(?![A-Za-z])|<=|=<"), r"\\leq "),
    (re.compile(r"\\ge(?:qslant|q)?(?![A-Za-z])|>="), r"\\geq "),
    (re.compile(r"\\ne(?:q)?(?![A-Za-z])|!="), r"\\neq "),
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])|\*\*?(?!\*)"), lambda match: "^" if match.group() == "**" else "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
]
_SPACES = re.compile(r"(?<!\\)(\s)\s+")
"""All but the first mean nothing; the patterns below would look at a long row of them again from each."""
_WORDS = re.compile(r"(?<![\\A-Za-z])(sqrt|pi|theta|alpha|beta|sin|cos|tan|log|ln|exp|infinity)(?![A-Za-z])")
_WORD_FOR = {"infinity": r"\infty "}
_SHORT_FRACTION = re.compile(r"\\frac\s*(?:\{([^{}]*)\}|(\d|[A-Za-z]))\s*(?:\{([^{}]*)\}|(\d|[A-Za-z]))")
_SHORT_ROOT = re.compile(r"\\sqrt\s*(\d+|[A-Za-z])")
_SHORT_SCRIPT = re.compile(r"([\^_])\s*(-?\d+|[A-Za-z])")
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_TEXTS = re.compile(r"(\\text\{[^{}]+)\}\s*(/?)\s*\\text\{(?=[^{}]*\})")
_LIST_WORD = re.compile(r"\s*(?:[,;]\s*)?(?:\\text\{(?:and|or)\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))\s*(?=[\d\\($\-A-Za-z.])")
_COMMA_SPACE = re.compile(r",\s+")
_TIGHT = re.compile(r"(?P<mark>\})\s+(?=[A-Za-z]{2})|\s*([^\w\s\\.'])\s*|\s+(?=\\)")
"""Spaces that mean nothing. After a fraction one may part it from its unit, 2\\frac{1}{2} hours; there it stays."""


def canonical(text: str) -> str:
    """The one spelling of an answer.

    >>> canonical(r"$\\boxed{\\dfrac 12 \\text{ cm}}$."), canonical("sqrt(3), 1,000")
    ('\\\\frac{1}{2}\\\\text{cm}', '\\\\sqrt{3};1,000')
    """
    text = _SPACES.sub(r"\1", _unwrapped(_SPACES.sub(r"\1", text.translate(_CHARACTERS))))
    for pattern, replacement in _COSMETIC:
        text = pattern.sub(replacement, text)
    text = _SPACES.sub(r"\1", text)  # what stood between spaces may be gone
    text = _TEXT.sub(lambda match: rf"\text{{{' '.join(match.group(1).split())}}}", text)
    while (joined := _TEXTS.sub(lambda match: f"{match.group(1)}{match.group(2) or ' '}", text)) != text:
        text = joined  # the second of three texts belongs to two pairs
    text = _outside_text(text)
    text = _LIST_WORD.sub("; ", text)
    text = _COMMA_SPACE.sub(";", text)
    text = _TIGHT.sub(lambda match: "} " if match["mark"] else match.group(2) or "", text)
    return " ".join(text.split()).lstrip(" ;:").rstrip(" .,;:")


def _outside_text(text: str) -> str:
    """The words and short forms of mathematics, where they are not part of a text."""
    parts = re.split(r"(\\text\{[^{}]*\})", text)
    for place in range(0, len(parts), 2):
        part = _WORDS.sub(lambda match: _WORD_FOR.get(match.group(1), rf"\{match.group(1)} "), parts[place])
        part = _brace_roots(_SHORT_ROOT.sub(r"\\sqrt{\1}", part))
        part = _SHORT_FRACTION.sub(lambda found: "\\frac" + "".join(f"{{{part}}}" for part in found.groups() if part is not None), part)
        parts[place] = _SHORT_SCRIPT.sub(r"\1{\2}", part)
    return "".join(parts)


def _brace_roots(text: str) -> str:
    r"""\sqrt(...) as \sqrt{...}."""
    at = 0
    while (found := re.compile(r"\\sqrt\s*\(").search(text, at)) is not None:
        close = matching(text, found.end() - 1)
        if close is None:
            return text
        text = rf"{text[: found.start()]}\sqrt{{{text[found.end() : close]}}}{text[close + 1 :]}"
        at = found.start() + 1
    return text


def _unwrapped(text: str) -> str:
    """Without what stands around an answer: a box, delimiters of mathematics, emphasis, "The answer is"."""
    boxes = list(_BOX.finditer(text))
    for box in reversed(boxes):
        close = closing_brace(text, box.end() - 1)
        if close is not None:
            return _unwrapped(text[box.end() : close])
    text = _DELIMITER.sub(" ", text).strip()
    if len(_DOLLAR.findall(text)) % 2 == 0:  # in pairs they are delimiters, a single one is a currency
        text = _DOLLAR.sub(" ", text).strip()
    while len(text) > 1 and text[0] == text[-1] and text[0] in '*`"':
        text = text[1:-1].strip()
    found = _PREFIX.match(text)
    return _unwrapped(text[found.end() :]) if found else text


_OPENING, _CLOSING = "([{", ")]}"


def matching(text: str, at: int) -> int | None:
    """The place of the bracket that closes the one at `at`, whatever its shape (an interval may close otherwise than it opens)."""
    depth = 0
    for place in range(at, len(text)):
        if text[place] in _OPENING:
            depth += 1
        elif text[place] in _CLOSING:
            depth -= 1
            if depth == 0:
                return place
    return None


def closing_brace(text: str, at: int) -> int | None:
    """The place of the brace that closes the one at `at`; other brackets need not be balanced in it, nor braces that are printed."""
    depth = 0
    for place in range(at, len(text)):
        if text[place] in "{}" and text[place - 1] != "\\":
            depth += 1 if text[place] == "{" else -1
            if depth == 0:
                return place
    return None


MAX_DEPTH = 8
"""Brackets within brackets; deeper ones stay text."""

_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_GROUPED_INSIDE = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})*,0\d{2}(?:,\d{3})*(?![\d,])")
_MEMBER = re.compile(r"[A-Za-z]\\in(?![A-Za-z])\s*")
_MATRIX = re.compile(r"\\begin\{([pbBvV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}")
_PLUS_MINUS = re.compile(r"\\[pm][mp](?![A-Za-z])\s*")
_WHOLE_TEXT = re.compile(r"\\text\{([^{}]*)\}")


@dataclass(frozen=True, slots=True)
class Scalar:
    """A single value or text, in canonical spelling."""

    text: str


@dataclass(frozen=True, slots=True)
class Parts:
    """Several answers in one. Example: "[1,2)" has brackets "[)", "1,2" has none, a union "u"."""

    brackets: str
    items: "tuple[Node, ...]"
    text: str
    """The whole, in canonical spelling."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows of scalars or structures."""

    kind: str
    """The LaTeX environment, with round and square brackets taken as the same: "matrix", "vmatrix" (a determinant) and so on."""
    rows: "tuple[tuple[Node, ...], ...]"


Node = Scalar | Parts | Matrix


def structure(text: str, depth: int = 0) -> Node:
    """The parts of a canonical answer."""
    whole = _WHOLE_TEXT.fullmatch(text)
    text = _MEMBER.sub("", whole.group(1) if whole else text, count=1) if depth == 0 else text
    if depth >= MAX_DEPTH:
        return Scalar(text)
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix.group(1), matrix.group(2), depth)
    union = _split(text, r"\cup")
    if len(union) > 1:
        return Parts("u", tuple(structure(part, depth + 1) for part in union), text)
    enclosed = _enclosed(text)
    if enclosed is not None:
        return _bracketed(text, *enclosed, depth)
    items = _split(_GROUPED.sub(_without_commas, text) if depth == 0 else text, ",;")
    if len(items) > 1 and all(items):
        return Parts("", _listed(items, depth), text)
    if len(_PLUS_MINUS.findall(text)) == 1:
        return Parts("", tuple(Scalar(_PLUS_MINUS.sub(sign, text)) for sign in "+-"), text)
    return Scalar(text)


def _listed(items: list[str], depth: int) -> "tuple[Node, ...]":
    """The members of a list or a set, where an item with a plus-minus sign is two of them."""
    members: list[Node] = []
    for item in items:
        node = structure(item, depth + 1)
        members += node.items if isinstance(node, Parts) and node.brackets == "" and _PLUS_MINUS.search(item) else [node]
    return tuple(members)


def _bracketed(text: str, opening: str, inner: str, closing: str, depth: int) -> Node:
    items = _split(_GROUPED_INSIDE.sub(_without_commas, inner), ",;")
    if len(items) == 1 and (opening, closing) in (("(", ")"), ("{", "}")):  # LaTeX's braces only group
        return structure(items[0], depth + 1)
    if (len(items) == 1 and opening != r"\{") or not all(items):
        return Scalar(text)
    if closing == "}":
        return Parts("{}", _listed(items, depth), text)
    return Parts(opening + closing, tuple(structure(item, depth + 1) for item in items), text)


def _matrix(kind: str, body: str, depth: int) -> Matrix:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr(?![A-Za-z])", body) if row.strip()]
    cells = tuple(tuple(structure(cell.strip(), depth + 1) for cell in row.replace(r"\hline", "").split("&")) for row in rows)
    return Matrix("matrix" if kind in ("pmatrix", "bmatrix", "array") else kind, cells)


def _enclosed(text: str) -> tuple[str, str, str] | None:
    """The brackets around the whole text and what is in them."""
    opening = r"\{" if text.startswith(r"\{") else text[:1]
    if opening not in ("(", "[", "{", r"\{") or matching(text, len(opening) - 1) != len(text) - 1:
        return None
    closes_set = text.endswith(r"\}")
    if (opening == r"\{") != closes_set or (opening == "{") != (text[-1] == "}" and not closes_set):
        return None
    return opening, text[len(opening) : -2 if closes_set else -1], text[-1]


def _split(text: str, separators: str) -> list[str]:
    """The parts of a text between separators that stand in no brackets: each character of `separators`, or the one command it is."""
    command = separators if separators.startswith("\\") else ""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        character = text[at]
        width = 1
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
        elif depth == 0 and ((command and text.startswith(command, at)) or (not command and character in separators)):
            width = len(command) or 1
            parts.append(text[start:at].strip())
            start = at + width
        at += width
    return [*parts, text[start:].strip()]


def as_list(scalar: Scalar) -> Parts | None:
    """A number with grouped digits read as the list it could also be: 125,343, but not 125,043."""
    numbers = scalar.text.split(",")
    if len(numbers) == 1 or any(number.startswith("0") for number in numbers):
        return None
    return Parts("", tuple(Scalar(number) for number in numbers), scalar.text)


def _without_commas(match: re.Match[str]) -> str:
    return match.group().replace(",", "")
