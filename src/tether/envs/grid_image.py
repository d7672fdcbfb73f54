"""Pictures of grid worlds: 16-pixel tiles made of layered sprites, drawn with numpy alone.

A sprite is a function that paints its pixels onto a tile; a symbol of the grid is a stack of sprites (floor first). Finished tiles
are kept, so a picture is one table look-up and one reshuffle of axes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

TILE = 16

Pixels = npt.NDArray[np.uint8]
Sprite = Literal["floor", "wall", "target", "box", "box_home", "player", "player_down", "ice", "hole", "flag"]

_ROW, _COLUMN = np.mgrid[0:TILE, 0:TILE]
_RADIUS = np.hypot(_ROW - 7.5, _COLUMN - 7.5)


def draw_grid(rows: Sequence[str], sprites: Mapping[str, tuple[Sprite, ...]]) -> Pixels:
    """The picture of a grid of symbols, [16 * rows, 16 * columns, 3]."""
    tiles = np.stack([np.stack([_tile(sprites[symbol]) for symbol in row]) for row in rows])
    height, width = tiles.shape[:2]
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3, 4)).reshape(height * TILE, width * TILE, 3)


@lru_cache(maxsize=256)
def _tile(layers: tuple[Sprite, ...]) -> Pixels:
    tile = np.zeros((TILE, TILE, 3), np.uint8)
    for layer in layers:
        _PAINTERS[layer](tile)
    return tile


def _floor(tile: Pixels) -> None:
    tile[:] = (236, 226, 206)
    tile[-1, :] = tile[:, -1] = (222, 210, 186)


def _wall(tile: Pixels) -> None:
    tile[:] = (120, 84, 72)
    mortar = (86, 58, 50)
    tile[3::4, :] = mortar
    for course in range(4):  # every second course is offset by half a brick
        tile[4 * course : 4 * course + 4, (3 + 4 * (course % 2)) :: 8] = mortar


def _target(tile: Pixels) -> None:
    tile[(_RADIUS < 7.3) & (_RADIUS > 5.6)] = (214, 60, 52)  # wide enough to show around the player
    tile[_RADIUS < 2.3] = (214, 60, 52)


def _box(tile: Pixels) -> None:
    _crate(tile, (201, 146, 74), (128, 84, 34))


def _box_home(tile: Pixels) -> None:
    _crate(tile, (106, 176, 92), (52, 110, 48))


def _crate(tile: Pixels, wood: tuple[int, int, int], edge: tuple[int, int, int]) -> None:
    tile[2:14, 2:14] = edge
    tile[4:12, 4:12] = wood
    inside = (abs(_ROW - 7.5) < 4) & (abs(_COLUMN - 7.5) < 4)
    tile[inside & ((_ROW == _COLUMN) | (_ROW + _COLUMN == TILE - 1))] = edge


def _player(tile: Pixels) -> None:
    _face(tile, (44, 104, 190))


def _player_down(tile: Pixels) -> None:
    _face(tile, (92, 116, 150))
    tile[8, 5:11] = (28, 44, 74)  # the water line
    tile[9:] = np.where((_RADIUS < 5.5)[9:, :, None], np.uint8(40), tile[9:])


def _face(tile: Pixels, skin: tuple[int, int, int]) -> None:
    tile[_RADIUS < 5.6] = (20, 44, 90)
    tile[_RADIUS < 4.6] = skin
    tile[6:8, 5] = tile[6:8, 10] = (255, 255, 255)
    tile[10, 6:10] = (255, 255, 255)


def _ice(tile: Pixels) -> None:
    tile[:] = (206, 232, 244)
    tile[(_ROW + _COLUMN) % 11 == 4] = (224, 242, 250)
    tile[-1, :] = tile[:, -1] = (178, 212, 230)


def _hole(tile: Pixels) -> None:
    tile[_RADIUS < 6.6] = (120, 170, 200)
    tile[_RADIUS < 5.6] = (24, 52, 92)


def _flag(tile: Pixels) -> None:
    tile[2:15, 3:5] = (96, 70, 44)
    pennant = (_COLUMN >= 5) & (9 - 2 * abs(_ROW - 5.0) >= _COLUMN - 5) & (abs(_ROW - 5.0) < 4)
    tile[pennant] = (216, 54, 60)


_PAINTERS: dict[Sprite, Callable[[Pixels], None]] = {
    "floor": _floor,
    "wall": _wall,
    "target": _target,
    "box": _box,
    "box_home": _box_home,
    "player": _player,
    "player_down": _player_down,
    "ice": _ice,
    "hole": _hole,
    "flag": _flag,
}
