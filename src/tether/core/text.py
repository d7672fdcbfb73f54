"""Text of others, made safe to show: what models, environments and files say may hold terminal escapes, halves of characters, megabytes.

Terminals obey escape sequences (they set titles, move the cursor, write to the clipboard), so text that this program did not write is shown
with its control characters spelled out, never sent. There is one function for each place that shows text: `visible` for terminals (the consoles of
the command line apply it to everything), `for_html` for pages (the templates apply it to everything), `for_markdown`.
"""

import re
import reprlib
from typing import Any

_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\ud800-\udfff\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
    # Joiners belong between letters of some scripts and within emoji, and are hidden elsewhere.
    r"|(?<![^\x00-\x7f])[\u200c\u200d]|[\u200c\u200d](?![^\x00-\x7f])"
)
"""Control characters but tab and line feed, halves of surrogate pairs, marks that turn the direction of writing, no width, other line breaks."""
_HALF = re.compile(r"[\ud800-\udfff]")
MOST_NESTED = 100
"""Lists and objects within each other. JSON schemas of tools have a tenth of that; templates and JSON write deeper ones by recursion, and fail."""
_MARKDOWN = re.compile(r"([\\`|<>\[\]*])")

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


def for_html(value: Any) -> Any:
    """What a page shows of a value: its text with control characters spelled out, which is then escaped; markup stays as it is."""
    return value if hasattr(value, "__html__") else visible(str(value))


def for_markdown(text: str, most: int = 200) -> str:
    r"""A text on one line of Markdown, of a table too, in which nothing is markup, a link or HTML.

    >>> for_markdown("a|b\n<i>[c](http://d)")
    'a\\|b \\<i\\>\\[c\\](http://d)'
    """
    return _MARKDOWN.sub(r"\\\1", shortened(visible(" ".join(text.split())), most))


def _spelled(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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


def unusable(value: Any) -> str | None:
    """Why JSON cannot go into a prompt: a text that no tokenizer takes, or more levels than a template renders. None where it can."""
    level: list[Any] = [value]
    for _ in range(MOST_NESTED):
        nested: list[Any] = []
        for each in level:
            if isinstance(each, str) and not each.isascii() and _HALF.search(each):
                return "holds half of a character (a lone surrogate, such as \\ud800); send whole ones"
            inner = (*each, *each.values()) if isinstance(each, dict) else each if isinstance(each, list) else ()
            nested += [item for item in inner if type(item) is not int]  # most of what is sent are token ids
        level = nested
        if not level:
            return None
    return f"holds more than {MOST_NESTED} levels of lists and objects; send fewer"
