"""What environments with named actions share: turns, parsing, the budget of actions, and the words around the state.

A subclass supplies the action names, an instance (`_generate`), the effect of one action (`_act`) and its looks (`state_text`,
`state_image`); this class makes an Env of them. One answer is one turn: its legal actions are executed in order, at most
`actions_per_turn` of them (the surplus is cut without penalty), until the episode is over. Running out of turns ends the episode
as `truncated`, which is never the same as failing.
"""

import operator
from abc import ABC, abstractmethod
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tether.core.config import Settings
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.grammar import ACTION_SEPARATOR, FORMAT_RULE, match_actions
from tether.core.seeding import derive_seed
from tether.core.types import Observation, Step

ObservationMode = Literal["grid", "coordinates", "grid_coordinates", "image"]

NOTHING_EXECUTED = "No valid action was given; the state has not changed."


class ActionOptions(Settings):
    """Options of every environment with named actions."""

    observation: ObservationMode = "grid"
    max_turns: int = Field(default=5, ge=1)
    actions_per_turn: int = Field(default=2, ge=1)
    split: Split = Split.TRAIN


OptionsT = TypeVar("OptionsT", bound=ActionOptions)


class _Phase(Enum):
    UNSET = "has not been reset"
    PLAYING = "is being played"
    OVER = "is over"


class ActionEnv(ABC, Generic[OptionsT]):
    """An Env whose answers are names of actions, such as "Right || Up"."""

    name: str
    actions: ClassVar[tuple[str, ...]]
    """The names an answer may use; matched without regard to case."""
    Options: ClassVar[type[ActionOptions]]

    def __init__(self, options: OptionsT) -> None:
        self.options = options
        self.max_turns: int = options.max_turns
        self._turns = 0
        self._phase = _Phase.UNSET

    # --- what a subclass supplies ---

    @abstractmethod
    def _generate(self, seed: int) -> None:
        """Set up the instance of this seed, in the split of the options."""

    @abstractmethod
    def _act(self, index: int) -> tuple[float, bool, bool]:
        """Execute one action; answer its reward, whether the episode is over, whether the task is solved."""

    @abstractmethod
    def state_text(self) -> str:
        """The state in words or symbols, in the mode of the options."""

    @abstractmethod
    def state_image(self) -> npt.NDArray[np.uint8]:
        """The state as RGB, [height, width, 3]."""

    @property
    @abstractmethod
    def _task(self) -> str:
        """The goal and the rules, in a sentence or two."""

    @property
    def _symbols(self) -> str:
        """The meaning of each symbol of the grid; empty where the state is no grid."""
        return ""

    def _seed_luck(self, luck: int) -> None:
        """Seed the environment's own chance; nothing to do where there is none."""

    def _info(self) -> dict[str, Any]:
        """What else is worth recording of the turn just taken."""
        return {}

    # --- the Env protocol ---

    @property
    def instructions(self) -> str:
        parts = [self._task]
        if self._symbols and "grid" in self.options.observation:
            parts.append(f"Symbols: {self._symbols}.")
        if "coordinates" in self.options.observation:
            parts.append("Positions are (row, column), counted from 0 at the top left.")
        limit = self.options.actions_per_turn
        many = f"up to {limit} per turn, separated by {ACTION_SEPARATOR}" if limit > 1 else "one per turn"
        parts.append(f"Actions: {', '.join(self.actions)}. Give {many}.")
        return "\n".join([" ".join(parts), FORMAT_RULE])

    def reset(self, seed: int, *, luck: int | None = None) -> Observation:
        seed = _whole("seed", seed)
        self._phase = _Phase.UNSET  # stays so if the instance cannot be made
        self._generate(seed)
        self._seed_luck(derive_seed("luck", seed) if luck is None else _whole("luck", luck))
        self._turns = 0
        self._phase = _Phase.PLAYING
        return self._observe(self._turn_line())

    def step(self, answer: str) -> Step:
        if self._phase is not _Phase.PLAYING:
            raise BadInput(f"{self.name}: step was called but the episode {self._phase.value}; call reset(seed) first")
        found, valid = match_actions(answer, self.actions)
        executed: list[str] = []
        reward, done, success = 0.0, False, False
        for index in found[: self.options.actions_per_turn]:
            gained, done, success = self._act(index)
            reward += gained
            executed.append(self.actions[index])
            if done:
                break
        self._turns += 1
        truncated = not done and self._turns >= self.max_turns
        if done or truncated:
            self._phase = _Phase.OVER
        head = _end_line(success, truncated) if done or truncated else self._turn_line()
        observation = self._observe(head if executed else f"{NOTHING_EXECUTED}\n{head}")
        info = {"valid": valid, "truncated": truncated, "executed": executed, **self._info()}
        return Step(observation, reward, done or truncated, success, info)

    def _turn_line(self) -> str:
        left = (self.max_turns - self._turns) * self.options.actions_per_turn
        return f"Turn {self._turns + 1} of {self.max_turns}, {left} action{'' if left == 1 else 's'} left."

    def _observe(self, head: str) -> Observation:
        if self.options.observation == "image":
            return Observation(f"{head}\nSee the image.", self.state_image())
        return Observation(f"{head}\n{self.state_text()}")


def _end_line(success: bool, truncated: bool) -> str:
    return "Solved." if success else "No turns left." if truncated else "Failed."


def _whole(what: str, value: int) -> int:
    """A plain int: numpy integers print otherwise than Python's, and would otherwise seed another stream."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadInput(f"reset got {what} {value!r}; give a whole number") from None
