"""Pictures of grid worlds: 16-pixel tiles made of layered sprites, drawn with numpy alone.

A symbol of the grid is a stack of sprites (floor first) from data/sprites.toml. Finished tiles are kept, so a picture is one table look-up and
one reshuffle of axes.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from tether.envs.dataset import read_packaged

TILE = 16

Pixels = npt.NDArray[np.uint8]
Sprite = Literal["floor", "wall", "target", "box", "box_home", "player", "player_down", "ice", "hole", "flag"]


def draw_grid(rows: Sequence[str], sprites: Mapping[str, tuple[Sprite, ...]]) -> Pixels:
    """The picture of a grid of symbols, [16 * rows, 16 * columns, 3]."""
    tiles = np.stack([np.stack([_tile(sprites[symbol]) for symbol in row]) for row in rows])
    height, width = tiles.shape[:2]
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3, 4)).reshape(height * TILE, width * TILE, 3)


@lru_cache(maxsize=256)
def _tile(layers: tuple[Sprite, ...]) -> Pixels:
    tile = np.zeros((TILE, TILE, 3), np.uint8)
    for layer in layers:
        sprite = read_packaged("tether.envs", "sprites.toml")[layer]
        pixels = np.array([list(row) for row in sprite["pixels"].split()])
        for ink, colour in sprite["inks"].items():
            tile[pixels == ink] = colour
    return tile
