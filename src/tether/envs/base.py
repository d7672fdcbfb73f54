"""What environments with named actions share: parsing, the budget of actions, and the words around the state.

A subclass supplies the action names, an instance (`_generate`), the effect of one action (`_act`) and its looks (`state_text`,
`state_image`); this class makes an Env of them. One answer is one turn: its legal actions are executed in order, at most
`actions_per_turn` of them (the surplus is cut without penalty), until the episode is over.
"""

from abc import abstractmethod
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tether.core.grammar import ACTION_SEPARATOR, FORMAT_RULE, match_actions
from tether.core.types import Observation
from tether.envs.turns import Outcome, TurnEnv, TurnOptions

ObservationMode = Literal["grid", "coordinates", "grid_coordinates", "image"]

NOTHING_EXECUTED = "No valid action was given; the state has not changed."


class ActionOptions(TurnOptions):
    """Options of every environment with named actions."""

    observation: ObservationMode = "grid"
    max_turns: int = Field(default=5, ge=1)
    actions_per_turn: int = Field(default=2, ge=1)


OptionsT = TypeVar("OptionsT", bound=ActionOptions)


class ActionEnv(TurnEnv[OptionsT]):
    """An Env whose answers are names of actions, such as "Right || Up"."""

    actions: ClassVar[tuple[str, ...]]
    """The names an answer may use; matched without regard to case."""
    Options: ClassVar[type[ActionOptions]]

    # --- what a subclass supplies, besides `_generate` ---

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

    def _info(self) -> dict[str, Any]:
        """What else is worth recording of the turn just taken."""
        return {}

    # --- what this class makes of it ---

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

    def _take(self, answer: str) -> Outcome:
        found, valid = match_actions(answer, self.actions)
        executed: list[str] = []
        reward, done, success = 0.0, False, False
        for index in found[: self.options.actions_per_turn]:
            gained, done, success = self._act(index)
            reward += gained
            executed.append(self.actions[index])
            if done:
                break
        warning = "" if executed else NOTHING_EXECUTED
        return Outcome(warning, reward, done, success, valid, {"executed": executed, **self._info()})

    def _turn_line(self) -> str:
        left = (self.max_turns - self._turns) * self.options.actions_per_turn
        return f"Turn {self._turns + 1} of {self.max_turns}, {left} action{'' if left == 1 else 's'} left."

    def _observe(self, head: str, body: str | None = None) -> Observation:
        lines = f"{body}\n{head}" if body else head
        if self.options.observation == "image":
            return Observation(f"{lines}\nSee the image.", self.state_image())
        return Observation(f"{lines}\n{self.state_text()}")
