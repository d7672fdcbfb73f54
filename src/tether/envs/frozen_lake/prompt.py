"""What an agent is told about the lake: the task, the symbols, the example of a reply, and the paper's frame."""

from functools import lru_cache

from tether.core.grammar import ACTION_SEPARATOR
from tether.envs.base import ObservationMode
from tether.envs.frozen_lake import render
from tether.envs.frozen_lake.generator import Lake
from tether.envs.frozen_lake.solver import ACTIONS, shortest_walk, steps
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


@lru_cache(maxsize=256)  # every environment of a run shows the same ones
def worked(lake: Lake, mode: ObservationMode, num_actions: int) -> tuple[Example, ...]:
    """A lake from its start to the goal by a shortest walk on which no step slips, turn by turn."""
    player, goal = lake.tiles.index("S"), lake.tiles.index("G")
    walk = shortest_walk(lake.tiles, lake.size, player, goal)
    examples: list[Example] = []
    for done in range(0, len(walk), num_actions):
        state = render.state_text(lake, player, "coordinates" if mode == "image" else mode)
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
