"""Text of models made safe to show: what a terminal or a browser would obey becomes something to read.

A model may write any character: escape sequences that colour or clear a terminal, carriage returns that overwrite a line, marks that turn the
direction of the text around. Each becomes a visible sign, so nothing is hidden and nothing is obeyed. Line breaks and tabs stay.
"""

import re
import unicodedata

_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of the text
    "\u200b\u2028\u2029\ufeff\ud800-\udfff]"  # no width, other line breaks, halves of a pair
)


def visible(text: str) -> str:
    """Text with every character that would be obeyed rather than shown replaced by a picture or a name of it.

    >>> visible("a\\x1b[31mred\\r\\nb\\x7f \\u202etxt")
    'a␛[31mred␍\\nb␡ ⟨U+202E⟩txt'
    """
    return _OBEYED.sub(lambda found: _sign(found.group()), text)


def _sign(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "\N{SYMBOL FOR DELETE}"
    name = f"U+{code:04X}"
    return f"⟨{name}⟩" if unicodedata.category(character) != "Cs" else f"⟨half {name}⟩"
