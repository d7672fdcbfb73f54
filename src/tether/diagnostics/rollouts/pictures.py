"""Pictures of saved rollouts: in the texts of a record they become markers (core/images.py), and the images themselves are held beside it.

A picture is a part of a message, in the shapes of OpenAI (`image_url` and `input_image` with a data URL), of Anthropic (`source`), and of Hugging Face's templates (`image`).
A part without a source of its own, and the text `<image>` of verl's data sets, take the next one of the record's column: `images`, or `multi_modal_data` as
verl has it. Pictures of a column that nothing in the record takes stand in front of the prompt. A source is a path (from the folder of the file), a data URL, base64, bytes,
an object with bytes or path, or a picture in memory. Nothing is fetched from the network. A picture that is broken, missing or too large makes its record a bad one.
"""

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tether.core.errors import BadInput
from tether.core.files import read_plain
from tether.core.images import Image
from tether.diagnostics.rollouts import values
from tether.diagnostics.rollouts.record import BadRecord
from tether.diagnostics.rollouts.values import Record

LARGEST_FILE = 2**28
DECODED = 64
"""Pictures that are kept decoded: the members of a group see the same ones, one record after the other."""
COLUMNS = ("images", "image", "multi_modal_data")
PARTS = ("image", "image_url", "input_image")
_PLACE = re.compile(r"<image>|(?:<\|image_pad\|>)+")
"""Where a text says that a picture stands: verl's data sets, and Qwen's own tokens in decoded prompts, which are what stands around it, too."""
_NAMED = re.compile(r"^data:image/|\.(?:png|jpe?g|webp|gif|bmp)$", re.IGNORECASE)
_HINTS = (b'"image', b'"multi_modal_data', b'"input_image')


def may_hold_images(raw: bytes) -> bool:
    """Whether it is worth looking for pictures in a line of JSON; in a row of a table (no bytes) it always is."""
    return not raw or any(hint in raw for hint in _HINTS)


def with_markers(record: Record, prompt: str, folder: Path | None, *, text_only: bool = False) -> tuple[Record, tuple[Image, ...]]:
    """The record with markers in the place of its pictures, and the pictures; the very record where it has none.

    Args:
        prompt: the field of the prompt, if it is one.
        folder: of the file, where relative paths begin.
        text_only: pictures are left out and not read.
    """
    found = _Found(list(_column(record)), folder, text_only)
    changed = {name: found.rewritten(value, name) for name, value in record.items() if name not in COLUMNS}
    if found.column and isinstance(text := changed.get(prompt), str):
        changed[prompt] = found.placed(text, prompt)
    if found.column and not found.taken:  # no place is named
        changed = _in_front(changed, prompt, "".join(found.marker(source, "images") for source in found.column))
        found.column.clear()
    if found.column:
        raise BadRecord(f"has {len(found.column)} more images than places for them; expected one <image> or image part each")
    return ({**record, **changed}, tuple(found.images)) if found.is_changed else (record, ())


def _column(record: Record) -> Iterator[Any]:
    """The sources of a record's own column of pictures, in order."""
    for name in COLUMNS:
        value = record.get(name)
        if name == "multi_modal_data" and isinstance(value, Mapping):
            value = value.get("image", value.get("images"))
        if name == "image" and isinstance(value, str) and not _NAMED.search(value):
            continue  # of a container, perhaps
        if value is not None and not isinstance(value, int | float):  # a count
            yield from value if isinstance(value, list | tuple) else [value]
            return


