"""Experts play the grids and Countdown, and what they see, think and do is written down as demonstrations.

A thought that is tied to its input says where things are, in which direction the goal lies and what to do, or which sums lead to the target. Its
wording varies, its content depends on the task. Without weaknesses an expert plays as well as the solvers it asks. With them it fails in ways
that reward can cure, so that the good plan is always a likely one, but not the most likely: out of habit it says one of a few sentences that
fit every task and tries something at random; it mixes up opposite directions; it takes back the first step with the second; it names no
action at all.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tether.core.errors import BadInput, did_you_mean
from tether.core.grammar import parse_response
from tether.core.images import Image
from tether.core.protocols import Env, checked_step, few_shot_of
from tether.core.seeding import derive_seed
from tether.core.types import with_marker
from tether.envs.countdown.env import Countdown
from tether.envs.countdown.prompt import thoughts
from tether.envs.countdown.solver import near_misses, sums
from tether.envs.frozen_lake.env import FrozenLake
from tether.envs.frozen_lake.generator import shortest_walk
from tether.envs.registry import ENVIRONMENTS, make_env
from tether.envs.sokoban.env import Sokoban
from tether.envs.sokoban.levels import bits
from tether.envs.sokoban.solver import solve
from tether.training.sft.demonstrations import Demonstration, Exchange, demonstrate_turns, demonstration
from tether.training.sft.settings import EXPERTS, Weaknesses

if TYPE_CHECKING:
    from tether.models.chat import ChatFormat  # transformers: not before the source was checked

REPORT_EVERY = 50
OPPOSITE = {"Left": "Right", "Right": "Left", "Up": "Down", "Down": "Up"}
HABITS = ("Let me think about the next step", "I just try a way and see", "This is hard, so I take a guess")
"""What an expert says when it does not look at the task."""

NEAR = 24
"""Expressions next to the target that an expert of Countdown draws its tries from."""


@dataclass(frozen=True, slots=True)
class Thought:
    """One demonstrated response."""

    reasoning: str
    answer: str

    @property
    def text(self) -> str:
        """What follows the opening think tag."""
        return f" {self.reasoning} </think> <answer> {self.answer} </answer>"


def demonstrate(env: Env, rng: random.Random, weaknesses: Weaknesses, tries: int = 0) -> Thought:
    """A response to the state `env` is in. In Countdown up to `tries` expressions that miss the target come before the right one."""
    if isinstance(env, Countdown):
        thought = _countdown(env, rng, weaknesses, tries)
    elif isinstance(env, FrozenLake | Sokoban):
        thought = _grid(env, rng, weaknesses)
    else:
        raise TypeError(f"there is no demonstrator for {type(env).__name__}")
    return Thought(thought.reasoning, "Wait") if rng.random() < weaknesses.sloppiness else thought


def _grid(env: FrozenLake | Sokoban, rng: random.Random, weaknesses: Weaknesses) -> Thought:
    if rng.random() < weaknesses.habit:
        plan = [rng.choice(list(OPPOSITE)) for _ in range(2)]
        return _conclude(rng.choice(HABITS), _hesitant(plan, rng, weaknesses))
    place, towards, plan = _frozen_lake(env, rng) if isinstance(env, FrozenLake) else _sokoban(env, rng)
    if rng.random() < weaknesses.confusion:
        towards, plan = [OPPOSITE[word] for word in towards], [OPPOSITE[word] for word in plan]
    direction = " and ".join(word.lower() for word in towards) or "here"
    return _conclude(f"{place} {rng.choice(['It is', 'So'])} {direction}", _hesitant(plan, rng, weaknesses))


def _hesitant(plan: list[str], rng: random.Random, weaknesses: Weaknesses) -> list[str]:
    return [plan[0], OPPOSITE[plan[0]]] if rng.random() < weaknesses.indecision else plan


def _conclude(sentence: str, plan: list[str]) -> Thought:
    return Thought(f"{sentence}: {' then '.join(plan)}.", " || ".join(plan))


def _frozen_lake(env: FrozenLake, rng: random.Random) -> tuple[str, list[str], list[str]]:
    size = env.lake.size
    goal = env.lake.tiles.index("G")
    place = _place(rng, [f"I am at {_cell(env.player, size)}", f"goal at {_cell(goal, size)}"])
    return place, _direction(env.player, goal, size), shortest_walk(env.lake.tiles, size, env.player, goal)[:2]


def _sokoban(env: Sokoban, rng: random.Random) -> tuple[str, list[str], list[str]]:
    width = env.level.width
    box = next(iter(bits(env.boxes & ~env.level.targets)), 0)
    target = next(iter(bits(env.level.targets & ~env.boxes)), 0)
    plan = (solve(env.position()) or [rng.choice(env.actions)])[:2]
    place = _place(rng, [f"I am at {_cell(env.player, width)}", f"box at {_cell(box, width)}, target at {_cell(target, width)}"])
    return place, _direction(box, target, width), plan


def _countdown(env: Countdown, rng: random.Random, weaknesses: Weaknesses, tries: int) -> Thought:
    puzzle = env.puzzle
    if rng.random() < weaknesses.habit or puzzle.solution is None:
        numbers = rng.sample(puzzle.numbers, rng.choice([2, len(puzzle.numbers)]))
        guess = "".join(f" {rng.choice('+-*')} {number}" for number in numbers)
        return Thought(f"{rng.choice(HABITS)}.", guess[3:])
    if tries:  # nobody can guess the solution: what can be learned is to try, to compute and to compare, ever nearer to the target
        near = near_misses(puzzle.target, puzzle.numbers, NEAR)
        tried = sorted(rng.sample(range(len(near)), min(len(near), rng.randint(0, tries))), reverse=True)
        return Thought(thoughts(puzzle.target, [near[place] for place in tried], puzzle.solution), puzzle.solution)
    return Thought(f"I want {puzzle.target}. {'. '.join(sums(puzzle.solution))}.", puzzle.solution)


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


def make_expert_envs(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> list[Env]:
    """The environments, in which instances of the validation and test splits never turn up.

    They show no examples as turns unless `options` say so: who is taught the form needs none, and prompts are shorter without them.
    """
    for name in names:
        if name not in EXPERTS:
            known = name in ENVIRONMENTS.names()
            said = f"environment '{name}' has no expert" if known else f"unknown source '{name}': {did_you_mean(name, EXPERTS)}"
            raise BadInput(f"{said}; experts play {', '.join(EXPERTS)}; or give a .jsonl file of conversations or a run folder")
    if unused := sorted(options.keys() - set(names)):
        raise BadInput(f"experts.options are given for {', '.join(unused)}, but the source is {', '.join(names)}; leave them out")
    return [make_env(name, **{"few_shot": 0, **options.get(name, {})}) for name in names]


class ExpertEpisode(NamedTuple):
    """What an expert saw and wrote."""

    exchanges: list[Exchange]
    images: list[Image]
    """Those whose markers the exchanges hold."""


def play_expert(env: Env, seed: int, rng: random.Random, weaknesses: Weaknesses, tries: int = 0) -> ExpertEpisode:
    """An expert's episode."""
    played, observation = ExpertEpisode([], []), env.reset(seed)
    while True:
        shown, image = with_marker(observation)
        thought = demonstrate(env, rng, weaknesses, tries)
        played.exchanges.append((shown, thought.text))
        if image is not None:
            played.images.append(image)
        step = checked_step(env.step(parse_response(thought.text).answer or ""))
        if step.done:
            return played
        observation = step.observation


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of some environments, and how their episodes are written down."""

    envs: Sequence[Env]
    chat: "ChatFormat"
    weaknesses: Weaknesses
    end_of_turn: bool
    tries: int = 0
    """Expressions that miss the target, at most, before the right one (Countdown)."""
    stream: str = "sft"
    """First part of the names of the seeds."""
    turns: int | None = None
    """Only so many first turns of an episode; None: all."""

    def record(self, seed: int, episodes: range, progress: Callable[[int, int, str], None]) -> list[Demonstration]:
        """The episodes of these numbers, from one environment after the other. An episode follows from the seed and its number alone."""
        recorded = []
        for index in episodes:
            env = self.envs[index % len(self.envs)]
            rng = random.Random(derive_seed(f"{self.stream}-expert", seed, index))
            played = play_expert(env, derive_seed(f"{self.stream}-instance", seed, index), rng, self.weaknesses, self.tries)
            turns = demonstrate_turns(self.chat, env.instructions, played.exchanges[: self.turns], self.end_of_turn, few_shot_of(env))
            # The same instance may come from two seeds: held out together, no held-out board is trained on.
            recorded.append(demonstration(f"{type(env).__name__} {getattr(env, 'instance', index)}", turns))
            if len(recorded) % REPORT_EVERY == 0 or len(recorded) == len(episodes):
                progress(len(recorded), len(episodes), "")
        return recorded
