"""Pictures in the data flow: a marker in a text, ids among the tokens, PNG files in a record.

A picture is known by the digest of its pixels. In a text it is the marker `<image:0123456789ab>`. Among token ids every patch of it is an id
of its own, beyond any vocabulary, made of the digest and the number of the patch. So equal ids are equal pictures, and whatever compares, shares
or swaps tokens (prefix caches, packing, cross-scores) need not know of images. Two places do: what embeds tokens looks the pixels up, and what
leaves the process (records, servers) names the model's own placeholder instead of these ids.

Images are interned: those with the same digest are one object, found by it as long as somebody (a turn, a rollout that is read) holds it.
"""

import base64
import binascii
import hashlib
import io
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from tether.core.errors import BadInput, MissingDependency

Pixels = npt.NDArray[np.uint8]
MARKER = re.compile(r"<image:([0-9a-f]{12})>")
IMAGE_IDS = 2**62
"""Ids from here on are patches of images."""
PATCH_BITS = 14
MOST_PATCHES = 2**PATCH_BITS
MOST_PIXELS = 2**26
"""Of an image that is read: 67 million, about 200 MB once decoded."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What is read. Pillow knows many more, some of which start other programs."""
_JPEG_END, _TAIL = b"\xff\xd9", 4096
_INTERNED: "WeakValueDictionary[str, Image]" = WeakValueDictionary()
_INTERNING = threading.Lock()
MOST_IMAGES = 256
"""Of one request to a server; together they have at most MOST_PIXELS."""


class Image:
    """RGB pixels, [height, width, 3], that are never changed. Made by `Image.of` or `Image.read`."""

    __slots__ = ("__dict__", "__weakref__", "digest", "pixels")

    def __init__(self, pixels: Pixels, digest: str) -> None:
        self.pixels = pixels
        self.digest = digest

    @staticmethod
    def of(pixels: Any) -> "Image":
        """The image of an array uint8 [height, width, 3]; TypeError for anything else."""
        if not (isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3 and pixels.size):
            what = f"{pixels.dtype} {list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
            raise TypeError(f"an image is {what}; it has to be uint8 [height, width, 3]")
        own = np.ascontiguousarray(pixels).copy()
        own.flags.writeable = False
        shape = np.array(own.shape, dtype=np.int64).tobytes()
        digest = hashlib.blake2b(shape + own.tobytes(), digest_size=6).hexdigest()
        with _INTERNING:  # servers read images in threads: of two objects with one digest, the second would take the first one's place
            known = _INTERNED.get(digest)
            if known is None:
                _INTERNED[digest] = known = Image(own, digest)
        if known.pixels is own:
            return known
        if not np.array_equal(known.pixels, own):
            raise RuntimeError(f"two different images have the digest {digest}")
        return known

    @staticmethod
    def read(source: bytes | Path, what: str = "the image") -> "Image":
        """The image of an encoded file (PNG, JPEG, WebP, GIF, BMP); BadInput where it is broken, or larger than MOST_PIXELS."""
        with _opened(source, what) as picture:
            return Image.of(np.asarray(picture.convert("RGB"), dtype=np.uint8))

    @staticmethod
    def check(source: bytes | Path, what: str = "the image") -> None:
        """What `read` would refuse, without decoding: by the size in its head, in a PNG by its checksums, in a JPEG by its end."""
        with _opened(source, what) as picture:
            if picture.format != "JPEG":
                picture.verify()
            elif _JPEG_END not in _tail(source):
                picture.load()  # cut short, unless something was appended to it

    @cached_property
    def png(self) -> bytes:
        """The same pixels as a PNG file."""
        from PIL import Image as Pillow

        buffer = io.BytesIO()
        Pillow.fromarray(self.pixels).save(buffer, "PNG", compress_level=6)
        return buffer.getvalue()

    @property
    def data_url(self) -> str:
        """How it stands in a request to a server."""
        return f"data:image/png;base64,{base64.b64encode(self.png).decode()}"

    @property
    def marker(self) -> str:
        """How it stands in a text."""
        return f"<image:{self.digest}>"

    @property
    def file_name(self) -> str:
        return f"{self.digest}.png"

    def blank(self) -> "Image":
        """An image of the same size in its mean colour: nothing to see."""
        mean = self.pixels.reshape(-1, 3).mean(axis=0).round().astype(np.uint8)
        return Image.of(np.broadcast_to(mean, self.pixels.shape))

    def __deepcopy__(self, memo: Any) -> "Image":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Image.read, (self.png,)

    def __repr__(self) -> str:
        return f"Image({self.digest}, {self.pixels.shape[1]} x {self.pixels.shape[0]})"


