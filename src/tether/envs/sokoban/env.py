"""Sokoban as a turn-based task in words: moves and pushes on integers, levels by seed, gym-sokoban's rewards.

Moving into a box pushes it if the cell behind is free; two boxes in a row never move. The level is solved when every target holds a
box. There is no randomness in an episode: `env_seed` changes nothing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from tether.core.enums import Split
from tether.core.images import Pixels
from tether.envs.base import ActionEnv
from tether.envs.dataset import Row
from tether.envs.grid_image import PictureOptions, Tiles
from tether.envs.sokoban import prompt
from tether.envs.sokoban.generator import Generator, ReversePlay, push_distance
from tether.envs.sokoban.levels import Level, file_levels, level_rows, move, read_level
from tether.envs.sokoban.solver import ACTIONS, action_budget, warn_if_short
from tether.envs.wording import Example, draw_examples

Reward = Callable[[int, int, bool], float]
"""From the boxes on targets before and after the action, and whether the level is solved now, to the reward."""


@dataclass(frozen=True, slots=True)
class PushReward:
    """A small cost per action, a unit for a box brought onto or off a target, a prize at the end.

    A level with one box that is solved in n actions, the box reaching the target once, pays 11 - 0.1 n in all.
    """

    step: float = -0.1
    box_on: float = 1.0
    box_off: float = -1.0
    solved: float = 10.0

    def __call__(self, before: int, after: int, solved: bool) -> float:
        change = self.box_on if after > before else self.box_off if after < before else 0.0
        return self.step + change + (self.solved if solved else 0.0)


class SokobanOptions(PictureOptions):
    """Options of sokoban."""

    tiles: ClassVar[Tiles] = prompt.TILES

    height: int = Field(default=6, ge=5, le=30)
    """Rows, outer walls included."""
    width: int = Field(default=6, ge=5, le=30)
    """Columns, outer walls included."""
    boxes: int = Field(default=1, ge=1)
    min_pushes: int | None = Field(default=None, ge=1)
    """Every generated level takes at least so many pushes; by default 1, with more boxes than one up to 6 as the board allows."""
    max_pushes: int | None = Field(default=None, ge=1)
    """How far the generator pulls the boxes away, in all; by default 4 for one box, 6 for each of several."""
    max_moves: int | None = Field(default=None, ge=1)
    """Every generated level can be solved in so many actions; by default height + width - 2 for one box (10 on 6 x 6), 30 for each of
    several."""
    levels: Path | None = None
    """An XSB or Boxoban file, or a folder of them, to take levels from instead of generating them. max_turns then fits the levels by default."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        interior = (self.height - 2) * (self.width - 2)
        room = interior // 4
        if self.levels is None and self.boxes > room:
            raise ValueError(f"boxes: got {self.boxes} for {self.height} x {self.width}; use at most {room} or a larger board")
        if self.levels is None and self.push_floor > self._farthest:
            raise ValueError(f"min_pushes: got {self.push_floor}, this board allows {self._farthest}; use fewer or a larger board")
        if self.push_floor > min(self.push_limit, self.move_limit):
            low = "max_pushes" if self.push_limit < self.push_floor else "max_moves"
            raise ValueError(f"min_pushes: got {self.push_floor}, above {low} {min(self.push_limit, self.move_limit)}; raise {low}")
        return self

    @property
    def _farthest(self) -> int:
        """Pushes that this board has room for: pulling takes the player one cell further than the box."""
        return (self.height + self.width - 8) * self.boxes

    @property
    def push_floor(self) -> int:
        """min_pushes, with its default filled in: few random levels are far from solved, so several boxes ask for it."""
        limits = (limit for limit in (self.max_pushes, self.max_moves) if limit is not None)
        default = 1 if self.boxes == 1 else max(1, min(6, self._farthest * 3 // 8, *limits))
        return self.min_pushes or default

    @property
    def push_limit(self) -> int:
        """max_pushes, with its default filled in."""
        return self.max_pushes or max(4 if self.boxes == 1 else 6 * self.boxes, self.push_floor)

    @property
    def move_limit(self) -> int:
        """max_moves, with its default filled in."""
        return self.max_moves or max(self.height + self.width - 2 if self.boxes == 1 else 30 * self.boxes, 2 * self.push_floor)


class Sokoban(ActionEnv[SokobanOptions]):
    """Push every box onto a target."""

    name = "sokoban"
    actions = ACTIONS
    Options = SokobanOptions
    default_few_shot = 3
    metrics = ("boxes_on_target",)
    task, symbols = prompt.TASK, prompt.LEGEND
    read_row = staticmethod(read_level)

    def __init__(self, options: SokobanOptions | None = None, *, generator: Generator | None = None, reward: Reward | None = None) -> None:
        options = options or SokobanOptions()
        self._make: Generator = generator or _generator(options)
        super().__init__(options if generator else _with_fitting_turns(options))
        self._pay: Reward = reward or PushReward()

    @classmethod
    def data_rows(cls, source: str) -> Iterator[Row]:
        """The boards of a levels file or folder, for the check of data files."""
        return level_rows(Path(source).expanduser())

    def generate(self, seed: int) -> None:
        self.level: Level = self._make(seed, self.options.split)
        self.boxes, self.player = self.level.boxes, self.level.player

    def act(self, index: int) -> tuple[float, bool, bool]:
        before = self._boxes_on_target()
        self.boxes, self.player = move(self.level.walls, self.boxes, self.player, self.level.deltas[index])
        solved = not self.level.targets & ~self.boxes
        return self._pay(before, self._boxes_on_target(), solved), solved, solved

    def _boxes_on_target(self) -> int:
        return (self.boxes & self.level.targets).bit_count()

    def position(self) -> Level:
        """The position as it is now, as a level of its own (for the solver)."""
        level = self.level
        return Level(level.height, level.width, level.walls, level.targets, self.boxes, self.player)

    def turn_info(self) -> dict[str, Any]:
        return {"player": divmod(self.player, self.level.width), "boxes_on_target": self._boxes_on_target()}

    @property
    def reward_range(self) -> tuple[float, float]:
        if not isinstance(self._pay, PushReward):
            return super().reward_range
        actions, pay = self.options.actions_per_turn, self._pay
        return actions * (pay.step + pay.box_off), actions * (pay.step + pay.box_on) + pay.solved

    @property
    def instance(self) -> str:
        return self.level.fingerprint

    @property
    def categories(self) -> Mapping[str, str]:
        """The boxes of a level from a file; generated levels all have the same number."""
        return {} if self.options.levels is None else {"boxes": str(self.level.boxes.bit_count())}

    @property
    def parameters(self) -> Mapping[str, str]:
        level = self.level
        pushes = push_distance(level.boxes, level.targets, level.width)
        return {"size": f"{level.height} x {level.width}", "boxes": str(level.boxes.bit_count()), "pushes": str(pushes)}

    def state_text(self) -> str:
        return prompt.state_text(self.level, self.boxes, self.player, self.options.observation)

    def state_image(self) -> Pixels:
        return self.options.draw(prompt.grid_rows(self.level, self.boxes, self.player))

    @property
    def example(self) -> Example:
        return self.other_example([self._worked_game(level)[0] for level in prompt.EXAMPLE_LEVELS])

    @property
    def paper(self) -> str:
        return prompt.paper(self.max_turns * self.options.actions_per_turn, self.options.observation)

    def worked_examples(self, count: int) -> list[Example]:
        return draw_examples(count, lambda seed: self._worked_game(self._make(seed, Split.TRAIN)))

    def _worked_game(self, level: Level) -> tuple[Example, ...]:
        return prompt.worked(level, self.options.observation, self.options.actions_per_turn)


def _with_fitting_turns(options: SokobanOptions) -> SokobanOptions:
    """The options with turns that suffice for the levels of a file, unless the user has chosen another number."""
    if options.levels is None:
        return options
    if "max_turns" in options.model_fields_set:
        warn_if_short(options.levels, options.max_turns, options.actions_per_turn)
        return options
    turns = -(-action_budget(options.levels).enough // options.actions_per_turn)
    return options.model_copy(update={"max_turns": max(options.max_turns, turns)})


def _generator(options: SokobanOptions) -> Generator:
    if options.levels is not None:
        return file_levels(options.levels)
    return ReversePlay(options.height, options.width, options.boxes, options.push_floor, options.push_limit, options.move_limit)
