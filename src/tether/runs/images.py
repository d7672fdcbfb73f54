"""The pictures of a record: PNG files in the folder `images` beside it, each written once, named by the digest of its pixels.

Whoever writes records hands the images over. Readers that need numbers only never open them. A run folder may have come from somebody else: names are
checked, and no link is followed.
"""

import base64
import io
import os
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tether.core.errors import BadInput
from tether.core.files import open_to_read, read_plain
from tether.core.images import MARKER, Image
from tether.runs.files import place_whole, storage_error

IMAGES = "images"
LONGEST_SIDE = 256
"""Pixels of a picture that a page holds itself; a larger one is made smaller."""
MOST_EMBEDDED = 2**23
"""Bytes of all pictures of one such page."""
LONGEST_PNG = 2**28
_DIGEST = re.compile(r"[0-9a-f]{12}")
_HEADER = struct.Struct(">8s8xII")
_PNG = b"\x89PNG\r\n\x1a\n"


def image_path(folder: Path, digest: str) -> Path:
    """Where the picture with this digest lies; BadInput for a text that is none, so no other file can be named."""
    if not _DIGEST.fullmatch(digest):
        raise BadInput(f"{digest[:40]!r} is not the digest of an image; expected 12 hexadecimal digits")
    return folder / IMAGES / f"{digest}.png"


def write_images(folder: Path, images: Iterable[Image]) -> list[Path]:
    """Write the pictures of records in this folder that are not there yet; returns the new files, which nothing has forced to the disk."""
    written = []
    for image in {image.digest: image for image in images}.values():
        path = image_path(folder, image.digest)
        try:
            if path.parent.is_symlink():
                raise BadInput(
                    f"'{path.parent}' is a symbolic link, and a record is written only into its own folder; move what it names there"
                )
            if path.exists() and path.stat().st_size:  # a power cut can leave an empty one
                continue
            path.parent.mkdir(exist_ok=True)
        except OSError as error:
            raise storage_error(path, error) from error
        place_whole(path, image.png, sync=False)
        written.append(path)
    return written


def read_image(folder: Path, digest: str) -> Image:
    """The picture with this digest; BadInput where it is missing, or is another picture."""
    data = read_png(folder, digest)
    path = image_path(folder, digest)
    image = Image.read(data, f"'{path}'")
    if image.digest != digest:
        raise BadInput(f"'{path}' is another picture than the one that was recorded; restore it")
    return image


def read_png(folder: Path, digest: str) -> bytes:
    """The bytes of its file."""
    path = image_path(folder, digest)
    try:
        if path.parent.is_symlink() or path.is_symlink():
            raise BadInput(f"'{path}' is or lies behind a symbolic link, which is not followed; put the file itself there")
        return read_plain(path, LONGEST_PNG)
    except FileNotFoundError as error:
        raise BadInput(f"the picture '{path}' of the record is missing; copy the folder {IMAGES} along with the record") from error
    except OSError as error:
        raise storage_error(path, error, doing="read") from error


def image_size(folder: Path, digest: str) -> tuple[int, int] | None:
    """Width and height, by the head of the file; None where there is no whole one."""
    path = image_path(folder, digest)
    try:
        if path.parent.is_symlink() or path.is_symlink():
            return None
        with open_to_read(path) as file:
            head = file.read(_HEADER.size)
    except OSError:
        return None
    if len(head) < _HEADER.size or not head.startswith(_PNG):
        return None
    _, width, height = _HEADER.unpack(head)
    return width, height


def sync_images(paths: Iterable[Path]) -> None:
    """Force files to the disk."""
    for path in paths:
        try:
            with open_to_read(path) as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(path, error) from error


# ----------------------------------------------------------------------------------------------------------------- for people


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture on a page, in the place of its marker."""

    digest: str
    size: tuple[int, int] | None
    """Width and height; None where its file is missing."""
    source: str = ""
    """A data URL, or an address; empty where it is only named."""

    def __str__(self) -> str:
        return f"[image {self.digest} {f'{self.size[0]} x {self.size[1]}' if self.size else 'missing'}]"

    @property
    def alt(self) -> str:
        """For those who do not see it."""
        return f"what the agent saw: picture {self.digest}"


Pictures = Callable[[str], Picture]
"""From a digest to what a page shows."""


def named(folder: Path | None = None) -> Pictures:
    """Pictures by name and size only."""
    return lambda digest: Picture(digest, None if folder is None else image_size(folder, digest))


def parts(text: str, pictures: Pictures) -> list[str | Picture]:
    """A text cut at its markers, which no page shows as they are."""
    pieces = [pictures(piece) if place % 2 else piece for place, piece in enumerate(MARKER.split(text))]
    return [piece for piece in pieces if piece != ""]


def without_raw_markers(text: str) -> str:
    """The text with the names of its pictures."""
    return MARKER.sub(r"[image \1]", text)


class EmbeddedPictures:
    """The pictures of one page as data URLs, small and not too many; what is left out is named."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._left, self._known = folder, MOST_EMBEDDED, dict[str, Picture]()

    def __call__(self, digest: str) -> Picture:
        if digest not in self._known:
            size = image_size(self._folder, digest)
            source = "" if size is None or self._left <= 0 else data_url(read_png(self._folder, digest), size)
            self._left -= len(source)
            self._known[digest] = Picture(digest, size, source)
        return self._known[digest]


def data_url(png: bytes, size: tuple[int, int]) -> str:
    """A PNG file within a page; a large one is made smaller. Empty where it cannot be read."""
    if max(size) > LONGEST_SIDE:
        from PIL import Image as Pillow

        try:
            picture = Pillow.fromarray(Image.read(png).pixels)
        except BadInput:
            return ""
        picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        png = buffer.getvalue()
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"
