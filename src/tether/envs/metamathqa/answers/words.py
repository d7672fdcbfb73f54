"""Answers in words rather than mathematics: days, names, choices, times of day; and numerals of another base."""

import re

_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_SYMBOLS = re.compile(r"[\\^_+*/<>|=]")
_LONG_WORD = re.compile(r"[A-Za-z]{3,}")
_NUMERAL = re.compile(r"(-?(?=[0-9A-Z.]*[0-9])[0-9A-Z.]+)_\{([0-9]+)\}")


def is_words(text: str) -> bool:
    """Whether a canonical scalar is text: it says so, has the colon of a time or a ratio, or a word that is no product of variables."""
    bare = _TEXT.sub(r" \1 ", text)
    return not _SYMBOLS.search(bare) and (r"\text{" in text or ":" in bare or bool(_LONG_WORD.search(bare)))


def words(text: str) -> str:
    """What is compared of a text: its words without case and punctuation.

    >>> words(r"\\text{(A)}"), words("9:00 a.m."), words("Tuesday")
    ('a', '9:00 am', 'tuesday')
    """
    bare = _TEXT.sub(r" \1 ", text).casefold().replace(".", "")
    stripped = (word.strip(",;!'\"()") for word in bare.split())
    return " ".join(word for word in stripped if word)


def same_numeral(gold: str, answer: str) -> bool | None:
    """Whether two numerals with their base, 1011_2, are the same; None if neither is one. Their values are not compared: asked for
    base 2, neither 11 nor a numeral that leaves its base open is an answer."""
    left, right = (_NUMERAL.fullmatch(_TEXT.sub(r"\1", text)) for text in (gold, answer))
    if left is None and right is None:
        return None
    return left is not None and right is not None and left.groups() == right.groups()
