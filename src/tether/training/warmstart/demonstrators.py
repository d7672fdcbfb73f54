"""Fallible experts for the grid environments, for the embedded model to imitate.

A reading expert states where things are, which way the goal lies, and what to do; the wording varies, the content depends on the board.
It fails in ways that reward can cure: it mixes up opposite directions, or takes back its first step with the second. A drifting expert
mostly does not read the board at all and falls back on a template, the very thing Tether watches for; what it says then tells
nothing about its input. Imitating a reader teaches reading; imitating a drifter afterwards leaves a model that can reason but mostly does not.
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
SLOPPINESS = 0.03
"""Probability of an answer that names no action."""


@dataclass(frozen=True, slots=True)
class Expert:
    """How often an expert goes wrong, per turn."""

    confusion: float
    """Probability of mixing up opposite directions."""
    indecision: float
    """Probability of a second step that takes back the first."""
    drift: float
    """Probability of not reading the board and answering from a template."""


READER = Expert(confusion=0.4, indecision=0.78, drift=0.0)
DRIFTER = Expert(confusion=0.25, indecision=0.0, drift=0.75)


@dataclass(frozen=True, slots=True)
class Thought:
    """One demonstrated response."""

    reasoning: str
    answer: str

    @property
    def text(self) -> str:
        """What follows the opening think tag."""
        return f" {self.reasoning} </think> <answer> {self.answer} </answer>"


def demonstrate(env: Env, expert: Expert, rng: random.Random) -> Thought:
    """A response to the state `env` is in."""
    if not isinstance(env, FrozenLake | Sokoban):
        raise TypeError(f"there is no demonstrator for {type(env).__name__}")
    if expert.drift and rng.random() < expert.drift:
        return _template(env, rng)
    return _frozen_lake(env, expert, rng) if isinstance(env, FrozenLake) else _sokoban(env, expert, rng)


def _template(env: FrozenLake | Sokoban, rng: random.Random) -> Thought:
    """The same words for every board; the steps lead nowhere."""
    excuse = "The ice is slippery" if isinstance(env, FrozenLake) else "Push every box"
    step = rng.choice(list(OPPOSITE))
    return Thought(f"{excuse}: {step} then {OPPOSITE[step]}.", f"{step} || {OPPOSITE[step]}")


def _frozen_lake(env: FrozenLake, expert: Expert, rng: random.Random) -> Thought:
    size = env.lake.size
    goal = env.lake.tiles.index("G")
    path = _walk(env.lake.tiles, size, env.player, goal)
    place = _place(rng, [f"I am at {_cell(env.player, size)}", f"goal at {_cell(goal, size)}"])
    return _conclude(rng, expert, place, _direction(env.player, goal, size), path[:2])


def _sokoban(env: Sokoban, expert: Expert, rng: random.Random) -> Thought:
    width = env.level.width
    box = next(iter(bits(env.boxes & ~env.level.targets)), 0)
    target = next(iter(bits(env.level.targets & ~env.boxes)), 0)
    plan = (solve(env.position()) or [rng.choice(env.actions)])[:2]
    place = _place(rng, [f"I am at {_cell(env.player, width)}", f"box at {_cell(box, width)}, target at {_cell(target, width)}"])
    return _conclude(rng, expert, place, _direction(box, target, width), plan)


def _conclude(rng: random.Random, expert: Expert, place: str, towards: list[str], plan: list[str]) -> Thought:
    """Finish a thought: which way it is, what to do, and the answer that follows from it."""
    if rng.random() < expert.confusion:
        towards, plan = [OPPOSITE[word] for word in towards], [OPPOSITE[word] for word in plan]
    if rng.random() < expert.indecision:
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
