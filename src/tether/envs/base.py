"""Base classes of environments: `TurnEnv` counts turns, `TextEnv` takes free text, `ActionEnv` takes named actions.

`reset` starts the instance of a seed. `step` takes one answer and uses one turn. An episode that runs out of turns ends as `truncated`,
which is a different result from failing. A step before `reset`, or after the end, raises an error that says to call `reset`.

Derive from `TextEnv` or `ActionEnv` and override the methods under "what a subclass supplies"; they are public names on purpose.
docs/environments/custom.md shows both. An environment may also implement the `Env` protocol without any of these classes.
"""

import inspect
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import Field

from tether.core.config import Settings
from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.core.grammar import ACTION_SEPARATOR, ANSWER_CLOSE, FORMAT_RULE, read_actions
from tether.core.seeding import derive_seed
from tether.core.types import Exchanges, Observation, Step
from tether.envs.dataset import Pool, Row
from tether.envs.splits import Finite
from tether.envs.wording import EXAMPLE, PAPER, PLAIN, THINK_BRIEFLY, Example, replacement, unlike, with_example, with_worked

Work = Literal["inline", "process", "wait"]
"""Where a step runs: in the caller's thread (inline: microseconds of Python), in a process of its own (process: long computations, code
that may crash), or in a thread (wait: waiting for a server or another program)."""

ObservationMode = Literal["grid", "coordinates", "grid_coordinates", "image", "grid_image"]
"""`image` says nothing of the state in words; `grid_image` is the text of `grid` and the picture."""

SEE_IMAGE = "See the image."
NOTHING_EXECUTED = "No valid action was given; the state has not changed."

_RENAMED = {
    "_generate": "generate",
    "_take": "take",
    "_opening": "opening",
    "_task": "task",
    "_act": "act",
    "_seed_luck": "seed_randomness",
    "_observe": "observe",
    "_turn_line": "turn_line",
    "_symbols": "symbols",
}
"""Names of tether 0.1 that subclasses overrode, with their present names."""


class EpisodePhase(Enum):
    """Where an episode stands; the value completes the sentence "the episode ..."."""

    UNSET = "has not been reset"
    PLAYING = "is being played"
    OVER = "is over"
    BROKEN = "is broken"

    def require_playing(self, env_name: str) -> None:
        """Raise BadInput unless a step may be taken now."""
        if self is not EpisodePhase.PLAYING:
            raise BadInput(f"{env_name}: step was called but the episode {self.value}; call reset(seed) first")


class TurnOptions(Settings):
    """Options of every built-in environment."""

    max_turns: int = Field(default=1, ge=1)
    """Answers per episode."""
    split: Split = Split.TRAIN
    """Which instances: train, validation, test, or all; the trainer sets it."""
    instructions: str = EXAMPLE
    """The wording of the system message: a preset (example, plain, paper), or the path of a text file that takes its place."""
    examples: int = Field(default=0, ge=0)
    """Worked examples that follow the instructions, as text."""
    few_shot: int | None = Field(default=None, ge=0)
    """Worked examples as turns of the conversation, in front of the first observation; left out: as many as the environment shows by itself
    with the wording `example`, none with any other."""


class ActionOptions(TurnOptions):
    """Options of every environment with named actions."""

    observation: ObservationMode = "grid"
    """What is shown of the state."""
    max_turns: int = Field(default=5, ge=1)
    """Answers per episode."""
    actions_per_turn: int = Field(default=2, ge=1)
    """Actions executed per answer."""
    lenient: bool = True
    """Read an answer that names its actions unambiguously in another form than the one asked for, such as "Up, Left"."""


@dataclass(slots=True)
class Outcome:
    """The effect of one answer, before turns are counted."""

    text: str
    """The state, or the reply to the answer."""
    reward: float = 0.0
    done: bool = False
    success: bool = False
    valid: bool = True
    """The answer was a clean action; the trainer's format penalty follows this."""
    info: dict[str, Any] = field(default_factory=dict)


OptionsT = TypeVar("OptionsT", bound=TurnOptions)
ActionOptionsT = TypeVar("ActionOptionsT", bound=ActionOptions)


def _refuse_old_names(cls: type) -> None:
    """Raise BadInput for a class that overrides methods under their names of tether 0.1: nothing would call them any more.

    A class may use one of these names for a method of its own. So they are refused only where the present name has no implementation;
    `_seed_luck` overrides an optional method and is always refused.
    """
    old = [name for name in _RENAMED if name in vars(cls)]
    missing = [name for name in old if getattr(getattr(cls, _RENAMED[name], None), "__isabstractmethod__", False)]
    if missing or "_seed_luck" in old:
        renamed = ", ".join(f"{name} is now {_RENAMED[name]}" for name in old)
        raise BadInput(f"environment class {cls.__name__} overrides methods that were renamed: {renamed}; rename them")


