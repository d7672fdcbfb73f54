"""One spelling for what LaTeX, plain text and Unicode write in many ways: the text that every comparison of answers begins with.

`canonical` unwraps boxes and dollar signs, drops what only moves things about on the page, writes fractions, roots and exponents with
braces, degrees and per cent as one character, and knows the words of plain text (sqrt, pi). It changes how a thing is written, never
what it is: a comma followed by a space becomes `;`, because 1, 200 is two numbers and 1,200 may be one.
"""

import re
from collections.abc import Callable

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
    text = _unwrapped(text.translate(_CHARACTERS))
    for pattern, replacement in _COSMETIC:
        text = pattern.sub(replacement, text)
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
        part = _SHORT_FRACTION.sub(_braced_fraction, part)
        parts[place] = _SHORT_SCRIPT.sub(r"\1{\2}", part)
    return "".join(parts)


def _braced_fraction(match: re.Match[str]) -> str:
    upper, short_upper, lower, short_lower = match.groups()
    return rf"\frac{{{short_upper if upper is None else upper}}}{{{short_lower if lower is None else lower}}}"


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
