"""What an agent is told and shown of Sokoban: symbols, coordinates or a picture; the task, worked examples, and the paper's frame."""

from functools import lru_cache

from tether.core.grammar import ACTION_SEPARATOR
from tether.envs.base import ObservationMode
from tether.envs.grid_image import Tiles
from tether.envs.sokoban.levels import Level, bits, border, move
from tether.envs.sokoban.solver import ACTIONS, SearchLimit, solve
from tether.envs.wording import Example, in_papers_frame, in_words, way

TILES: Tiles = {
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
    """The position in a mode. Without a grid, the coordinates list the inner walls too. In the place of a picture, for examples: what it
    would show, in words."""
    if mode in ("coordinates", "image"):
        listed = coordinate_text(level, boxes, player, walls=True)
        return in_words(listed) if mode == "image" else listed
    grid = grid_text(level, boxes, player)
    if mode == "grid_coordinates":
        return f"Coordinates:\n{coordinate_text(level, boxes, player, walls=False)}\nGrid Map:\n{grid}"
    return grid


def _places(cells: int, width: int) -> str:
    return ", ".join(f"({cell // width}, {cell % width})" for cell in bits(cells))


TASK = "Push every box onto a target. You cannot pull, and cannot push two boxes at once or a box into a wall."
LEGEND = "# wall, _ floor, O target, X box, √ box on target, P you, S you on a target"

EXAMPLE_LEVELS = (
    Level.of(["######", "#    #", "#@$ .#", "######"]),
    Level.of(["#####", "# . #", "#   #", "# $ #", "# @ #", "#####"]),
)
"""The example shows the first of them that is not the level being played."""

MAX_NODES = 20_000
"""Nodes that solving a worked example may take; a harder level is passed over."""

_PAPER = (
    "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets. When you are next to a box, you can push "
    "it by moving towards it. You cannot push a box through a wall, and you cannot pull a box. "
    "The answer should be a sequence of actions, like <answer>Right || Right || Up</answer>"
)
_PAPER_SYMBOLS = "#: wall, _: empty, O: target, √: box on target, X: box, P: player, S: player on target"


def paper(max_actions: int, mode: ObservationMode) -> str:
    return in_papers_frame(_PAPER, "" if mode == "image" else _PAPER_SYMBOLS, ACTIONS, max_actions)


@lru_cache(maxsize=256)  # every environment of a run shows the same ones
def worked(level: Level, mode: ObservationMode, num_actions: int) -> tuple[Example, ...]:
    """A level from its start to a shortest solution, turn by turn; empty where none was found within the limit."""
    try:
        solution = solve(level, MAX_NODES) or []
    except SearchLimit:
        return ()
    boxes, player = level.boxes, level.player
    examples: list[Example] = []
    for done in range(0, len(solution), num_actions):
        plan = solution[done : done + num_actions]
        state = state_text(level, boxes, player, mode)
        answer = f" {ACTION_SEPARATOR} ".join(plan)
        reasoning = _reasoning(level, boxes, player, plan)
        examples.append(Example(state, reasoning, answer, instance=level.fingerprint, turn=len(examples) + 1))
        for action in plan:
            boxes, player = move(level.walls, boxes, player, level.deltas[ACTIONS.index(action)])
    return tuple(examples)


def _reasoning(level: Level, boxes: int, player: int, plan: list[str]) -> str:
    """Where things are, which way a box has to go, and what to do."""
    box, target = _first(boxes & ~level.targets), _first(level.targets & ~boxes)
    (row, column), (target_row, target_column) = divmod(box, level.width), divmod(target, level.width)
    return (
        f"I am at {_place(player, level)}, the box is at {_place(box, level)}, the target at {_place(target, level)}: "
        f"the box has to go {way(target_row - row, target_column - column)}. So I go {', then '.join(map(str.lower, plan))}."
    )


def _first(cells: int) -> int:
    return next(iter(bits(cells)))


def _place(cell: int, level: Level) -> str:
    row, column = divmod(cell, level.width)
    return f"row {row}, column {column}"
