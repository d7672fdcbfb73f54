"""A task of reasoning-gym: `make_env("reasoning_gym:leg_counting")`.

The options are those of the task's own dataset, its `seed` and `size` among them. An instance is an entry of that dataset. Its question decides the
split, so no question is in two splits. Answers are scored by the package, from 0 to 1. Tasks may seed numpy's global generator or compute for
seconds, so they run in processes.
"""

import dataclasses
import os
import random
import re
import typing
from collections.abc import Callable
from functools import lru_cache
from tokenize import TokenError
from typing import Any, ClassVar

from pydantic import Field, PydanticSchemaGenerationError, TypeAdapter, ValidationError, create_model
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from tether.core.enums import Split
from tether.core.errors import BadInput, UnknownName, did_you_mean
from tether.core.importing import in_one_line
from tether.envs.base import TurnOptions, Work
from tether.envs.qa.dataset import Item
from tether.envs.qa.env import Questions
from tether.envs.qa.prompt import OWN
from tether.envs.qa.rewards import Graded
from tether.envs.splits import draw

NONSENSE = "?!"
"""No task has this for an answer."""
UNREADABLE = "This answer cannot be read."
KEPT_ENTRIES = 2048
CANNOT_READ = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError, RuntimeError, SyntaxError, TokenError)
"""What scorers raise at an answer that is not of the form they expect."""
UNSAFE = re.compile(
    r"__|\bnan\b|\b(?:breakpoint|compile|eval|exec|exit|getattr|globals|import|input|lambdify|locals|open|parse_expr|quit|setattr|sympify|vars)\b"
    r"|\*\*\s*\(?(?:\d{5,}|[\w.]+\s*\*\*)",
    re.IGNORECASE,
)
"""What no scorer is shown: some evaluate an answer as Python or by sympy (code, powers that take forever), and NaN is at no distance from anything."""
LONGEST = 10_000
"""Characters of an answer that a scorer is shown, or twice those of the task's own answer."""


class ReasoningGymOptions(TurnOptions):
    """Options of every task; those of its own dataset come after them."""

    seed: int = Field(default=0, ge=0)
    """The seed of the dataset; another one has other entries."""
    size: int = Field(default=10_000, ge=1)
    """Entries of the dataset that instances are drawn from."""


class ReasoningGym(Questions[ReasoningGymOptions]):
    """A task of reasoning-gym; subclasses have a dataset."""

    Options = ReasoningGymOptions
    dataset: ClassVar[str]

    def __init__(self, options: ReasoningGymOptions) -> None:
        entries, self._entry = _load(type(self), options.model_dump_json(include=set(self._config())))
        super().__init__(options, self._drawn, Score(entries), OWN)
        self._scores = False

    @classmethod
    def _config(cls) -> list[str]:
        """The options that the dataset takes."""
        return [field.name for field in dataclasses.fields(DATASETS[cls.dataset][1]) if field.init]

    def _drawn(self, seed: int, split: Split) -> Item:
        def propose(rng: random.Random) -> Item:
            entry = self._entry(rng.randrange(self.options.size))
            return Item(entry["question"], row=entry)

        item = draw(self.name, seed, split, propose)
        if not self._scores and self._grade(item, NONSENSE).success:
            raise BadInput(
                f"{self.name}: reasoning-gym's scorer takes any answer for right, so there is nothing to learn; choose another task"
            )
        self._scores = True
        return item


class Score:
    """The score of the package. An answer that it cannot read, and fails at, is none."""

    work: Work = "process"
    workers = os.cpu_count() or 1
    bounds = (0.0, 1.0)

    def __init__(self, entries: Any) -> None:
        self._entries, self._scores = entries, False

    def __call__(self, item: Item, answer: str) -> Graded:
        own = str(item.row["answer"])
        if len(answer) > max(LONGEST, 2 * len(own)) or (UNSAFE.search(answer) and not UNSAFE.search(own)):
            return Graded(0.0, False, UNREADABLE, valid=False, error="the answer was not given to the scorer")
        try:
            score = float(self._entries.score_answer(answer, item.row))
        except CANNOT_READ as error:
            self._entries.score_answer(item.row["answer"], item.row)  # raises, and ends the episode, where the task itself is broken
            return Graded(0.0, False, UNREADABLE, valid=False, error=in_one_line(error))
        return Graded(score, score >= 1)


@lru_cache(maxsize=4)
def _load(cls: type[ReasoningGym], config: str) -> tuple[Any, Callable[[int], dict[str, Any]]]:
    """The dataset of a class with these options, as JSON, and what gives an entry. Made once in a process, because some generate all entries at once,
    and some take a second for one."""
    options = cls.Options.model_validate_json(config)
    try:
        entries = create_dataset(cls.dataset, **{name: getattr(options, name) for name in cls._config()})
        return entries, lru_cache(maxsize=KEPT_ENTRIES)(entries.__getitem__)
    except (AssertionError, ValueError, TypeError) as error:
        raise BadInput(f"{cls.name}: {in_one_line(error)}; `tether envs {cls.name}` shows its options") from error


@lru_cache(maxsize=256)
def env_class(task: str) -> type[ReasoningGym]:
    """The class of a task."""
    if task not in DATASETS:
        raise UnknownName(f"reasoning_gym has no task '{task}': {did_you_mean(task, DATASETS)}")
    config = DATASETS[task][1]
    hints = typing.get_type_hints(config)
    fields: dict[str, Any] = {
        field.name: (_annotation(hints[field.name], field), _default(field))
        for field in dataclasses.fields(config)
        if field.init and field.name not in ReasoningGymOptions.model_fields
    }
    options = create_model(f"{config.__name__}Options", __base__=ReasoningGymOptions, __module__=__name__, **fields)
    return type(task, (ReasoningGym,), {"name": f"reasoning_gym:{task}", "dataset": task, "Options": options, "__module__": __name__})


def _default(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return ... if field.default is dataclasses.MISSING else field.default


def _annotation(hint: Any, field: "dataclasses.Field[Any]") -> Any:
    """The type that the package states, unless its own default is not of it: then the package alone checks the value."""
    hint = hint | None if _default(field) is None else hint
    try:
        TypeAdapter(hint).validate_python(_default(field))
    except (ValidationError, PydanticSchemaGenerationError):
        return Any
    return hint
