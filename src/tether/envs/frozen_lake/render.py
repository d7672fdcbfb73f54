"""How a lake is shown: symbols, coordinates, or a picture. The start tile looks like any other ice."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from tether.envs.base import ObservationMode
from tether.envs.frozen_lake.generator import Lake
from tether.envs.grid_image import Sprite, draw_grid

SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
PLAYER_SYMBOLS = {"S": "P", "F": "P", "H": "X", "G": "√"}

_SPRITES: dict[str, tuple[Sprite, ...]] = {
    "_": ("ice",),
    "P": ("ice", "player"),
    "O": ("ice", "hole"),
    "G": ("ice", "flag"),
    "X": ("ice", "hole", "player_down"),
    "√": ("ice", "flag", "player"),
}


def grid_rows(lake: Lake, player: int) -> list[str]:
    return grid_text(lake, player).split("\n")


def grid_text(lake: Lake, player: int) -> str:
    empty = _empty_grid(lake.tiles, lake.size)
    at = player + player // lake.size  # a line break after each row
    return f"{empty[:at]}{PLAYER_SYMBOLS[lake.tiles[player]]}{empty[at + 1 :]}"


@lru_cache(maxsize=1024)
def _empty_grid(tiles: str, size: int) -> str:
    """The lake without the player; the same for all turns of an episode and all members of a group."""
    symbols = "".join(SYMBOLS[letter] for letter in tiles)
    return "\n".join(symbols[at : at + size] for at in range(0, len(symbols), size))


def coordinate_text(lake: Lake, player: int) -> str:
    """Board, goal, player and holes, one line each; a line that would be empty is left out."""
    standing = {"H": "Player in hole", "G": "Player on goal"}.get(lake.tiles[player], "Player")
    lines = [
        f"Board size: {lake.size} rows x {lake.size} cols (zero-indexed).",
        f"Goal: {_places([lake.tiles.index('G')], lake.size)}",
        f"{standing}: {_places([player], lake.size)}",
    ]
    holes = [tile for tile, letter in enumerate(lake.tiles) if letter == "H"]
    if holes:
        lines.append(f"Holes: {_places(holes, lake.size)}")
    return "\n".join(lines)


def state_text(lake: Lake, player: int, mode: ObservationMode) -> str:
    """The state in a mode; the picture's place is taken by the grid."""
    if mode == "coordinates":
        return coordinate_text(lake, player)
    grid = grid_text(lake, player)
    return f"Coordinates:\n{coordinate_text(lake, player)}\nGrid Map:\n{grid}" if mode == "grid_coordinates" else grid


def image(lake: Lake, player: int) -> npt.NDArray[np.uint8]:
    return draw_grid(grid_rows(lake, player), _SPRITES)


def _places(tiles: Iterable[int], size: int) -> str:
    return ", ".join(f"({tile // size}, {tile % size})" for tile in tiles)
