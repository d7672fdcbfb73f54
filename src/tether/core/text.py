"""Text of others, made safe to show: what models, environments and files say may hold terminal escapes, halves of characters, megabytes.

Terminals obey escape sequences (they set titles, move the cursor, write to the clipboard), so text that this program did not write is shown
with its control characters spelled out, never sent.
"""

import re
import reprlib
from typing import Any

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u200b\u2028\u2029\ufeff]")
"""Control characters but tab and line feed, halves of surrogate pairs, marks that turn the direction of writing, no width, other line breaks."""

_PASSWORD = re.compile(r"://[^/@\s'\"]{1,500}@")
_QUERY = re.compile(r"(://[^?\s'\"]{1,500})\?[^\s'\"]+")

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxdict, _SHORT.maxlist, _SHORT.maxtuple = 4, 8, 12, 12
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 200, 60, 200


def visible(text: str) -> str:
    r"""The text with control characters spelled out.

    >>> visible("red: \x1b[31m, half: \ud800, Zoë\n")
    'red: \\x1b[31m, half: \\ud800, Zoë\n'
    """
    return _CONTROL.sub(_spelled, text)


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shortened(text: str, most: int = 200) -> str:
    """The text, or its beginning with how much was left out.

    >>> shortened("abcdef", 3)
    'abc... (6 characters)'
    """
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def without_passwords(text: str) -> str:
    """The text with the passwords and queries of its addresses left out.

    >>> without_passwords("got 'http://me:hush@host/a?key=hush'; no")
    "got 'http://...@host/a?...'; no"
    """
    return _QUERY.sub(r"\1?...", _PASSWORD.sub("://...@", text))


def short_repr(value: Any) -> str:
    """How a value is written, however large it is."""
    return shortened(_SHORT.repr(value), 500)
