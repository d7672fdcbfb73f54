"""Fallible experts for the grid environments: they read the board correctly, reason in a sentence or two, and are often wrong.

Each thought states where things are, where the goal lies from there, and what to do. Its wording varies from turn to turn, its content
depends on the board. With probability `confusion` the expert mixes up opposite directions in the conclusion, so the imitator has
something to learn from reward: the right conclusion is always a likely one, but not the most likely.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from tether.core.protocols import Env
from tether.envs.frozen_lake.env import FrozenLake
from tether.envs.sokoban.env import Sokoban
from tether.envs.sokoban.levels import bits
from tether.envs.sokoban.solver import solve

OPPOSITE = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
FROZEN_LAKE_CONFUSION = 0.62
SOKOBAN_CONFUSION = 0.6
SLOPPINESS = 0.03
"""Probability of an answer that names no action."""


@dataclass(frozen=True, slots=True)
class Thought:
    """One demonstrated response."""

    reasoning: str
    answer: str

    @property
    def text(self) -> str:
        """What follows the opening think tag."""
        return f" {self.reasoning} </think> <answer> {self.answer} </answer>"


def demonstrate(env: Env, rng: random.Random) -> Thought:
    """A response to the state `env` is in."""
    if isinstance(env, FrozenLake):
        return _frozen_lake(env, rng)
    if isinstance(env, Sokoban):
        return _sokoban(env, rng)
    raise TypeError(f"there is no demonstrator for {type(env).__name__}")


def _frozen_lake(env: FrozenLake, rng: random.Random) -> Thought:
    size = env.lake.size
    goal = env.lake.tiles.index("G")
    path = _walk(env.lake.tiles, size, env.player, goal)
    plan = path[: 2 if rng.random() < 0.85 else 1]
    place = _place(rng, [("I am at", "me", _cell(env.player, size)), ("goal at", "goal", _cell(goal, size))])
    return _conclude(rng, place, _direction(env.player, goal, size), plan, FROZEN_LAKE_CONFUSION)


def _sokoban(env: Sokoban, rng: random.Random) -> Thought:
    width = env.level.width
    box = next(iter(bits(env.boxes & ~env.level.targets)), 0)
    target = next(iter(bits(env.level.targets & ~env.boxes)), 0)
    plan = (solve(env.position()) or [rng.choice(env.actions)])[:2]
    things = [("I am at", "me", _cell(env.player, width)), ("box at", "box", _cell(box, width)), ("target at", "target", _cell(target, width))]
    return _conclude(rng, _place(rng, things), _direction(box, target, width), plan, SOKOBAN_CONFUSION)


def _conclude(rng: random.Random, place: str, towards: list[str], plan: list[str], confusion: float) -> Thought:
    """Finish a thought: which way it is, what to do, and the answer that follows from it."""
    if rng.random() < confusion:
        towards, plan = [OPPOSITE[word] for word in towards], [OPPOSITE[word] for word in plan]
    way = " and ".join(word.lower() for word in towards) or "here"
    steps = " then ".join(plan)
    sentence = rng.choice([f"It is {way}.", f"That is {way}.", f"So {way}."])
    action = rng.choice([f"Go {steps}.", f"Try {steps}.", f"Plan {steps}."])
    answer = "Wait" if rng.random() < SLOPPINESS else " || ".join(plan)
    return Thought(f"{place} {sentence} {action}", answer)


def _place(rng: random.Random, things: list[tuple[str, str, str]]) -> str:
    """Where things are, in long or short words, in any order."""
    things = rng.sample(things, len(things))
    long = rng.random() < 0.5
    text = ", ".join(f"{words if long else word} {cell}" for words, word, cell in things)
    return f"{text[0].upper()}{text[1:]}."


def _cell(cell: int, width: int) -> str:
    row, column = divmod(cell, width)
    return f"({row},{column})"


def _direction(start: int, end: int, width: int) -> list[str]:
    """The directions that lead from one cell to another, vertical first."""
    down, right = end // width - start // width, end % width - start % width
    words = ["Down" if down > 0 else "Up"] * bool(down) + ["Right" if right > 0 else "Left"] * bool(right)
    return words


def _walk(tiles: str, size: int, start: int, goal: int) -> list[str]:
    """Shortest way over the ice, by breadth-first search."""
    moves: dict[str, Callable[[int, int], int | None]] = {
        "Left": lambda row, column: row * size + column - 1 if column else None,
        "Down": lambda row, column: (row + 1) * size + column if row + 1 < size else None,
        "Right": lambda row, column: row * size + column + 1 if column + 1 < size else None,
        "Up": lambda row, column: (row - 1) * size + column if row else None,
    }
    ways: dict[int, list[str]] = {start: []}
    queue = deque([start])
    while queue and goal not in ways:
        cell = queue.popleft()
        for word, move in moves.items():
            after = move(*divmod(cell, size))
            if after is not None and after not in ways and tiles[after] != "H":
                ways[after] = [*ways[cell], word]
                queue.append(after)
    return ways[goal]
