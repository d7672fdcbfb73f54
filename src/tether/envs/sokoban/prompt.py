"""What an agent is told about Sokoban: the task, the symbols, the example of a reply, and the paper's frame."""

from tether.core.grammar import ACTION_SEPARATOR
from tether.envs.base import ObservationMode
from tether.envs.sokoban import render
from tether.envs.sokoban.levels import Level, bits
from tether.envs.sokoban.solver import ACTIONS, SearchLimit, solve
from tether.envs.wording import Example, in_papers_frame, way

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


def paper(max_actions: int) -> str:
    return in_papers_frame(_PAPER, _PAPER_SYMBOLS, ACTIONS, max_actions)


def worked(level: Level, mode: ObservationMode, num_actions: int) -> Example | None:
    """A level at its start, with the first actions of a shortest solution; None where none was found within the limit."""
    try:
        plan = solve(level, MAX_NODES)
    except SearchLimit:
        return None
    if not plan:
        return None
    state = render.state_text(level, level.boxes, level.player, "coordinates" if mode == "image" else mode)
    box, target = _first(level.boxes & ~level.targets), _first(level.targets & ~level.boxes)
    (row, column), (target_row, target_column) = divmod(box, level.width), divmod(target, level.width)
    reasoning = (
        f"I am at {_place(level.player, level)}, the box is at {_place(box, level)}, the target at {_place(target, level)}: "
        f"the box has to go {way(target_row - row, target_column - column)}. So I go {', then '.join(map(str.lower, plan[:num_actions]))}."
    )
    return Example(state, reasoning, f" {ACTION_SEPARATOR} ".join(plan[:num_actions]), instance=level.fingerprint)


def _first(cells: int) -> int:
    return next(iter(bits(cells)))


def _place(cell: int, level: Level) -> str:
    row, column = divmod(cell, level.width)
    return f"row {row}, column {column}"
