"""Python values as JSON with tags, both ways, and frames over a socket: between Tether and an environment's server, and into the sandbox and back.

JSON cannot hold every value, so an object with one key that begins with "$" stands for another one. The plain form is what other languages
read (docs/environments/http.md): {"$float": "nan"}, {"$bytes": base64}, and {"$dict": [[key, value], ...]} for dictionaries with keys that are
not plain text; tuples become lists. The exact form also tells tuples ($t), sets ($s), frozen sets ($f), large integers ($i) and complex numbers
($c) apart. A caller may add forms of its own (`other`, `builders`).

Nothing is ever evaluated or unpickled. Depth and size are bounded in both directions, since a value may come from a hostile program: a cycle,
a value that shares itself into billions of parts, text that is not JSON, or a set built of colliding hashes is one `ValueError`.

A frame is eight bytes of length, then that many bytes. Imports the standard library only: the same file runs in the sandboxes and in Tether.
"""

import base64
import json
import math
import re
import socket
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

DEPTH = 100
_JSON_DEPTH = 3 * DEPTH + 3  # a dictionary may be an object with a list of pairs
_PLAIN_INTEGER = 1 << 63
_COLLISIONS = 1000
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}"]')
_KEY = object()
"""In the path of a `CodecError`: a key of the dictionary, not an item."""


