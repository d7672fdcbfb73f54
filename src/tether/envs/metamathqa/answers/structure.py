"""The parts of an answer: lists, tuples and intervals, sets, unions, matrices. What has no parts is a scalar.

Order matters in a tuple, an interval and a matrix, not in a set, a list or a union. A comma is a separator unless it groups the digits
of one number: 1,000,000 is a number and 1,2,3 a list, but (100,200) is a pair. `a \\pm b` is the list of its two
values, and two members of the list or set it stands in.
"""

import re
from dataclasses import dataclass

from tether.envs.metamathqa.answers.latex import matching

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
