"""Pictures of grid worlds: square tiles made of layered figures, in two styles and any colours, drawn with numpy alone.

A symbol of the grid is a stack of figures (ground first) from data/sprites.toml. Style `flat` samples figures of 16 x 16 pixels; style `sprites`
paints shapes at any size. Finished tiles are kept, so a picture is one table look-up and one reshuffle of axes. The pixels follow from the
options alone: there is no library in between whose versions would draw otherwise.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, field_validator, model_validator

from tether.core.errors import did_you_mean
from tether.core.images import Pixels
from tether.envs.base import ActionOptions
from tether.envs.dataset import read_packaged

TILE = 16
"""Pixels of a cell's side, unless the option `tile` says otherwise; also those of a figure of style `flat`."""
_SAMPLES = 4
"""Points a pixel's side at which style `sprites` looks whether a shape covers it."""
_COLOUR = re.compile(r"#[0-9a-fA-F]{6}")

Style = Literal["flat", "sprites"]
Figure = Literal["floor", "wall", "target", "box", "box_home", "player", "player_down", "ice", "hole", "flag"]
Tiles = Mapping[str, tuple[Figure, ...]]
"""From a symbol of the grid to the figures that lie on each other in its cell."""
Colours = str | dict[str, str]


class PictureOptions(ActionOptions):
    """Options of an environment whose state is drawn as a grid."""

    tiles: ClassVar[Tiles] = {}

    tile: int = Field(default=TILE, ge=8, le=128)
    """In pictures: pixels of a cell's side."""
    style: Style = "flat"
    """In pictures: flat (figures of few pixels in plain colours) or sprites (drawn figures with shades)."""
    colours: Colours = "default"
    """In pictures: a palette (default, dark, colour_blind), or colours of single pieces, such as {player: "#ff8800"}."""

    @field_validator("colours", mode="before")
    @classmethod
    def _known_colours(cls, colours: Any) -> Any:
        palettes = _data()["palettes"]
        if isinstance(colours, str):
            if colours not in palettes:
                raise ValueError(f"unknown palette '{colours}': {did_you_mean(colours, palettes)}")
            return colours
        if not isinstance(colours, dict):
            raise ValueError(f'has to be a palette ({", ".join(palettes)}) or colours of pieces, such as {{player: "#ff8800"}}')
        pieces = sorted({_data()["flat"][figure]["piece"] for stack in cls.tiles.values() for figure in stack})
        for piece, colour in colours.items():
            if piece not in pieces:
                raise ValueError(f"unknown piece '{piece}': {did_you_mean(str(piece), pieces)}")
            if not isinstance(colour, str) or not _COLOUR.fullmatch(colour):
                raise ValueError(f'has {colour!r:.40} for {piece}; write a colour as "#rrggbb", in quotes')
        return colours

    @model_validator(mode="after")
    def _told_apart(self) -> Self:
        """Colours of the user's own may paint two things alike, which no agent could tell apart."""
        seen: dict[bytes, str] = {}
        for symbol in self.tiles if isinstance(self.colours, dict) else ():
            other = seen.setdefault(self.draw([symbol]).tobytes(), symbol)
            if other != symbol:
                alike = " and ".join(" on ".join(reversed(self.tiles[each])) for each in (other, symbol))
                raise ValueError(f"colours: {alike} would look the same; choose colours that differ")
        return self

    def draw(self, rows: Sequence[str]) -> Pixels:
        """The picture of a grid of symbols, [tile * rows, tile * columns, 3]."""
        own = () if isinstance(self.colours, str) else tuple(self.colours.items())
        palette = self.colours if isinstance(self.colours, str) else "default"
        look = (self.tile, self.style, palette, own)
        tiles = np.stack([np.stack([_tile(self.tiles[symbol], *look) for symbol in row]) for row in rows])
        height, width = tiles.shape[:2]
        return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3, 4)).reshape(height * self.tile, width * self.tile, 3)


def _data() -> dict[str, Any]:
    return read_packaged("tether.envs", "sprites.toml")


@lru_cache(maxsize=1024)
def _tile(figures: tuple[Figure, ...], tile: int, style: Style, palette: str, own: tuple[tuple[str, str], ...]) -> Pixels:
    colours = {**_data()["palettes"][palette], **dict(own)}
    side = tile if style == "flat" else tile * _SAMPLES
    canvas = np.zeros((side, side, 3))
    for name in figures:
        figure = _data()[style][name]
        base = _rgb(colours[figure["piece"]])
        if style == "flat":
            nearest = (2 * np.arange(side) + 1) * TILE // (2 * side)
            letters = np.array([list(row) for row in figure["pixels"].split()])[nearest][:, nearest]
            for letter, ink in figure["inks"].items():
                _paint(canvas, letters == letter, ink, base)
        else:
            for shape in figure["shapes"]:
                _paint(canvas, _covered(shape, side), shape["ink"], base)
    samples = side // tile
    return canvas.reshape(tile, samples, tile, samples, 3).mean(axis=(1, 3)).round().astype(np.uint8)


def _rgb(colour: str) -> npt.NDArray[np.int64]:
    return np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)])


def _paint(canvas: npt.NDArray[np.float64], where: npt.NDArray[np.bool_], ink: Any, base: npt.NDArray[np.int64]) -> None:
    """Lay an ink over part of the canvas: a colour, a difference to the colour of the piece, or a factor for what is below."""
    if isinstance(ink, float):
        canvas[where] = np.floor(canvas[where] * ink)
    else:
        canvas[where] = _rgb(ink) if isinstance(ink, str) else np.clip(base + ink, 0, 255)


def _covered(shape: Mapping[str, Any], side: int) -> npt.NDArray[np.bool_]:
    """The points of a square that lie in any of the boxes, ellipses and polygons of a shape."""
    across = (np.arange(side) + 0.5) * 100 / side
    x, y = across[None, :], across[:, None]
    covered = np.zeros((side, side), bool)
    for left, top, right, bottom in shape.get("box", ()):
        covered |= (x >= left) & (x < right) & (y >= top) & (y < bottom)
    for centre_x, centre_y, radius_x, radius_y in shape.get("ellipse", ()):
        covered |= ((x - centre_x) / radius_x) ** 2 + ((y - centre_y) / radius_y) ** 2 < 1
    for corners in shape.get("polygon", ()):
        inside = np.zeros((side, side), bool)
        points = np.array(corners).reshape(-1, 2)
        for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, axis=0), strict=True):
            if y0 != y1:  # a ray to the right crosses the edge an odd number of times from inside
                inside ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        covered |= inside
    return covered
