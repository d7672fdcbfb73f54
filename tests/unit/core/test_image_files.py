"""Image files are read whole or refused in one line, before anything is decoded."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tether.core.errors import BadInput
from tether.core.images import Image

sys.path.append(str(Path(__file__).parents[1]))
from hostile_images import BOMB, CUT_SHORT, GOOD, JPEG, POSTSCRIPT, png_of_size


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(GOOD)
    assert Image.read(tmp_path / "a.png") is Image.read(GOOD)
    assert Image.read(GOOD).pixels.ravel().tolist() == list(range(60))
    Image.check(GOOD)
    Image.check(JPEG)
    Image.check(JPEG + bytes(9000))  # what cameras append


@pytest.mark.parametrize("call", [Image.read, Image.check])
@pytest.mark.parametrize(
    ("source", "line"),
    [
        (BOMB, "row 3 has 20000 x 4000 pixels; at most 67108864 are read: make it smaller"),
        (png_of_size(60_000, 60_000), "row 3 cannot be read as an image: Image size (3600000000 pixels) exceeds limit"),
        (CUT_SHORT, "row 3 cannot be read as an image: "),
        (GOOD[:20], "row 3 cannot be read as an image: "),
        (JPEG[:-40], "row 3 cannot be read as an image: "),
        (POSTSCRIPT, "row 3 cannot be read as an image: it is none of PNG, JPEG, WEBP, GIF, BMP; replace it by a whole PNG or JPEG file"),
        (b"", "row 3 cannot be read as an image: it is none of PNG"),
        (Path("/nowhere/a.png"), "row 3 is not there: no file '/nowhere/a.png'; check the path"),
        (Path("/"), "row 3 cannot be read as an image: "),
    ],
)
def test_a_broken_or_huge_file_is_one_line(call: object, source: bytes | Path, line: str) -> None:
    with pytest.raises(BadInput) as caught:
        call(source, "row 3")  # type: ignore[operator]
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_pixels_stay_as_they_are() -> None:
    with pytest.raises(ValueError, match="read-only"):
        Image.read(GOOD).pixels[0] = np.uint8(1)
