"""How a Sokoban position is shown: symbols, coordinates, or a picture."""

import numpy as np
import numpy.typing as npt

from tether.envs.base import ObservationMode
from tether.envs.grid_image import Sprite, draw_grid
from tether.envs.sokoban.levels import Level, bits, border

_SPRITES: dict[str, tuple[Sprite, ...]] = {
    "#": ("wall",),
    "_": ("floor",),
    "O": ("floor", "target"),
    "X": ("floor", "box"),
    "√": ("floor", "box_home"),
    "P": ("floor", "player"),
    "S": ("floor", "target", "player"),
}


def grid_rows(level: Level, boxes: int, player: int) -> list[str]:
    """The position (boxes and player as they are now) over the level's walls and targets."""
    symbols = ["_"] * (level.height * level.width)
    for cell in bits(level.walls):
        symbols[cell] = "#"
    for cell in bits(level.targets):
        symbols[cell] = "O"
    for cell in bits(boxes):
        symbols[cell] = "√" if level.targets >> cell & 1 else "X"
    symbols[player] = "S" if level.targets >> player & 1 else "P"
    flat = "".join(symbols)
    return [flat[at : at + level.width] for at in range(0, len(flat), level.width)]


def grid_text(level: Level, boxes: int, player: int) -> str:
    return "\n".join(grid_rows(level, boxes, player))


def coordinate_text(level: Level, boxes: int, player: int, walls: bool) -> str:
    """Every object once, by what the grid would show in its place; `walls` adds those inside the outer ring."""
    standing = 1 << player
    on_target = "Player on target" if level.targets & standing else "Player"
    lines = [
        ("Targets", level.targets & ~boxes & ~standing),
        ("Boxes", boxes & ~level.targets),
        ("Boxes on target", boxes & level.targets),
        (on_target, standing),
        ("Inner walls", level.walls & ~border(level.height, level.width) if walls else 0),
    ]
    size = f"Board size: {level.height} rows x {level.width} cols (zero-indexed)."
    return "\n".join([size, *(f"{what}: {_places(cells, level.width)}" for what, cells in lines if cells)])


def state_text(level: Level, boxes: int, player: int, mode: ObservationMode) -> str:
    """The position in a mode; the picture's place is taken by the grid. Without a grid, the coordinates list the inner walls too."""
    if mode == "coordinates":
        return coordinate_text(level, boxes, player, walls=True)
    grid = grid_text(level, boxes, player)
    if mode == "grid_coordinates":
        return f"Coordinates:\n{coordinate_text(level, boxes, player, walls=False)}\nGrid Map:\n{grid}"
    return grid


def image(level: Level, boxes: int, player: int) -> npt.NDArray[np.uint8]:
    return draw_grid(grid_rows(level, boxes, player), _SPRITES)


def _places(cells: int, width: int) -> str:
    return ", ".join(f"({cell // width}, {cell % width})" for cell in bits(cells))
