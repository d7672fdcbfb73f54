"""An episode as a sequence of turns: what every built-in environment shares, whatever its answers look like.

`reset` begins the instance of a seed, `step` takes one answer and uses up one turn; running out of turns ends the episode as
`truncated`, which is never the same as failing. Stepping before `reset` or after the end is the caller's mistake and says so.
Subclasses say what a turn does: `tether.envs.base` for named actions, `tether.envs.text` for free text.
"""

import math
import operator
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import Field

from tether.core.config import Settings
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.seeding import derive_seed
from tether.core.types import Observation, Step

Work = Literal["inline", "process", "wait"]
"""Where a step belongs: microseconds of Python (inline), CPU-bound Python (a process of its own), waiting for others (beside them)."""


class TurnOptions(Settings):
    """Options of every built-in environment."""

    max_turns: int = Field(default=1, ge=1)
    split: Split = Split.TRAIN


@dataclass(slots=True)
class Outcome:
    """What one answer brought about, before turns are counted."""

    text: str
    """The state, or the reply to the answer."""
    reward: float = 0.0
    done: bool = False
    success: bool = False
    valid: bool = True
    """The answer was a clean action; the trainer's format penalty follows this."""
    info: dict[str, Any] = field(default_factory=dict)


OptionsT = TypeVar("OptionsT", bound=TurnOptions)


class _Phase(Enum):
    UNSET = "has not been reset"
    PLAYING = "is being played"
    OVER = "is over"


class TurnEnv(ABC, Generic[OptionsT]):
    """An Env that counts turns and guards its order of calls."""

    name: str
    Options: ClassVar[type[TurnOptions]]
    metrics: ClassVar[tuple[str, ...]] = ()
    """Keys of `info` whose values after the last step are worth averaging: numbers or truth values, 0 where there is none."""

    def __init__(self, options: OptionsT) -> None:
        self.options = options
        self.max_turns: int = options.max_turns
        self._turns = 0
        self._phase = _Phase.UNSET

    # --- what a subclass supplies ---

    @property
    @abstractmethod
    def instructions(self) -> str:
        """The rules of the task, for the system message."""

    @abstractmethod
    def _generate(self, seed: int) -> None:
        """Set up the instance of this seed, in the split of the options."""

    @abstractmethod
    def _take(self, answer: str) -> Outcome:
        """Carry out one answer."""

    @abstractmethod
    def _observe(self, head: str, body: str | None = None) -> Observation:
        """The observation under a line about the turns; `body` is the text of the turn's outcome, None at the start."""

    def _turn_line(self) -> str:
        """The first line of an observation while turns are left."""
        return f"Turn {self._turns + 1} of {self.max_turns}."

    def _seed_luck(self, env_seed: int) -> None:
        """Seed the environment's own chance; nothing to do where there is none."""

    @property
    def work(self) -> Work:
        """Where this environment's steps belong when many are played at once."""
        return "inline"

    @property
    def reward_range(self) -> tuple[float, float]:
        """The least and the most that one step can pay."""
        return -math.inf, math.inf

    @property
    def instance(self) -> str | None:
        """The whole instance being played as text, for comparing instances; its hash decides the split. None if it is not told."""
        return None

    # --- the Env protocol ---

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        seed = whole("seed", seed)
        self._phase = _Phase.UNSET  # stays so if the instance cannot be made
        self._generate(seed)
        self._seed_luck(derive_seed("luck", seed) if env_seed is None else whole("luck", env_seed))
        self._turns = 0
        self._phase = _Phase.PLAYING
        return self._observe(self._turn_line())

    def step(self, answer: str) -> Step:
        if self._phase is not _Phase.PLAYING:
            raise BadInput(f"{self.name}: step was called but the episode {self._phase.value}; call reset(seed) first")
        outcome = self._take(answer)
        self._turns += 1
        truncated = not outcome.done and self._turns >= self.max_turns
        over = outcome.done or truncated
        if over:
            self._phase = _Phase.OVER
        head = _end_line(outcome.success, truncated) if over else self._turn_line()
        info = {"valid": outcome.valid, "truncated": truncated, **outcome.info}
        return Step(self._observe(head, outcome.text), outcome.reward, over, outcome.success, info)


def _end_line(success: bool, truncated: bool) -> str:
    return "Solved." if success else "No turns left." if truncated else "Failed."


def whole(what: str, value: int) -> int:
    """A plain int: numpy integers print otherwise than Python's, and would otherwise seed another stream."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadInput(f"reset got {what} {value!r}; give a whole number") from None
