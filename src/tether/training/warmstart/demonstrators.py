"""Fallible experts for the grid environments: they read the board correctly, reason in a sentence, and are often wrong.

Each thought states where things are, which way the goal lies, and what to do. Its wording varies from turn to turn, its content
depends on the board. The experts fail in two ways that reward can cure: they are often confused (mix up opposite directions) and mostly
undecided (take back the first step with the second), so the good plan is always a likely one, but not the most likely.
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
CONFUSION = 0.4
"""Probability of mixing up opposite directions."""
INDECISION = 0.78
"""Probability of a second step that takes back the first."""
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
    place = _place(rng, [f"I am at {_cell(env.player, size)}", f"goal at {_cell(goal, size)}"])
    return _conclude(rng, place, _direction(env.player, goal, size), path[:2])


def _sokoban(env: Sokoban, rng: random.Random) -> Thought:
    width = env.level.width
    box = next(iter(bits(env.boxes & ~env.level.targets)), 0)
    target = next(iter(bits(env.level.targets & ~env.boxes)), 0)
    plan = (solve(env.position()) or [rng.choice(env.actions)])[:2]
    place = _place(rng, [f"I am at {_cell(env.player, width)}", f"box at {_cell(box, width)}, target at {_cell(target, width)}"])
    return _conclude(rng, place, _direction(box, target, width), plan)


def _conclude(rng: random.Random, place: str, towards: list[str], plan: list[str]) -> Thought:
    """Finish a thought: which way it is, what to do, and the answer that follows from it."""
    if rng.random() < CONFUSION:
        towards, plan = [OPPOSITE[word] for word in towards], [OPPOSITE[word] for word in plan]
    if rng.random() < INDECISION:
        plan = [plan[0], OPPOSITE[plan[0]]]
    way = " and ".join(word.lower() for word in towards) or "here"
    sentence = rng.choice([f"It is {way}", f"So {way}"])
    answer = "Wait" if rng.random() < SLOPPINESS else " || ".join(plan)
    return Thought(f"{place} {sentence}: {' then '.join(plan)}.", answer)


def _place(rng: random.Random, things: list[str]) -> str:
    """Where things are, in any order."""
    text = ", ".join(rng.sample(things, len(things)))
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
