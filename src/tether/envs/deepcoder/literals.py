"""Values written in data files, and values written for people.

Data files hold JSON, or Python literals, with integers of any length; Python refuses to read or write more than some thousand
digits at once, so those go through `decimal` or are written in hexadecimal, and no process-wide limit is touched. What is shown to
an agent, and what the hash of a test is made of, is Python's own notation with sets in a fixed order.
"""

import json
from typing import Any

from tether.envs.dataset import whole_number
from tether.envs.deepcoder.parsing import NotPython, literal


def read_json(text: str) -> Any:
    """The value of a JSON text; ValueError if it is none."""
    try:
        return json.loads(text, parse_int=whole_number)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


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
