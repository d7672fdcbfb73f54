"""Episodes played for the checker: recorded whole, compared to the byte, described so that anybody can play them again.

Nothing an environment does stops the recording: what it raises is written down and ends that episode, a reply of the wrong type ends it
too. Which of it is a violation is for the laws to say.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.protocols import Env
from tether.core.seeding import derive_seed
from tether.core.types import Observation, Step
from tether.envs.checker.answers import Answers

_SHOWN_ANSWER = 60
"""Characters of an answer that a description shows."""


@dataclass(slots=True)
class Episode:
    """What happened, in order."""

    seed: int
    env_seed: int | None
    answers: list[str] = field(default_factory=list)
    opening: Any = None
    """What reset returned."""
    instance: str | None = None
    """The instance, from an environment that tells it."""
    steps: list[Any] = field(default_factory=list)
    """What step returned, one for each answer; one less if the last one raised."""
    error: str | None = None
    """What was raised, by what: "step: KeyError: 'a'"."""

    def __str__(self) -> str:
        """How to play it again."""
        env_seed = "" if self.env_seed is None else f", env_seed={self.env_seed}"
        return f"reset({self.seed}{env_seed})" + "".join(f", step({_shown(answer)})" for answer in self.answers)

    @property
    def proper_steps(self) -> Iterator[tuple[int, Step]]:
        """The replies that are steps, with their numbers from 1."""
        return ((number, step) for number, step in enumerate(self.steps, 1) if isinstance(step, Step))

    @property
    def texts(self) -> Iterator[tuple[str, str]]:
        """Every text the agent was shown, each with the answer before it."""
        if isinstance(self.opening, Observation):
            yield "", self.opening.text
        for answer, step in zip(self.answers, self.steps, strict=False):
            if isinstance(step, Step) and isinstance(step.observation, Observation):
                yield answer, step.observation.text


def episode_seeds(number: int) -> tuple[int, int | None]:
    """Seed and luck of the checker's episode of a number; every other one leaves the luck to the environment."""
    return number, derive_seed("check luck", number) if number % 2 else None


def play(env: Env, number: int) -> Episode:
    """The checker's episode of a number: reset, then answers drawn from its seed until the episode is over."""
    episode = Episode(*episode_seeds(number))
    try:
        with environment_boundary("instructions"):
            source = Answers(env, number)
    except EnvironmentFailure as failure:
        episode.error = str(failure)
        return episode
    _open(env, episode)
    while episode.error is None and len(episode.steps) < env.max_turns and not _is_over(episode):
        shown = list(episode.texts)
        _advance(env, episode, source.next(str(shown[-1][1]) if shown else ""))
    return episode


def replay(env: Env, like: Episode) -> Episode:
    """The same seed, luck and answers again."""
    episode = Episode(like.seed, like.env_seed)
    _open(env, episode)
    for answer in like.answers:
        if episode.error is not None or _is_over(episode):
            break
        _advance(env, episode, answer)
    return episode


def transcript(episode: Episode) -> list[tuple[str, str]]:
    """Everything the environment did, as (where, what exactly): texts, which compare and travel whatever they tell of."""
    replies = [(f"step {number}", canonical(step)) for number, step in enumerate(episode.steps, 1)]
    ending = [("the end", episode.error)] if episode.error is not None else []
    return [("reset", canonical(episode.opening)), ("the instance", canonical(episode.instance)), *replies, *ending]


def difference(first: list[tuple[str, str]], second: list[tuple[str, str]]) -> str | None:
    """Where two transcripts that should be equal part, or None."""
    for one, other in zip_longest(first, second):
        if one is None or other is None:
            return f"one has {(one or other)[0]}, the other has not"
        if one != other:
            return f"{one[0]} gave {_around(one[1], other[1])} and then {_around(other[1], one[1])}"
    return None


def canonical(value: Any) -> str:
    """A text that is equal for equal values only, the order of sets and dictionaries and the last bit of numbers included."""
    if isinstance(value, Observation):
        return f"{value.text!r} {canonical(value.image)}"
    if isinstance(value, Step):
        parts = (value.observation, value.reward, value.done, value.success, value.info)
        return " ".join(canonical(part) for part in parts)
    if isinstance(value, np.ndarray):
        return f"array {value.dtype} {value.shape} {value.tobytes().hex()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{canonical(key)}: {canonical(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(canonical(item) for item in value)})"
    return repr(value)


def _open(env: Env, episode: Episode) -> None:
    try:
        with environment_boundary("reset"):
            episode.opening = env.reset(episode.seed, env_seed=episode.env_seed)
            episode.instance = getattr(env, "instance", None)
    except EnvironmentFailure as failure:
        episode.error = str(failure)


def _advance(env: Env, episode: Episode, answer: str) -> None:
    episode.answers.append(answer)
    try:
        with environment_boundary("step"):
            episode.steps.append(env.step(answer))
    except EnvironmentFailure as failure:
        episode.error = str(failure)


def _is_over(episode: Episode) -> bool:
    last = episode.steps[-1] if episode.steps else None
    return last is not None and (not isinstance(last, Step) or bool(last.done))


def _shown(answer: str) -> str:
    if len(answer) <= _SHOWN_ANSWER:
        return ascii(answer)
    return f"{answer[:_SHOWN_ANSWER]!a}... {len(answer)} characters"


def _around(text: str, other: str) -> str:
    """The part of a text around its first difference from the other."""
    at = next((place for place, (one, two) in enumerate(zip(text, other, strict=False)) if one != two), min(len(text), len(other)))
    return ascii(text[max(0, at - 40) : at + 40])