class CodecError(ValueError):
    """A value that has no form, or something that is not of the form it should have; the message says what, and reads on from "it"."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.path: list[object] = []

    @property
    def where(self) -> str:
        """Where in the value it is, such as info['board'][2]; empty for the value itself."""
        where = ""
        for step in reversed(self.path):
            where = f"a key of {where or 'this'}" if step is _KEY else f"{where}[{step!r}]" if where else str(step)
        return where


class TooLarge(ValueError):
    """The value is over the size the caller allows."""


def _refuse(value: Any) -> NoReturn:
    raise ValueError(f"a value of type {type(value).__name__} cannot be handed back")


def encode(value: Any, size: int, *, plain: bool = False, other: Callable[[Any], Any] = _refuse) -> str:
    """The value as ASCII text of at most `size` characters.

    `other` gets a value of a type that has no form: it returns one that has, or the finished form of its own (`Tagged`), or raises.
    """
    text = json.dumps(_Writer(size, plain, other).written(value, DEPTH), allow_nan=False, separators=(",", ":"))
    if len(text) > size:
        raise TooLarge("the value is too large")
    return text


class Tagged(dict[str, Any]):
    """The finished form of a value: {"$array": ...}."""


class _Writer:
    """Writes one value."""

    def __init__(self, budget: int, plain: bool, other: Callable[[Any], Any]) -> None:
        self._budget, self._plain, self._other = budget, plain, other

    def written(self, value: Any, depth: int) -> Any:
        self._budget -= 1  # what shares itself into billions of parts must not be written out first
        if self._budget < 0:
            raise TooLarge("the value is too large")
        if value is None or isinstance(value, bool | Tagged):
            return value
        if isinstance(value, list | tuple | dict) or (isinstance(value, set | frozenset) and not self._plain):
            if depth == 0:
                raise ValueError(f"the value is nested more than {DEPTH} deep, or contains itself")
            return self._mapping(value, depth - 1) if isinstance(value, dict) else self._sequence(value, depth - 1)
        if isinstance(value, int):
            whole = int.__index__(value)  # a subclass may override everything else
            return whole if self._plain or -_PLAIN_INTEGER < whole < _PLAIN_INTEGER else {"$i": hex(whole)}
        if isinstance(value, float):
            number = float.__float__(value)
            return number if math.isfinite(number) else {"$float": str(number)}
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, bytes | bytearray):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if isinstance(value, complex) and not self._plain:
            return {"$c": [value.real.hex(), value.imag.hex()]}
        return self.written(self._other(value), depth)

    def _sequence(self, value: Any, depth: int) -> Any:
        parts = [self._part(item, depth, place) for place, item in enumerate(value)]
        if isinstance(value, list) or self._plain:
            return parts
        return {"$t" if isinstance(value, tuple) else "$s" if isinstance(value, set) else "$f": parts}

    def _mapping(self, value: dict[Any, Any], depth: int) -> dict[str, Any]:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self._part(item, depth, key) for key, item in value.items()}
        return {"$dict": [[self._part(key, depth, _KEY), self._part(item, depth, key)] for key, item in value.items()]}

    def _part(self, item: Any, depth: int, step: object) -> Any:
        try:
            return self.written(item, depth)
        except CodecError as error:
            error.path.append(step)
            raise


def parse(text: str) -> Any:
    """JSON from a hostile program; a `ValueError` whatever is wrong with it.

    The depth is checked first: `json` would recurse as deep as the text says, and end this process where the recursion limit was lifted.
    """
    depth = 0
    for token in _TOKENS.finditer(text):
        mark = token.group()
        if mark == '"':
            raise ValueError("is a text without an end")
        depth += (mark in "[{") - (mark in "]}")
        if depth > _JSON_DEPTH:
            raise ValueError("is nested too deeply")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def decode(text: str) -> Any:
    """The value of a text that `encode` has written in its exact form; anything else is a `ValueError`."""
    try:
        return restored(parse(text))
    except (TypeError, OverflowError) as error:
        raise ValueError(str(error)) from None


Builder = Callable[[Any, Callable[[Any], Any]], Any]
"""From the content of a tag, and the function that restores a part of it, to the value. None: the content is of another form."""


def _set(content: Any, read: Callable[[Any], Any]) -> set[Any] | None:
    if not isinstance(content, list):
        return None
    parts = [read(item) for item in content]
    _refuse_collisions(parts)
    return set(parts)


def _dict(content: Any, read: Callable[[Any], Any]) -> dict[Any, Any] | None:
    if not isinstance(content, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        return None
    keys = [_hashable(read(key)) for key, _ in content]
    _refuse_collisions(keys)
    return dict(zip(keys, (read(item) for _, item in content), strict=True))


def _hashable(key: Any) -> Any:
    """A key as it was: among keys, what has become a list can only have been a tuple."""
    return tuple(_hashable(item) for item in key) if isinstance(key, list) else key


def _refuse_collisions(keys: Sequence[Any]) -> None:
    """Thousands of keys with one hash would take minutes to put into a set, all the while holding up this process."""
    if len(keys) - len({hash(key) for key in keys}) > _COLLISIONS:
        raise CodecError("holds too many keys with the same hash")


def unpacked(text: Any, _: object = None) -> bytes:
    """The bytes of base64."""
    if not isinstance(text, str):
        raise CodecError(f"holds a {type(text).__name__} where base64 text should be")
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CodecError(f"holds broken base64 ({error})") from None


PLAIN: Mapping[str, Builder] = {
    "$float": lambda content, _: float(content) if content in ("nan", "inf", "-inf") else None,
    "$bytes": unpacked,
    "$dict": _dict,
}
EXACT: Mapping[str, Builder] = {
    **PLAIN,
    "$t": lambda content, read: tuple(read(item) for item in content) if isinstance(content, list) else None,
    "$s": _set,
    "$f": lambda content, read: None if (items := _set(content, read)) is None else frozenset(items),
    "$i": lambda content, _: int(content, 16) if isinstance(content, str) else None,
    "$c": lambda content, _: complex(*map(float.fromhex, content)) if isinstance(content, list) else None,
}


def restored(value: Any, builders: Mapping[str, Builder] = EXACT, depth: int = DEPTH) -> Any:
    """The value that parsed JSON stands for; `CodecError` for a tag that is not among the builders."""
    if not isinstance(value, list | dict):
        return value
    if depth < 0:
        raise CodecError("is nested too deeply")

    def read(item: Any) -> Any:
        return restored(item, builders, depth - 1)

    if isinstance(value, list):
        return [read(item) for item in value]
    tag = next(iter(value), "")
    if len(value) != 1 or not tag.startswith("$"):
        return {key: read(item) for key, item in value.items()}
    made = builders[tag](value[tag], read) if tag in builders else None
    if made is None:
        raise CodecError(f"holds the unknown form {{'{tag:.20}': ...}}")
    return made


# --- frames ---

_LENGTH = struct.Struct(">Q")


def pack(frames: Iterable[bytes]) -> bytes:
    """Frames as one run of bytes."""
    return b"".join(part for frame in frames for part in (_LENGTH.pack(len(frame)), frame))


def unpack(data: bytes | bytearray, count: int) -> list[bytes] | None:
    """The first `count` frames in the data, or None while there are fewer."""
    frames, at = [], 0
    for _ in range(count):
        if len(data) < at + _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if len(data) < at:
            return None
        frames.append(bytes(data[at - length : at]))
    return frames


def receive(connection: socket.socket) -> bytes:
    """The next frame, waiting for it; not a byte more is read. `EOFError` if the other side is gone."""
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
    return _exactly(connection, length)


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray(size)
    view, filled = memoryview(data), 0
    while filled < size:
        count = connection.recv_into(view[filled:])
        if count == 0:
            raise EOFError("the other side is gone")
        filled += count
    view.release()
    return bytes(data)
