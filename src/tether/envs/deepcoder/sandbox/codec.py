"""Python values as tagged JSON, both ways: how arguments reach a program and how its value comes back.

Lists, strings, truth values, None, floats and ordinary integers are themselves; everything else is an object with one key that names
the kind. Nothing is ever evaluated or unpickled. Both directions bound depth and size, since the value comes from a hostile program: a
cycle, a value that shares itself into billions of parts, text that is not JSON, or a set built of colliding hashes is one `ValueError`.

Messages are frames: eight bytes of length, then that many bytes, over one socket per task. To the sandbox: its settings (JSON), the job
(JSON), the standard input (bytes). Back: the facts of the run (JSON), what was printed (bytes), and what the program's process said about its
own end (bytes, not to be trusted).

Imports the standard library only: the same file runs in the sandboxes and in Tether.
"""

import json
import re
import socket
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

DEPTH = 100
_JSON_DEPTH = 3 * DEPTH + 3  # a dictionary is an object with a list of pairs
_PLAIN_INTEGER = 1 << 63
_COLLISIONS = 1000
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}"]')


class TooLarge(ValueError):
    """The value is over the size the caller allows."""


def encode(value: Any, size: int) -> str:
    """The value as text of at most `size` characters. A type that has no form here is a `ValueError` naming it."""
    text = json.dumps(_tagged(value, DEPTH, [size]), separators=(",", ":"))
    if len(text) > size:
        raise TooLarge("the value is too large")
    return text


def decode(text: str) -> Any:
    """The value of a text made by `encode`; anything else is a `ValueError`."""
    try:
        return _untagged(parse(text), DEPTH)
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


def parse(text: str) -> Any:
    """JSON from a hostile program; a `ValueError` whatever is wrong with it."""
    _refuse_depth(text)
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _tagged(value: Any, depth: int, budget: list[int]) -> Any:
    budget[0] -= 1  # what shares itself into billions of parts must not be written out first
    if budget[0] < 0:
        raise TooLarge("the value is too large")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, list | tuple | set | frozenset | dict):
        if depth == 0:
            raise ValueError(f"the value is nested more than {DEPTH} deep, or contains itself")
        return _tagged_container(value, depth - 1, budget)
    if isinstance(value, int):
        plain = int.__index__(value)  # a subclass may override everything else
        return plain if -_PLAIN_INTEGER < plain < _PLAIN_INTEGER else {"i": hex(plain)}
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bytes | bytearray):
        return {"b": value.hex()}
    if isinstance(value, complex):
        return {"c": [value.real, value.imag]}
    raise ValueError(f"a value of type {type(value).__name__} cannot be handed back")


def _tagged_container(value: Any, depth: int, budget: list[int]) -> Any:
    if isinstance(value, dict):
        return {"d": [[_tagged(key, depth, budget), _tagged(item, depth, budget)] for key, item in value.items()]}
    parts = [_tagged(item, depth, budget) for item in value]
    if isinstance(value, list):
        return parts
    return {"t" if isinstance(value, tuple) else "s" if isinstance(value, set) else "f": parts}


def _refuse_depth(text: str) -> None:
    """Keep `json` from recursing as deep as the text says, which would end this process where the recursion limit was lifted."""
    depth = 0
    for token in _TOKENS.finditer(text):
        mark = token.group()
        if mark == '"':
            raise ValueError("text without an end")
        depth += (mark in "[{") - (mark in "]}")
        if depth > _JSON_DEPTH:
            raise ValueError("nested too deeply")


def _untagged(value: Any, depth: int) -> Any:
    if not isinstance(value, list | dict):
        return value
    if depth < 0:
        raise ValueError("nested too deeply")
    if isinstance(value, list):
        return [_untagged(item, depth - 1) for item in value]
    if len(value) != 1:
        raise ValueError("an object with other than one key")
    [(tag, content)] = value.items()
    if tag not in _BUILDERS:
        raise ValueError(f"unknown tag {tag!r:.20}")
    return _BUILDERS[tag](content, depth - 1)


def _parts(content: Any, depth: int) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError("a container without parts")
    return [_untagged(item, depth) for item in content]


def _set(content: Any, depth: int) -> set[Any]:
    parts = _parts(content, depth)
    _refuse_collisions(parts)
    return set(parts)


def _dict(content: Any, depth: int) -> dict[Any, Any]:
    pairs = _parts(content, depth + 1)  # the pair is no level of its own
    if not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise ValueError("a dictionary without pairs")
    _refuse_collisions([key for key, _ in pairs])
    return dict(pairs)


def _refuse_collisions(keys: Sequence[Any]) -> None:
    """Thousands of keys with one hash would take minutes to put into a set, all the while holding up this process."""
    if len(keys) - len({hash(key) for key in keys}) > _COLLISIONS:
        raise ValueError("too many keys with the same hash")


def _integer(content: Any, depth: int) -> int:
    return int(_text(content), 16)


def _bytes(content: Any, depth: int) -> bytes:
    return bytes.fromhex(_text(content))


def _complex(content: Any, depth: int) -> complex:
    real, imaginary = content
    return complex(float(real), float(imaginary))


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise ValueError("not text")
    return content


_BUILDERS: dict[str, Callable[[Any, int], Any]] = {
    "t": lambda content, depth: tuple(_parts(content, depth)),
    "s": _set,
    "f": lambda content, depth: frozenset(_set(content, depth)),
    "d": _dict,
    "i": _integer,
    "b": _bytes,
    "c": _complex,
}


LENGTH = struct.Struct(">Q")
FOLDER_PREFIX = "tether-sandbox-"
"""Prefix of the folder that a fork server without a jail makes. Tether removes the folder if the fork server was killed."""


def pack(frames: Iterable[bytes]) -> bytes:
    """Frames as one run of bytes."""
    return b"".join(part for frame in frames for part in (LENGTH.pack(len(frame)), frame))


def unpack(data: bytes | bytearray, count: int) -> list[bytes] | None:
    """The first `count` frames in the data, or None while there are fewer."""
    frames, at = [], 0
    for _ in range(count):
        if len(data) < at + LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(data, at)
        at += LENGTH.size + length
        if len(data) < at:
            return None
        frames.append(bytes(data[at - length : at]))
    return frames


def receive(connection: socket.socket) -> bytes:
    """The next frame, waiting for it; not a byte more is read. `EOFError` if the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(connection, LENGTH.size))
    return bytes(_exactly(connection, length))


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other side is gone")
        filled += count
    view.release()
    return data
