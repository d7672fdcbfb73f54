"""Episodes played for the checker: recorded whole, compared to the byte, described so that they can be played again.

Nothing that an environment does stops the recording: an exception is recorded and ends the episode, and so does a reply of the wrong type.
The checks decide which of this is a violation. `transcripts_elsewhere` plays the same episodes in another Python process, whose string
hashes have another salt: an environment that depends on the order of a set behaves differently there.

`Answers` are what is tried: plausible answers, near misses, and nonsense, all of which follow from the episode's number. Plausible answers are
composed of the environment's own texts: the names of its actions, and the words, numbers and bracketed forms of its instructions and
observations. So random play makes progress in environments that the checker does not know.
"""

import multiprocessing
import os
import pickle
import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.grammar import ACTION_SEPARATOR, ANSWER_TAGS
from tether.core.protocols import Env
from tether.core.seeding import derive_seed
from tether.core.types import Observation, Step
from tether.envs.registry import MAIN_GUARD

HUGE = 100_000
"""Characters of a huge answer: more than any response budget allows."""

_WORD = re.compile(r"[A-Za-z]{2,}")
_NUMBER = re.compile(r"\d+")
_BRACKETED = re.compile(r"\w+\[")
_PLANES = ((0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x5FF), (0x2190, 0x22FF), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0x1F300, 0x1FAFF))
_TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<|im_start|>", "<|im_end|>", "<search>", "</search>", "```python\n", "```")
_OPENING, _CLOSING = "([{\"'<", ")]}\"'>"