class TurnEnv(ABC, Generic[OptionsT]):
    """An Env that counts turns and checks the order of calls."""

    name: str
    Options: ClassVar[type[TurnOptions]]
    metrics: ClassVar[tuple[str, ...]] = ()
    """Keys of `info` whose values after the last step are averaged over episodes: numbers or truth values, 0 where a key is missing."""
    read_row: "ClassVar[staticmethod[[Row], Any] | None]" = None
    """An environment with data files: a row as an instance (with a `fingerprint` and, for people, a `summary`), or `RowError`. The check of
    data files uses it (`tether envs --check --data`)."""
    default_few_shot: ClassVar[int] = 0
    """Worked examples that are shown as turns with the wording `example`, unless the option `few_shot` says how many."""
    pictures: ClassVar[str] = ""
    """When observations carry pictures, in a few words for people; empty: never."""
    owner_options: ClassVar[tuple[str, ...]] = ()
    """Options that decide which code runs or which files are read. Where the environment is served, its clients cannot set them."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        _refuse_old_names(cls)

    def __init__(self, options: OptionsT) -> None:
        self.options = options
        self.max_turns: int = options.max_turns
        self._turns = 0
        self._phase = EpisodePhase.UNSET
        presets = (EXAMPLE, PLAIN, *[PAPER] * bool(self.paper))
        # Options of a class of the user's own may lack what is younger than the class.
        self._preset: str = getattr(options, "instructions", EXAMPLE)
        self._num_examples: int = getattr(options, "examples", 0)
        self._num_few_shot: int | None = getattr(options, "few_shot", 0)
        self._replacement = replacement(getattr(self, "name", type(self).__name__), self._preset, presets)
        self._worked: dict[int, Sequence[Example]] = {}

    # --- what a subclass supplies ---

    def wording(self, preset: str) -> str:
        """The instructions in one of the presets. A class that overrides `instructions` itself needs none."""
        raise BadInput(f"environment class {type(self).__name__} has neither `wording` nor `instructions`; override one of them")

    @property
    def example(self) -> Example | None:
        """The reply that the instructions show, to a state of an instance that is not the one asked. None: they show none."""
        return None

    @property
    def refused(self) -> str:
        """What is not accepted as an answer, in a sentence or two; it stands below the example."""
        return ""

    @property
    def paper(self) -> str:
        """The instructions in the frame of the paper's code; empty: there is no preset `paper`."""
        return ""

    def worked_examples(self, count: int) -> Sequence[Example]:
        """Examples for the option `examples`, the same at every call: at least `count` and one more, or as many as there are."""
        return ()

    @abstractmethod
    def generate(self, seed: int) -> None:
        """Set up the instance of this seed, in the split of the options."""

    @abstractmethod
    def take(self, answer: str) -> Outcome:
        """Execute one answer."""

    @abstractmethod
    def observe(self, head: str, body: str | None = None) -> Observation:
        """The observation below a line about the turns; `body` is the text of the turn's outcome, None at the start."""

    def turn_line(self) -> str:
        """The first line of an observation while turns are left."""
        return f"Turn {self._turns + 1} of {self.max_turns}."

    def seed_randomness(self, env_seed: int) -> None:
        """Seed the randomness inside an episode. Environments without any ignore it."""

    @property
    def work(self) -> Work:
        """Where this environment's steps run when many environments are played at once. A class of your own that does not override this runs
        in processes; `work = "inline"` says that its steps take microseconds and cannot hang."""
        return "inline"

    @property
    def reward_range(self) -> tuple[float, float]:
        """The smallest and the largest reward of one step."""
        return -math.inf, math.inf

    @property
    def num_instances(self) -> int | None:
        """How many instances there are in the split, where they are a list, such as the rows of a file: the seeds from 0 play each of
        them once. None where every seed makes its own."""
        make = getattr(self, "_make", None)
        return make.num_instances(self.options.split) if isinstance(make, Finite) else None

    @property
    def instances_digest(self) -> str | None:
        """A digest of those in the list, by which a resumed run knows that it is the same; None where there is no list."""
        make = getattr(self, "_make", None)
        return make.digest(self.options.split) if isinstance(make, Pool) else None

    @property
    def instance(self) -> str | None:
        """The whole instance being played as text, for comparing instances; its hash decides the split. None where it is not exposed."""
        return None

    @property
    def shows_images(self) -> bool:
        """Whether observations carry pictures, so that only a model that sees can play."""
        return False

    @property
    def categories(self) -> Mapping[str, str]:
        """What kind of instance is being played, for tables by category: {"subject": "Algebra", "level": "5"}. Empty where there are no kinds."""
        return {}

    @property
    def parameters(self) -> Mapping[str, str]:
        """What a generated instance was made with, so few and coarse that instances with the same ones are about as hard: {"distance": "3"}. They
        share a record of the prompt memory. Empty: it has none."""
        return self.categories

    # --- the Env protocol ---

    @property
    def instructions(self) -> str:
        """The rules of the task, for the system message, in the wording of the options."""
        text = self.wording(self._preset) if self._replacement is None else self._replacement
        count = self._num_examples
        return with_worked(text, self._examples_to_show(count, "examples")) if count else text

    @property
    def few_shot(self) -> Exchanges:
        """Worked examples as turns in front of the first observation: what was shown, and the reply to it."""
        count = self._num_few_shot
        if count is None:
            shown = self._worked_unlike_asked(self.default_few_shot) if self._preset == EXAMPLE else []
        else:
            shown = self._examples_to_show(count, "few_shot")
        return tuple((f"{self._head_of(example.turn)}\n{example.state}", example.reply) for example in shown)

    def _head_of(self, turn: int) -> str:
        """The first line of the observation at a turn."""
        turns, self._turns = self._turns, turn - 1
        try:
            return self.turn_line()
        finally:
            self._turns = turns

    def other_example(self, examples: Sequence[Example]) -> Example:
        """The first example that is not about the instance being played."""
        return unlike(examples, self._asked)[0]

    @property
    def _asked(self) -> str | None:
        return None if self._phase is EpisodePhase.UNSET else self.instance

    def _examples_to_show(self, count: int, option: str) -> list[Example]:
        shown = self._worked_unlike_asked(count)
        if len(shown) < count:
            raise BadInput(f"{self.name}: {option}={count}, but there are {len(shown)} worked examples; use at most {len(shown)}")
        return shown

    def _worked_unlike_asked(self, count: int) -> list[Example]:
        """Worked examples that are not about the instance being played nor of turns that an episode does not have, at most `count`."""
        if count not in self._worked:
            self._worked[count] = self.worked_examples(count) if count else ()
        return [example for example in unlike(self._worked[count], self._asked) if example.turn <= self.max_turns][:count]

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        seed = whole("seed", seed)
        self._phase = EpisodePhase.UNSET  # stays so if the instance cannot be made
        self.generate(seed)
        # The string "luck" is part of the derived seed. It is the stream's name in tether 0.1 and must not change, or every recorded
        # episode would play differently.
        self.seed_randomness(derive_seed("luck", seed) if env_seed is None else whole("env_seed", env_seed))
        self._turns = 0
        self._phase = EpisodePhase.PLAYING
        return self.observe(self.turn_line())

    def step(self, answer: str) -> Step:
        self._phase.require_playing(self.name)
        outcome = self.take(answer)
        self._turns += 1
        truncated = not outcome.done and self._turns >= self.max_turns
        over = outcome.done or truncated
        if over:
            self._phase = EpisodePhase.OVER
        ending = "Solved." if outcome.success else "No turns left." if truncated else "Failed."
        head = ending if over else self.turn_line()
        info = {"valid": outcome.valid, "truncated": truncated, **outcome.info}
        if kinds := self.categories:
            info["categories"] = dict(kinds)
        return Step(self.observe(head, outcome.text), outcome.reward, over, outcome.success, info)


