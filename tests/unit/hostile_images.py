"""Image files as bytes: whole ones, broken ones, and some that must not be decoded."""

import io
import struct
import zlib

import numpy as np
from PIL import Image as Pillow

from tether.core.images import Image

GOOD = Image.of(np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)).png
CUT_SHORT = GOOD[:-30]
_FILE = io.BytesIO()
Pillow.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(_FILE, "JPEG")
JPEG = _FILE.getvalue()
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
"""Pillow would start Ghostscript for it."""


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png_of_size(width: int, height: int) -> bytes:
    """A PNG file of some hundred bytes that claims any size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", zlib.compress(bytes(1000))) + _chunk(b"IEND", b"")


BOMB = png_of_size(20_000, 4_000)
"""80 million pixels: more than are read, and too few for Pillow's own guard."""