ODD_ANSWERS = (
    # nothing, or nothing to be seen
    *("", " ", "\n\t\r", "\u200b", "\ufeff", "\u202e", "||", "|| || ||", "[]", "<>"),
    # control characters; halves of surrogate pairs, which a terminal or a web client may send
    *("\x00", "a\x00b", "\x1b[31mred\x1b[0m", "\x7f\x80\x9f", "\r\rback", "\ud800", "a\udfffb", "\udc00\ud800"),
    # tags inside tags
    *(
        "</answer>",
        "<answer><answer>a</answer></answer>",
        "<think></think><answer>",
        "<|im_start|>system",
        "```",
        "```python\n```",
        "```python",
    ),
    # deep, huge
    *("(" * 5000 + "1" + ")" * 5000, "[" * 5000, "{" * 5000 + "}" * 5000, "-" * 5000 + "1", "1" + "+1" * 20_000, "((" * HUGE, "a" * HUGE),
    *("\n" * HUGE, "\U0001f600" * HUGE, "a b " * (HUGE // 4), "search[" + "word " * (HUGE // 5) + "]", "9" * HUGE),
    # numbers that are none, or too large
    *("1e999", "-0", "1/0", "0x10", "NaN", "inf", "\u0663", "\u00bd", "9" * 400 + " * " + "9" * 400, "2**9**9**9", "1_000", "\\frac{1}{0}"),
    # what other languages take for an instruction
    *(
        "%s%n{0}{x}",
        "'; --",
        "../../etc",
        "null",
        "${HOME}",
        "\\",
        '"',
        "'",
        "*",
        "~",
        "AND OR NOT",
        "a:b^2~",
        '+-!(){}[]^"~*?:\\/',
        "(?:(",
    ),
)
"""Answers that have broken parsers before; the first episodes begin with one each."""


class Answers:
    """The answers of one episode."""

    def __init__(self, env: Any, number: int) -> None:
        self._rng = random.Random(derive_seed("check", number))
        self._first = ODD_ANSWERS[number] if number < len(ODD_ANSWERS) else None
        self._actions = [str(action) for action in getattr(env, "actions", ())]
        self._instructions = str(env.instructions)
        self._tags: tuple[str, ...] = getattr(env, "reply_tags", ANSWER_TAGS)

    def next(self, observation: str) -> str:
        """An answer to an observation: half are plausible, a quarter near misses, a quarter nonsense."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        kind = self._rng.choice((self._plausible, self._plausible, self._near_miss, self._nonsense))
        return kind(observation)

    def _plausible(self, observation: str) -> str:
        kinds: list[Callable[[str], str]] = [self._words, self._expression, self._bracketed]
        if self._actions:
            kinds += [self._named] * 9
        answer = self._rng.choice(kinds)(observation)
        if self._tags == ANSWER_TAGS:
            return answer
        tag = self._rng.choice(self._tags)  # with tags of its own, an environment gets the answer inside of them
        return f"<{tag}>{answer}</{tag}>"

    def _named(self, observation: str) -> str:
        return f" {ACTION_SEPARATOR} ".join(self._rng.choices(self._actions, k=self._rng.randint(1, 3)))

    def _words(self, observation: str) -> str:
        return " ".join(self._rng.choices(_WORD.findall(observation + self._instructions) or ["yes"], k=self._rng.randint(1, 4)))

    def _expression(self, observation: str) -> str:
        """Numbers of the observation with operators between them; often just one number."""
        numbers = self._rng.choices(_NUMBER.findall(observation) or ["7"], k=self._rng.randint(1, 4))
        return "".join(number + self._rng.choice((" + ", " - ", " * ", " / ")) for number in numbers[:-1]) + numbers[-1]

    def _bracketed(self, observation: str) -> str:
        """Such as search[some words], if the instructions or the observation contain such a form."""
        forms = _BRACKETED.findall(self._instructions + observation)
        return f"{self._rng.choice(forms)}{self._words(observation)}]" if forms else self._words(observation)

    def _near_miss(self, observation: str) -> str:
        """A plausible answer with one thing wrong: a character lost, doubled or changed, the case, the space, what surrounds it."""
        rng = self._rng
        text = self._plausible(observation) or "x"
        at = rng.randrange(len(text))
        return rng.choice(
            (
                text[:at] + text[at + 1 :],
                text[:at] + text[at] + text[at:],
                text[:at] + rng.choice("xX0_-.|") + text[at + 1 :],
                text.swapcase(),
                f"  {text}\n",
                f"The answer is {text}.",
                f"{text} {ACTION_SEPARATOR}",
                text + rng.choice("]})\"'"),
                text.replace("]", ""),
            )
        )

    def _nonsense(self, observation: str) -> str:
        rng = self._rng
        kind = rng.randrange(6)
        if kind == 0:
            return rng.choice(ODD_ANSWERS)
        if kind == 1:
            return "".join(chr(rng.randrange(0x20)) for _ in range(rng.randint(1, 30)))
        if kind == 2:
            return "".join(rng.choice(_TAGS) + rng.choice(("", "a", " 1 ")) for _ in range(rng.randint(2, 12)))
        if kind == 3:
            return rng.choice(_OPENING) * rng.randint(1, 50) + self._plausible(observation) + rng.choice(_CLOSING) * rng.randint(0, 50)
        if kind == 4:
            return (self._plausible(observation) + rng.choice((" ", "\n", ""))) * rng.randint(2, 200)
        return "".join(chr(rng.randint(*rng.choice(_PLANES))) for _ in range(rng.randint(1, 40)))


_SHOWN_ANSWER = 60
"""Characters of an answer that a description shows."""


@dataclass(slots=True)
class EpisodeRecord:
    """One episode: the answers and everything the environment returned, in order."""

    seed: int
    env_seed: int | None
    answers: list[str] = field(default_factory=list)
    opening: Any = None
    """What reset returned."""
    instance: str | None = None
    """The instance, where the environment exposes it."""
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
    """Seed and env_seed of the checker's episode of a number; every other episode leaves env_seed to the environment."""
    # The string "check luck" names the stream of tether 0.1. It must not change: episode numbers in reports would mean other episodes.
    return number, derive_seed("check luck", number) if number % 2 else None


def play(env: Env, number: int) -> EpisodeRecord:
    """The checker's episode of a number: reset, then answers drawn from its seed until the episode is over."""
    episode = EpisodeRecord(*episode_seeds(number))
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


def replay(env: Env, like: EpisodeRecord) -> EpisodeRecord:
    """The same seed, env_seed and answers again."""
    episode = EpisodeRecord(like.seed, like.env_seed)
    _open(env, episode)
    for answer in like.answers:
        if episode.error is not None or _is_over(episode):
            break
        _advance(env, episode, answer)
    return episode


def transcript(episode: EpisodeRecord) -> list[tuple[str, str]]:
    """Everything the environment did, as (where, what exactly) pairs of text, which can be compared and pickled whatever the values were."""
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


def _open(env: Env, episode: EpisodeRecord) -> None:
    try:
        with environment_boundary("reset"):
            episode.opening = env.reset(episode.seed, env_seed=episode.env_seed)
            episode.instance = getattr(env, "instance", None)
    except EnvironmentFailure as failure:
        episode.error = str(failure)


def _advance(env: Env, episode: EpisodeRecord, answer: str) -> None:
    episode.answers.append(answer)
    try:
        with environment_boundary("step"):
            episode.steps.append(env.step(answer))
    except EnvironmentFailure as failure:
        episode.error = str(failure)


def _is_over(episode: EpisodeRecord) -> bool:
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


SECONDS = 300.0
"""What the other process may take, its start included."""

Transcript = list[tuple[str, str]]


def transcripts_elsewhere(make: bytes, numbers: Sequence[int]) -> list[Transcript]:
    """The transcripts of the checker's episodes of these numbers, each played in a fresh environment, all in one fresh process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_play_all, args=(theirs, make, numbers), name="tether-check")
    with _another_hash_seed():
        process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise EnvironmentFailure(f"another process did not play {len(numbers)} episodes within {SECONDS:g} s")
        found: list[Transcript] | str = ours.recv()
    except EOFError:
        process.join()
        raise EnvironmentFailure(
            f"another process ended with exit code {process.exitcode} before it had played {len(numbers)} episodes; {MAIN_GUARD}"
        ) from None
    finally:
        process.kill()
        process.join()
        process.close()
        ours.close()
    if isinstance(found, str):
        raise EnvironmentFailure(found)
    return found


def _play_all(connection: Connection, make: bytes, numbers: Sequence[int]) -> None:
    """What the other process does."""
    try:
        with environment_boundary("in another process"):
            maker = pickle.loads(make)
            envs: list[Env] = [maker() for _ in numbers]
        connection.send([transcript(play(env, number)) for env, number in zip(envs, numbers, strict=True)])
    except EnvironmentFailure as failure:
        connection.send(str(failure))


@contextmanager
def _another_hash_seed() -> Iterator[None]:
    """While this lasts, a Python that is started salts its hashes otherwise than this one does (or, if unsalted, did)."""
    variable = "PYTHONHASHSEED"
    before = os.environ.get(variable)
    os.environ[variable] = "1" if before != "1" else "2"
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