class _Found:
    """The pictures of one record, while it is rewritten."""

    def __init__(self, column: list[Any], folder: Path | None, text_only: bool) -> None:
        self.column, self._folder, self._text_only = column, folder, text_only
        self.images: list[Image] = []
        self.taken = 0
        self.is_changed = bool(column)

    def rewritten(self, value: Any, field: str) -> Any:
        """A value whose messages hold markers in the place of pictures."""
        if isinstance(value, list):
            return [self.rewritten(part, f"{field}[{index}]") for index, part in enumerate(value)]
        if isinstance(value, str) and '"image' in value and value.lstrip()[:1] in ("{", "["):  # JSON within a text, as logs have it
            try:
                inner = json.loads(value)
            except (ValueError, RecursionError):
                return value
            before, self.is_changed = self.is_changed, False
            made = self.rewritten(inner, field)
            held, self.is_changed = self.is_changed, self.is_changed or before
            return made if held else value
        if not isinstance(value, Mapping):
            return value
        content = value.get("content")
        if "role" in value and isinstance(content, list) and any(_is_picture(part) for part in content):
            self.is_changed = True
            return {**value, "content": "".join(self._part(part, f"{field}.content[{index}]") for index, part in enumerate(content))}
        if "role" in value and isinstance(content, str) and self.column:
            return {**value, "content": self.placed(content, f"{field}.content")}
        return {name: self.rewritten(part, f"{field}.{name}") for name, part in value.items()}

    def placed(self, text: str, field: str) -> str:
        """A text with the pictures of the column at its places."""
        return _PLACE.sub(lambda _: self._next(field), text)

    def marker(self, source: Any, field: str) -> str:
        """What stands for a picture."""
        if self._text_only:
            return ""
        image = _read(source, self._folder, field)
        self.images.append(image)
        return image.marker

    def _next(self, field: str) -> str:
        self.taken += 1
        if self.column:
            return self.marker(self.column.pop(0), field)
        if self._text_only:
            return ""
        lack = "the record has no more of them" if self.taken > 1 else "the record has none"
        raise BadRecord(
            f"{field} is the place of an image, and {lack}; add them as a column images, or measure the text alone (--text-only)"
        )

    def _part(self, part: Any, field: str) -> str:
        if not _is_picture(part):
            text = part.get("text") if isinstance(part, Mapping) else part
            return values.text(text, field) or ""
        source = next((part[name] for name in ("image", "image_url", "source", "url", "path", "data") if part.get(name) is not None), None)
        return self._next(field) if source is None else self.marker(source, field)


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PARTS


def _in_front(record: dict[str, Any], prompt: str, shown: str) -> dict[str, Any]:
    """The record with pictures in front of its prompt: of a text, or of the first message of the user."""
    value = record.get(prompt)
    if isinstance(value, str):
        return {**record, prompt: shown + value}
    for name, messages in record.items():
        if values.is_messages(messages):
            for index, message in enumerate(messages):
                if message.get("role") == "user" and isinstance(message.get("content"), str):
                    changed = [*messages[:index], {**message, "content": shown + message["content"]}, *messages[index + 1 :]]
                    return {**record, name: changed}
    raise BadRecord("has images and no prompt to show them in; expected a text, or messages with one of the user")


def _read(source: Any, folder: Path | None, field: str) -> Image:
    """The picture of a source; BadRecord says what is wrong with it."""
    what = f"{field}: the image"
    if isinstance(source, Mapping):  # of OpenAI, of Anthropic, of Hugging Face's data sets
        named = next((source[name] for name in ("bytes", "url", "data", "path") if source.get(name)), None)
        if named is None or isinstance(named, Mapping):
            raise BadRecord(f"{what} is {values.shown(source)}; expected bytes, path or url")
        return _read(named, folder, field)
    try:
        if isinstance(source, np.ndarray):
            return Image.of(source)
        if hasattr(source, "convert") and hasattr(source, "size"):  # one of pillow
            return Image.of(np.asarray(source.convert("RGB"), dtype=np.uint8))
        if isinstance(source, bytes):
            return _decoded(source)
        if isinstance(source, str):
            return _decoded(_bytes(source, folder, what))
    except (BadInput, TypeError) as error:
        raise BadRecord(f"{field}: {error}") from error
    raise BadRecord(f"{what} is {values.shown(source)}; expected a path, a data URL, base64 or bytes")


@lru_cache(maxsize=DECODED)
def _decoded(data: bytes) -> Image:
    return Image.read(data)


def _bytes(source: str, folder: Path | None, what: str) -> bytes:
    """Of a data URL, of a file, or of base64."""
    if source.startswith(("http://", "https://", "s3://", "gs://")):
        raise BadRecord(f"{what} lies at {source[:60]!r}, and nothing is fetched; save it and give its path, or measure the text alone")
    if source.startswith("data:"):
        head, _, body = source.partition(",")
        if not head.endswith(";base64"):
            raise BadRecord(f"{what} is a data URL that is not base64 ({head[:40]!r}); encode it so")
        return _unpacked(body, what)
    path = Path(os.path.expanduser(source.removeprefix("file://")))  # which leaves an unknown user as it is
    path = path if path.is_absolute() or folder is None else folder / path
    try:
        return read_plain(path, LARGEST_FILE)
    except OSError as error:
        if len(source) > 200 or not Path(source).suffix:
            return _unpacked(source, f"{what} is no file, and as base64")
        raise BadRecord(
            f"{what} '{path}' cannot be read ({(error.strerror or '').lower()}); paths begin at the folder of the file"
        ) from error


def _unpacked(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRecord(f"{what} is broken ({error}); expected base64") from error
