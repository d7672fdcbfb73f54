"""How an answer is graded: exactly, as mathematics, by running tests, or by a function of the user's own.

Every grader takes an item and an answer and returns a `Graded`. A function of the user's is named as "module:function". It is called as
`function(answer, row)` with the text of the answer and a copy of the row, and returns a number or a dictionary:

    def reward(answer: str, row: dict) -> float: ...           # success: at least 1
    def reward(answer: str, row: dict) -> dict: ...            # {"reward": 0.5, "success": False, "feedback": "Too long."}
"""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

from tether.core.errors import BadInput, EnvironmentFailure, UnknownName, did_you_mean
from tether.core.importing import import_object, is_import_path
from tether.envs.base import Work
from tether.envs.deepcoder.env import DeepCoder, DeepCoderOptions
from tether.envs.metamathqa.compare import same
from tether.envs.metamathqa.symbolic import NUM_WORKERS
from tether.envs.qa.dataset import READERS, Item
from tether.envs.searchqa.reward import exact_match

RESULT_KEYS = ("reward", "success", "feedback")
SUCCESS = 1.0
"""A number that a function returns is a success from here on."""
OWN_THREADS = 16
"""Calls of a function of the user's at the same time: it may ask a server."""


@dataclass(frozen=True, slots=True)
class Graded:
    """What an answer is worth."""

    reward: float
    success: bool
    feedback: str = ""
    """What the agent is told before its next turn; empty: right or wrong."""
    valid: bool = True
    """False: it is no answer at all, such as prose where a program is asked for."""
    error: str = ""
    """What grading raised, for the record; not shown to the agent."""


class Grader(Protocol):
    """Grades the answers of one environment."""

    work: Work
    workers: int
    bounds: tuple[float, float]
    """The least and the largest reward."""

    def __call__(self, item: Item, answer: str) -> Graded: ...


class ExactMatch:
    """1 for an accepted answer, as SQuAD compares: without case, punctuation and articles."""

    work: Work = "inline"
    workers = 1
    bounds = (0.0, 1.0)

    def __call__(self, item: Item, answer: str) -> Graded:
        right = any(exact_match(answer, gold) for gold in item.gold)
        return Graded(float(right), right)


class Mathematics:
    """1 for an answer that is the label as mathematics (the environment metamathqa says when)."""

    work: Work = "wait"
    workers = NUM_WORKERS
    bounds = (0.0, 1.0)

    def __call__(self, item: Item, answer: str) -> Graded:
        right = any(same(gold, answer, "math") for gold in item.gold)
        return Graded(float(right), right)


class Tests:
    """The share of tests that a program passes in the sandbox of the environment deepcoder."""

    work: Work = "wait"
    bounds = (0.0, 1.0)

    def __init__(self) -> None:
        self._item = Item("")
        self._coder = DeepCoder(DeepCoderOptions(max_turns=1), generator=lambda seed, split: self._problem())
        self.workers = self._coder.workers

    def _problem(self) -> Any:
        return self._item.problem

    def __call__(self, item: Item, answer: str) -> Graded:
        self._item = item
        self._coder.reset(0)
        outcome = self._coder.take(answer)
        return Graded(outcome.reward, outcome.success, outcome.text, outcome.valid)


class OwnFunction:
    """A function of the user's. What it raises or returns wrongly ends the episode as an error of the environment, on record."""

    work: Work = "wait"
    workers = OWN_THREADS
    bounds = (-math.inf, math.inf)

    def __init__(self, path: str) -> None:
        self._path = path
        self._function: Callable[[str, dict[str, Any]], Any] = import_object(path, "reward", inspect.isfunction)
        if not callable(self._function):
            raise BadInput(f"reward '{path}' is a {type(self._function).__name__}; name a function: def reward(answer, row)")
        if inspect.iscoroutinefunction(self._function):
            raise BadInput(f"reward '{path}' is async; write a plain function: calls run in threads, side by side")
        try:
            inspect.signature(self._function).bind("", {})
        except TypeError as error:
            raise BadInput(f"reward '{path}' cannot be called with an answer and a row ({error}); write def reward(answer, row)") from error

    def __call__(self, item: Item, answer: str) -> Graded:
        result = self._function(answer, dict(item.row))
        values = result if isinstance(result, Mapping) else {"reward": result}
        unknown = [key for key in values if key not in RESULT_KEYS]
        reward = values.get("reward")
        if unknown or not isinstance(reward, Real) or not math.isfinite(reward):
            raise EnvironmentFailure(
                f"reward '{self._path}' returned {result!r:.120}; return a finite number, or a dictionary with {', '.join(RESULT_KEYS)}"
            )
        success = bool(values.get("success", float(reward) >= SUCCESS))
        return Graded(float(reward), success, str(values.get("feedback") or ""))


def check_reward(name: str) -> str:
    """The name of a reward, if it may be one; nothing is imported for that."""
    if name not in READERS and not is_import_path(name):
        raise UnknownName(f"unknown reward '{name}': {did_you_mean(name, [*READERS, 'module:function'])}")
    return name


def make_grader(name: str) -> Grader:
    """The grader of a reward's name."""
    if name == "exact_match":
        return ExactMatch()
    if name == "math":
        return Mathematics()
    return Tests() if name == "code" else OwnFunction(name)