def _tail(source: bytes | Path) -> bytes:
    if isinstance(source, bytes):
        return source[-_TAIL:]
    with source.open("rb") as file:
        file.seek(max(0, source.stat().st_size - _TAIL))
        return file.read()


@contextmanager
def _opened(source: bytes | Path, what: str) -> Iterator[Any]:
    """An encoded file, opened by pillow; whatever is wrong with it, also inside of the block, is one line."""
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise MissingDependency("images need pillow, which is not installed; run: pip install pillow") from error
    try:
        with Pillow.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=_FORMATS) as picture:
            if picture.width * picture.height > MOST_PIXELS:  # before anything is decoded
                raise BadInput(f"{what} has {picture.width} x {picture.height} pixels; at most {MOST_PIXELS} are read: make it smaller")
            yield picture
    except BadInput:
        raise
    except FileNotFoundError as error:
        raise BadInput(f"{what} is not there: no file '{source!s}'; check the path") from error
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError, Pillow.DecompressionBombWarning) as error:
        unknown = isinstance(error, Pillow.UnidentifiedImageError)
        reason = f"it is none of {', '.join(_FORMATS)}" if unknown else " ".join(str(error).split())[:120].rstrip(".")
        raise BadInput(f"{what} cannot be read as an image: {reason}; replace it by a whole PNG or JPEG file") from error


def image_of(digest: str) -> Image:
    """The image with this digest; BadInput where nobody holds it."""
    found = _INTERNED.get(digest)
    if found is None:
        raise BadInput(f"a text holds '<image:{digest}>', which stands for an image, and there is no such image; leave it out")
    return found


class SentImages:
    """The images of one request to a server, as data URLs; what they may take together is limited."""

    def __init__(self) -> None:
        self.held: list[Image] = []
        self._num_pixels = 0

    def read(self, url: Any, what: str) -> Image:
        """One more; BadInput where it is none, or one too many. Nothing is fetched."""
        head, comma, coded = url.partition(",") if isinstance(url, str) else ("", "", "")
        if not (comma and head.startswith("data:") and head.endswith(";base64")):
            raise BadInput(f"{what} is {str(url)[:40]!r}; send a data URL (data:image/png;base64,...): nothing is fetched here")
        try:
            image = Image.read(base64.b64decode(coded, validate=True), what)
        except binascii.Error as error:
            raise BadInput(f"{what} is broken ({error}); send it as base64") from error
        self.held.append(image)
        self._num_pixels += image.pixels.size // 3
        if len(self.held) > MOST_IMAGES or self._num_pixels > MOST_PIXELS:
            raise BadInput(f"{what} is one too many: a request may have {MOST_IMAGES} images of {MOST_PIXELS} pixels together; send fewer")
        return image


class ImageRun(NamedTuple):
    """Neighbouring tokens that are patches of one image."""

    start: int
    """Place of the first among the tokens."""
    length: int
    digest: str
    patch: int
    """Number of the first patch; above 0 where other tokens stand between the patches of an image."""


def patch_ids(digest: str, count: int, patch: int = 0) -> tuple[int, ...]:
    """The token ids of so many patches of an image, from one on."""
    if patch + count > MOST_PATCHES:
        raise BadInput(f"an image becomes {patch + count} tokens; at most {MOST_PATCHES} are taken: lower the processor's max_pixels")
    first = IMAGE_IDS + (int(digest, 16) << PATCH_BITS) + patch
    return tuple(range(first, first + count))


