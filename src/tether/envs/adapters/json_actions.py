"""Actions that are JSON objects: how an answer is read, and how values and schemas are written for an agent."""

import json
from collections.abc import Mapping
from typing import Any

from tether.core.text import visible


def read_object(text: str) -> dict[str, Any]:
    """The JSON object that an answer is, without halves of surrogate pairs, which cannot be sent; ValueError says what it is instead.

    >>> read_object('{"move": "left"}')
    {'move': 'left'}
    """
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}, not an object in braces")
    sent: dict[str, Any] = json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))
    return sent


def written(value: Any) -> str:
    """A value for an agent: the fields of an object one a line, texts as they are, everything else as JSON."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, Mapping):
        return "\n".join(f"{key}: {written(part)}" for key, part in value.items() if part not in (None, {}, []))
    return visible(json.dumps(value, ensure_ascii=False, default=str))


def without_titles(schema: Any, *also: str) -> Any:
    """A JSON schema without the titles that pydantic adds, and without these properties."""
    if isinstance(schema, list):
        return [without_titles(part, *also) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: {name: without_titles(part) for name, part in value.items() if name not in also}
        if key == "properties" and isinstance(value, Mapping)
        else without_titles(value)
        for key, value in schema.items()
        if not (key == "title" and isinstance(value, str))
    }