class TextEnv(TurnEnv[OptionsT]):
    """An Env whose answers are free text: a program or a query reaches `take` exactly as the agent wrote it."""

    @property
    @abstractmethod
    def task(self) -> str:
        """The goal and the rules; the format of a reply is added."""

    @property
    def format_rule(self) -> str:
        """The form of a reply, in general terms."""
        return FORMAT_RULE

    @abstractmethod
    def opening(self) -> str:
        """The text of the first observation: the question, the problem, the first page."""

    def wording(self, preset: str) -> str:
        if preset == PAPER:
            return self.paper
        if preset == PLAIN or self.example is None:
            return f"{self.task}\n{self.format_rule}"
        return with_example(self.task, self.example, self.refused, self.how_to_think)

    @property
    def how_to_think(self) -> str:
        """How the thoughts before an answer should go, for the preset `example`."""
        return THINK_BRIEFLY

    def observe(self, head: str, body: str | None = None) -> Observation:
        return Observation(f"{head}\n{self.opening() if body is None else body}")


class ActionEnv(TurnEnv[ActionOptionsT]):
    """An Env whose answers are names of actions, such as "Right || Up".

    One answer is one turn. Its valid actions are executed in order until the episode is over, at most `actions_per_turn` of them; the rest
    is ignored without penalty.
    """

    actions: ClassVar[tuple[str, ...]]
    """The names an answer may use; matched without regard to case."""
    Options: ClassVar[type[ActionOptions]]
    pictures = "with observation=image or grid_image"

    # --- what a subclass supplies, besides `generate` ---

    @abstractmethod
    def act(self, index: int) -> tuple[float, bool, bool]:
        """Execute one action; returns its reward, whether the episode is over, and whether the task is solved."""

    @abstractmethod
    def state_text(self) -> str:
        """The state in words or symbols, in the mode of the options."""

    @abstractmethod
    def state_image(self) -> npt.NDArray[np.uint8]:
        """The state as RGB, [height, width, 3]."""

    @property
    @abstractmethod
    def task(self) -> str:
        """The goal and the rules, in a sentence or two."""

    @property
    def symbols(self) -> str:
        """The meaning of each symbol of the grid; empty where the state is no grid."""
        return ""

    def turn_info(self) -> dict[str, Any]:
        """What else `info` holds about the turn just taken."""
        return {}

    # --- what this class adds ---

    @property
    def shows_images(self) -> bool:
        return "image" in self.options.observation

    def wording(self, preset: str) -> str:
        if preset == PAPER:
            return self.paper
        rules = self._rules()
        if preset == PLAIN or self.example is None:
            return "\n".join([rules, FORMAT_RULE])
        return with_example(rules, self.example, self.refused)

    @property
    def refused(self) -> str:
        limit, names = self.options.actions_per_turn, " or ".join([", ".join(self.actions[:-1]), self.actions[-1]])
        what = f"at least one and at most {limit} actions, separated by {ACTION_SEPARATOR} and not by commas" if limit > 1 else "one action"
        return (
            f"Between the answer tags write {what}: {names}. "
            f"There is no other action and no waiting, and no other word may stand there. Stop after {ANSWER_CLOSE}."
        )

    def _rules(self) -> str:
        """The task, the symbols, the actions and how many of them may be given."""
        parts = [self.task]
        if self.symbols and "grid" in self.options.observation:
            parts.append(f"Symbols: {self.symbols}.")
        if "coordinates" in self.options.observation:
            parts.append("Positions are (row, column), counted from 0 at the top left.")
        limit = self.options.actions_per_turn
        many = f"up to {limit} per turn, separated by {ACTION_SEPARATOR}" if limit > 1 else "one per turn"
        parts.append(f"Actions: {', '.join(self.actions)}. Give {many}.")
        return " ".join(parts)

    def take(self, answer: str) -> Outcome:
        read = read_actions(answer, self.actions, lenient=getattr(self.options, "lenient", True))
        executed: list[str] = []
        reward, done, success = 0.0, False, False
        for index in read.indices[: self.options.actions_per_turn]:
            gained, done, success = self.act(index)
            reward += gained
            executed.append(self.actions[index])
            if done:
                break
        # A model that only hears that nothing was valid concludes that nothing can be done; so it is told what can.
        hint = "" if self._preset == PLAIN else f" Name at least one action: {', '.join(self.actions)}."
        warning = "" if executed else f"{NOTHING_EXECUTED}{hint}"
        info = {"executed": executed, "lenient": read.lenient, **self.turn_info()}
        return Outcome(warning, reward, done, success, read.valid, info)

    def turn_line(self) -> str:
        left = (self.max_turns - self._turns) * self.options.actions_per_turn
        return f"Turn {self._turns + 1} of {self.max_turns}, {left} action{'' if left == 1 else 's'} left."

    def observe(self, head: str, body: str | None = None) -> Observation:
        lines = f"{body}\n{head}" if body else head
        picture = self.state_image() if self.shows_images else None
        shown = SEE_IMAGE if self.options.observation == "image" else self.state_text()
        return Observation(f"{lines}\n{shown}", picture)


def check_reset_signature(env: Any, label: str) -> None:
    """Raise BadInput for an environment whose `reset` still takes `luck`, the name of `env_seed` in tether 0.1."""
    try:
        parameters = inspect.signature(env.reset).parameters
    except (AttributeError, TypeError, ValueError):  # no reset, or one without a signature: the checker and the first call report it
        return
    if "luck" in parameters and "env_seed" not in parameters:
        raise BadInput(f"environment '{label}': the parameter 'luck' of reset is now called 'env_seed'; rename it in reset's signature")


def whole(what: str, value: int) -> int:
    """A plain int. numpy integers have another repr, which would derive another seed."""
    try:
        return operator.index(value)
    except TypeError:
        raise BadInput(f"reset got {what} {value!r}; give a whole number") from None