def digest_of(token: int) -> str:
    """Of a token that is a patch."""
    return f"{(token - IMAGE_IDS) >> PATCH_BITS:012x}"


def has_images(ids: Sequence[int]) -> bool:
    return any(token >= IMAGE_IDS for token in ids)


def find_runs(ids: Sequence[int]) -> list[ImageRun]:
    """Where images stand among tokens.

    >>> find_runs([1, *patch_ids("00000000002a", 2), 5])
    [ImageRun(start=1, length=2, digest='00000000002a', patch=0)]
    """
    if max(ids, default=0) < IMAGE_IDS:
        return []
    tokens = np.asarray(ids, dtype=np.int64)
    places = np.flatnonzero(tokens >= IMAGE_IDS)
    patches = tokens[places]
    begins = np.ones(len(places), dtype=bool)
    begins[1:] = (np.diff(places) != 1) | (np.diff(patches) != 1) | (patches[1:] & (MOST_PATCHES - 1) == 0)
    firsts = np.flatnonzero(begins)
    lengths = np.diff(firsts, append=len(places))
    runs = zip(places[firsts].tolist(), lengths.tolist(), patches[firsts].tolist(), strict=True)
    return [ImageRun(place, length, digest_of(token), token & (MOST_PATCHES - 1)) for place, length, token in runs]


def image_digests(ids: Sequence[int]) -> list[str]:
    """The images among tokens, in order, each as often as it stands there."""
    return [run.digest for run in find_runs(ids) if run.patch == 0]


def check_sent(ids: Sequence[int], images: Iterable[Image]) -> None:
    """Refuse tokens of images that did not come with them: a text that spells a marker must not show what somebody else sent."""
    if foreign := set(image_digests(ids)).difference(image.digest for image in images):
        raise BadInput(f"a text holds '<image:{min(foreign)}>', which stands for an image here; leave it out")


def with_placeholders(ids: Sequence[int], placeholder: int) -> list[int]:
    """The tokens as the model's own processor writes them: one id for all patches."""
    return [placeholder if token >= IMAGE_IDS else token for token in ids]


def with_patches(ids: Sequence[int], runs: Iterable[Sequence[Any]]) -> tuple[int, ...]:
    """The other way round: tokens with placeholders, and the runs that `find_runs` gave (or the lists that JSON made of them)."""
    tokens = list(ids)
    for start, length, digest, patch in runs:
        tokens[start : start + length] = patch_ids(digest, length, patch)
    return tuple(tokens)


def with_other_images(ids: Sequence[int], others: Mapping[str, str]) -> tuple[int, ...]:
    """The tokens with images replaced by others (by digest) that have as many patches; the rest stays."""
    low = MOST_PATCHES - 1
    first = {digest: IMAGE_IDS + (int(other, 16) << PATCH_BITS) for digest, other in others.items()}
    return tuple(first[digest] | (token & low) if token >= IMAGE_IDS and (digest := digest_of(token)) in first else token for token in ids)


def markers(text: str) -> Iterator[str]:
    """The digests of the images in a text, in order."""
    return (found[1] for found in MARKER.finditer(text))


def with_data_urls(text: str) -> str | list[dict[str, Any]]:
    """A text as the content of a chat message: as it is, or with images the parts that chat endpoints take, pictures as data URLs."""
    pieces = MARKER.split(text)  # every second one is a digest
    if len(pieces) == 1:
        return text
    return [
        {"type": "image_url", "image_url": {"url": image_of(piece).data_url}} if n % 2 else {"type": "text", "text": piece}
        for n, piece in enumerate(pieces)
        if piece
    ]


def without_markers(text: str) -> str:
    """The text alone."""
    return MARKER.sub("", text).lstrip("\n")
