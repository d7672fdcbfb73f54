"""What an agent is told about the lake: the task, the symbols, the example of a reply, and the paper's frame."""

from tether.core.grammar import ACTION_SEPARATOR
from tether.envs.base import ObservationMode
from tether.envs.frozen_lake import render
from tether.envs.frozen_lake.generator import Lake
from tether.envs.frozen_lake.solver import ACTIONS, shortest_walk
from tether.envs.wording import Example, in_papers_frame, way

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


def paper(slip: float, max_actions: int) -> str:
    return in_papers_frame(_PAPER.format(slippery=_PAPER_SLIPPERY if slip > 0 else ""), _PAPER_SYMBOLS, ACTIONS, max_actions)


def worked(lake: Lake, mode: ObservationMode, num_actions: int) -> Example:
    """A lake at its start, with the first steps of a shortest walk."""
    start, goal = lake.tiles.index("S"), lake.tiles.index("G")
    state = render.state_text(lake, start, "coordinates" if mode == "image" else mode)
    plan = shortest_walk(lake.tiles, lake.size, start, goal)[:num_actions]
    (row, column), (goal_row, goal_column) = divmod(start, lake.size), divmod(goal, lake.size)
    reasoning = (
        f"I am at row {row}, column {column}. The goal is at row {goal_row}, column {goal_column}: "
        f"{way(goal_row - row, goal_column - column)}. {_around(lake, start, goal, plan)}"
    )
    return Example(state, reasoning, f" {ACTION_SEPARATOR} ".join(plan), instance=lake.fingerprint)


def _around(lake: Lake, start: int, goal: int, plan: list[str]) -> str:
    """Which way to go, and whether a hole forces a detour."""
    steps = len(shortest_walk(lake.tiles, lake.size, start, goal))
    (row, column), (goal_row, goal_column) = divmod(start, lake.size), divmod(goal, lake.size)
    detour = steps > abs(goal_row - row) + abs(goal_column - column)
    return f"{'Holes are in the way, so I go around: ' if detour else 'So I go '}{', then '.join(word.lower() for word in plan)}."
