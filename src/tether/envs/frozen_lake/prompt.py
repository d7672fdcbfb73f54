"""What an agent is told and shown of the lake: symbols, coordinates or a picture; the task, worked examples, and the paper's frame."""

from collections.abc import Iterable
from functools import lru_cache

from tether.core.grammar import ACTION_SEPARATOR
from tether.envs.base import ObservationMode
from tether.envs.frozen_lake.generator import ACTIONS, Lake, shortest_walk, steps
from tether.envs.grid_image import Tiles
from tether.envs.wording import Example, in_papers_frame, in_words, way

SYMBOLS = {"S": "_", "F": "_", "H": "O", "G": "G"}
PLAYER_SYMBOLS = {"S": "P", "F": "P", "H": "X", "G": "√"}

TILES: Tiles = {
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
    """The state in a mode. In the place of a picture, for examples: what it would show, in words."""
    if mode == "image":
        return in_words(coordinate_text(lake, player))
    if mode == "coordinates":
        return coordinate_text(lake, player)
    grid = grid_text(lake, player)
    return f"Coordinates:\n{coordinate_text(lake, player)}\nGrid Map:\n{grid}" if mode == "grid_coordinates" else grid


def _places(tiles: Iterable[int], size: int) -> str:
    return ", ".join(f"({tile // size}, {tile % size})" for tile in tiles)


TASK = "Walk over the frozen lake to the goal; a hole ends the game."
SLIPPERY = " The ice is slippery: a step may go sideways."
LEGEND = "P you, _ ice, O hole, G goal"
"""X (you in a hole) and √ (you on the goal) only occur once the episode is over."""

EXAMPLE_LAKES = (Lake.of(["FSF", "HFF", "FGF"]), Lake.of(["FFG", "FHF", "FFS"]))
"""The example shows the first of them that is not the lake being played."""

_PAPER = (
    "You are solving the FrozenLake puzzle: avoid the holes and go to the target.{slippery} "
    "Example answer format: <think> To avoid the hole and reach the target, I should go left, then up. </think> <answer> Left || Up </answer>"
)
_PAPER_SLIPPERY = " You may move in an unintended direction because the ice is slippery."
_PAPER_SYMBOLS = "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal"


def task(slip: float) -> str:
    return f"{TASK}{SLIPPERY}" if slip > 0 else TASK


def paper(slip: float, max_actions: int, mode: ObservationMode) -> str:
    symbols = "" if mode == "image" else _PAPER_SYMBOLS
    return in_papers_frame(_PAPER.format(slippery=_PAPER_SLIPPERY if slip > 0 else ""), symbols, ACTIONS, max_actions)


@lru_cache(maxsize=256)  # every environment of a run shows the same ones
def worked(lake: Lake, mode: ObservationMode, num_actions: int) -> tuple[Example, ...]:
    """A lake from its start to the goal by a shortest walk on which no step slips, turn by turn."""
    player, goal = lake.tiles.index("S"), lake.tiles.index("G")
    walk = shortest_walk(lake.tiles, lake.size, player, goal)
    examples: list[Example] = []
    for done in range(0, len(walk), num_actions):
        state = state_text(lake, player, mode)
        plan = walk[done : done + num_actions]
        reasoning = _reasoning(lake.size, player, goal, len(walk) - done, plan)
        answer = f" {ACTION_SEPARATOR} ".join(plan)
        examples.append(Example(state, reasoning, answer, instance=lake.fingerprint, turn=len(examples) + 1))
        for action in plan:
            player = dict(steps(player, lake.size))[action]
    return tuple(examples)


def _reasoning(size: int, player: int, goal: int, steps_left: int, plan: list[str]) -> str:
    """Where things are, which way to go, and whether a hole forces a detour."""
    (row, column), (goal_row, goal_column) = divmod(player, size), divmod(goal, size)
    detour = steps_left > abs(goal_row - row) + abs(goal_column - column)
    return (
        f"I am at row {row}, column {column}. The goal is at row {goal_row}, column {goal_column}: {way(goal_row - row, goal_column - column)}. "
        f"{'Holes are in the way, so I go around: ' if detour else 'So I go '}{', then '.join(word.lower() for word in plan)}."
    )
