"""The checks. Each is a small function that yields violations, in words with which the violation can be reproduced.

A check is skipped where a check that it requires has failed, so that one mistake is reported once. The checks of play all look at the same
episodes, whose answers are half plausible and half nonsense.
"""

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from numbers import Real
from typing import Any, get_args

import numpy as np

from tether.core.enums import Split
from tether.core.errors import BadInput, ConfigError, EnvironmentFailure, TetherError, environment_boundary
from tether.core.grammar import ANSWER_TAGS, THINK_OPEN, parse_response
from tether.core.protocols import Env, few_shot_of
from tether.core.types import Observation, Step
from tether.envs.base import Work
from tether.envs.checker.episodes import EpisodeRecord, difference, play, replay, transcript, transcripts_elsewhere
from tether.envs.registry import EnvFactory, EnvSource, env_factory, refuse_while_main_is_imported

NUM_REPEATED = 20
"""How many episodes are played again."""


class NotApplicable(Exception):
    """A check does not apply to this environment; the message says why."""


class EnvUnderTest:
    """The environment under test: how to build it, and the episodes that several checks look at, played once."""

    def __init__(self, factory: EnvFactory, num_episodes: int) -> None:
        self.factory, self.num_episodes = factory, num_episodes

    @cached_property
    def fresh(self) -> Env:
        """An environment that has not been reset and never is."""
        return self.factory.make()

    @cached_property
    def episodes(self) -> list[EpisodeRecord]:
        """Played one after the other in one environment, as in training."""
        env = self.factory.make()
        return [play(env, number) for number in range(self.num_episodes)]

    @property
    def repeated(self) -> list[EpisodeRecord]:
        """The episodes that are replayed to see whether they come out the same: some of every kind."""
        return self.episodes[:: max(1, self.num_episodes // NUM_REPEATED)][:NUM_REPEATED]

    @property
    def option_names(self) -> list[str]:
        if self.factory.options is None:
            raise NotApplicable("its options are not known here; check it by name or by class")
        return list(self.factory.options.model_fields)


def identities(env: Env, seeds: Iterable[int], env_seed: int | None = None) -> Iterator[tuple[int, str]]:
    """Each seed with its instance, or with the first observation where the environment does not expose the instance."""
    for seed in seeds:
        with environment_boundary(f"reset({seed})"):
            opening: Any = env.reset(seed, env_seed=env_seed)
            instance = getattr(env, "instance", None)
        shown = opening.text if isinstance(opening, Observation) else repr(opening)
        yield seed, shown if instance is None else instance


SPLIT_SEEDS = 300
"""Instances of each split that are compared."""
INSTANCE_SEEDS = 50
"""Seeds among which at least two instances have to differ."""
ENV_SEED_SEEDS = 10
PICTURE_SEEDS = 10
PICTURE_EPISODES = 5
_TOLERANCE = 1e-9
"""Sums of rewards may miss their bound by rounding."""
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_HALF_PAIR = re.compile(r"[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of every environment."""

    name: str
    violations: Callable[[EnvUnderTest], Iterator[str]]
    requires: tuple[str, ...] = ()


# --- what it is ---


def construction(tested: EnvUnderTest) -> Iterator[str]:
    """It can be built."""
    try:
        tested.fresh  # noqa: B018 - built on first use
    except TetherError as error:
        yield str(error)


def attributes(tested: EnvUnderTest) -> Iterator[str]:
    """It has what an Env has, of the right types."""
    env: Any = tested.fresh
    if not isinstance(getattr(env, "name", None), str) or not env.name:
        yield f"name is {getattr(env, 'name', None)!r}; it has to be a text"
    turns = getattr(env, "max_turns", None)
    if not isinstance(turns, int) or isinstance(turns, bool) or turns < 1:
        yield f"max_turns is {turns!r}; it has to be a whole number, at least 1"
    if not isinstance(getattr(env, "instructions", None), str):
        yield f"instructions is {getattr(env, 'instructions', None)!r}; it has to be a text"
    yield from _unlike_call(env, "reset", "reset(seed, env_seed=None)", (0,), {"env_seed": None})
    yield from _unlike_call(env, "step", "step(answer)", ("x",), {})
    if getattr(env, "work", "inline") not in get_args(Work):
        yield f"work is {env.work!r}; it has to be one of {', '.join(get_args(Work))}"
    limits = getattr(env, "reward_range", (-math.inf, math.inf))
    pair = isinstance(limits, tuple | list) and len(limits) == 2 and all(isinstance(limit, Real) for limit in limits)
    if not pair or not limits[0] <= limits[1]:
        yield f"reward_range is {limits!r}; it has to be (least, most)"


def _unlike_call(env: Any, method: str, call: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Iterator[str]:
    try:
        inspect.signature(getattr(env, method)).bind(*arguments, **keywords)
    except (AttributeError, TypeError) as error:
        yield f"{method} cannot be called as {call}: {error}"


def instructions(tested: EnvUnderTest) -> Iterator[str]:
    """They are not empty and state the reply format, in the tags of the environment; examples that are shown as turns have that format."""
    text = tested.fresh.instructions
    tags = getattr(tested.fresh, "reply_tags", ANSWER_TAGS)
    missing = [mark for tag in ("think", *tags) for mark in (f"<{tag}>", f"</{tag}>") if mark not in text]
    if not text.strip():
        yield "the instructions are empty"
    elif missing:
        yield f"the instructions do not state the reply format ({', '.join(missing)} missing); add tether.core.grammar.FORMAT_RULE"
    try:
        few_shot = few_shot_of(tested.fresh)
    except TypeError as error:
        yield str(error)
        return
    for _, reply in few_shot:
        if not reply.startswith(THINK_OPEN) or not parse_response(reply.removeprefix(THINK_OPEN), tags).well_formed:
            yield f"few_shot holds {reply[:60]!r}, which is no reply in the form <think> ... </think> <answer> ... </answer>"


def options(tested: EnvUnderTest) -> Iterator[str]:
    """A misspelt option is refused, and the right spelling suggested."""
    known = tested.option_names
    if not known:
        raise NotApplicable("it has no options")
    right = max(known, key=len)
    wrong = f"{right}{right[-1]}"
    try:
        tested.factory.make(**{wrong: 1})
    except BadInput as error:
        if right not in str(error).replace(wrong, ""):
            yield f"option '{wrong}' is refused without a word about '{right}': {error}"
    else:
        yield f"option '{wrong}' is accepted; derive Options from tether.core.config.Settings, which refuses unknown keys"


# --- how it is called ---


def order_of_calls(tested: EnvUnderTest) -> Iterator[str]:
    """A step before reset, or after the end, is refused by an error that says so."""
    yield from _accepted(tested.factory.make(), "x", "step before reset")
    ended = next((episode for episode in tested.episodes if episode.error is None and _is_done(episode)), None)
    if ended is not None:
        env = tested.factory.make()
        replay(env, ended)
        yield from _accepted(env, ended.answers[-1], f"{ended}: a step after the end")


def _accepted(env: Any, answer: str, what: str) -> Iterator[str]:
    try:
        with environment_boundary("step"):
            gave = env.step(answer)
    except EnvironmentFailure as failure:
        if not isinstance(failure.__cause__, BadInput) and "reset" not in str(failure).lower():
            yield f"{what} raised {str(failure).removeprefix('step: ')}, which does not say to reset first"
    else:
        yield f"{what} gave {gave!r:.80}; it has to raise an error that says to reset first"


def _is_done(episode: EpisodeRecord) -> bool:
    return bool(episode.steps) and isinstance(episode.steps[-1], Step) and bool(episode.steps[-1].done)


def types(tested: EnvUnderTest) -> Iterator[str]:
    """reset returns an Observation, step a Step, and their fields are what they should be."""
    for episode in tested.episodes:
        if episode.opening is not None or episode.error is None:
            yield from (f"{episode}: reset returned {problem}" for problem in _observation_problems(episode.opening))
        if not isinstance(episode.instance, str | None) or episode.instance == "":
            yield f"{episode}: instance is {episode.instance!r}; it has to be a text"
        for number, step in enumerate(episode.steps, 1):
            yield from (f"{episode}: step {number} returned {problem}" for problem in _step_problems(step))


def _observation_problems(observation: Any) -> Iterator[str]:
    if not isinstance(observation, Observation):
        yield f"{observation!r:.80} instead of an Observation"
        return
    if not isinstance(observation.text, str) or not observation.text:
        yield f"an observation whose text is {observation.text!r}; it has to be a text that is not empty"
    if observation.image is not None and not _is_picture(observation.image):
        yield f"an observation whose image is {_kind(observation.image)}; it has to be uint8 [height, width, 3], or None"


def _step_problems(step: Any) -> Iterator[str]:
    if not isinstance(step, Step):
        yield f"{step!r:.80} instead of a Step"
        return
    yield from _observation_problems(step.observation)
    if not isinstance(step.reward, Real) or isinstance(step.reward, bool):
        yield f"the reward {step.reward!r}; it has to be a number"
    for name in ("done", "success"):
        if not isinstance(getattr(step, name), bool):
            yield f"{name} as {getattr(step, name)!r}; it has to be True or False"
    for name in ("valid", "truncated"):
        told = step.info.get(name) if isinstance(step.info, dict) else None
        if not isinstance(told, bool):
            yield f"info['{name}'] as {told!r}; it has to be True or False"


def _is_picture(image: Any) -> bool:
    return isinstance(image, np.ndarray) and image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3 and image.size > 0


def _kind(image: Any) -> str:
    return f"{image.dtype} {list(image.shape)}" if isinstance(image, np.ndarray) else repr(image)[:80]


def never_raises(tested: EnvUnderTest) -> Iterator[str]:
    """No answer, however odd, makes it raise."""
    yield from (f"{episode}: {episode.error}" for episode in tested.episodes if episode.error is not None)


def turns(tested: EnvUnderTest) -> Iterator[str]:
    """An episode is over after max_turns steps at the latest."""
    limit = tested.fresh.max_turns
    for episode in tested.episodes:
        if episode.error is None and not _is_done(episode):
            yield f"{episode}: not done after {len(episode.steps)} steps; max_turns is {limit}"


# --- how it ends and what it pays ---


def rewards(tested: EnvUnderTest) -> Iterator[str]:
    """Finite, and within reward_range where there is one."""
    low, high = getattr(tested.fresh, "reward_range", (-math.inf, math.inf))
    for episode, number, step in _all_steps(tested):
        if not math.isfinite(step.reward):
            yield f"{episode}: step {number} pays {step.reward}"
        elif not low - _TOLERANCE <= step.reward <= high + _TOLERANCE:
            yield f"{episode}: step {number} pays {step.reward}, outside of reward_range ({low}, {high})"


def success(tested: EnvUnderTest) -> Iterator[str]:
    """Success ends the episode."""
    for episode, number, step in _all_steps(tested):
        if step.success and not step.done:
            yield f"{episode}: step {number} is a success, but not done"


def truncation(tested: EnvUnderTest) -> Iterator[str]:
    """Running out of turns ends the episode."""
    for episode, number, step in _all_steps(tested):
        if step.info["truncated"] and not step.done:
            yield f"{episode}: step {number} is truncated, but not done"


def stop_reason(tested: EnvUnderTest) -> Iterator[str]:
    """An ended episode is a success, truncated, or else a failure: never two of them."""
    for episode, number, step in _all_steps(tested):
        if step.done and step.success and step.info["truncated"]:
            yield f"{episode}: step {number} is both a success and truncated"


def _all_steps(tested: EnvUnderTest) -> Iterator[tuple[EpisodeRecord, int, Step]]:
    return ((episode, number, step) for episode in tested.episodes for number, step in episode.proper_steps)


# --- determinism ---


def repeatability(tested: EnvUnderTest) -> Iterator[str]:
    """The same seed, env_seed and answers give the same episode: in another instance, and in the same one again."""
    for episode in tested.repeated:
        first, env = transcript(episode), tested.factory.make()
        for where in ("a fresh instance", "the same instance again"):
            found = difference(first, transcript(replay(env, episode)))
            if found is not None:
                yield f"{episode}, in {where}: {found}"
                break


def another_process(tested: EnvUnderTest) -> Iterator[str]:
    """And in another process, where strings hash otherwise."""
    try:
        make = tested.factory.pickled()
    except BadInput as error:
        raise NotApplicable(str(error)) from error
    played_elsewhere = transcripts_elsewhere(make, [episode.seed for episode in tested.repeated])
    for episode, elsewhere in zip(tested.repeated, played_elsewhere, strict=True):
        found = difference(transcript(episode), elsewhere)
        if found is not None:
            yield f"{episode}, in another process: {found}"


def seeds(tested: EnvUnderTest) -> Iterator[str]:
    """Not every seed is the same instance."""
    if len({identity for _, identity in identities(tested.factory.make(), range(INSTANCE_SEEDS))}) < 2:
        yield f"seeds 0 to {INSTANCE_SEEDS - 1} all give the same instance; draw it from the seed"


def env_seed(tested: EnvUnderTest) -> Iterator[str]:
    """`env_seed` does not change the instance."""
    env = tested.factory.make()
    first = dict(identities(env, range(ENV_SEED_SEEDS)))
    for number in (1, 2):
        for seed, identity in identities(env, range(ENV_SEED_SEEDS), env_seed=number):
            if identity != first[seed]:
                yield f"reset({seed}, env_seed={number}) is not the instance of reset({seed}); env_seed is for what happens in it"


def splits(tested: EnvUnderTest) -> Iterator[str]:
    """No instance is in two of train, validation and test."""
    if "split" not in tested.option_names:
        yield "it has no option 'split', which the trainer sets; derive Options from tether.envs.base.TurnOptions"
        return
    seen: dict[str, tuple[Split, int]] = {}
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        for seed, identity in identities(tested.factory.make(split=split), range(SPLIT_SEEDS)):
            other, other_seed = seen.setdefault(identity, (split, seed))
            if other is not split:
                yield f"seed {other_seed} of {other} and seed {seed} of {split} are the same: {identity[:60]!a}"


# --- how it looks ---


def rendering(tested: EnvUnderTest) -> Iterator[str]:
    """What is shown can be printed and stored: no control characters but those the agent wrote itself, no halves of surrogate pairs."""
    for episode in tested.episodes:
        written: set[str] = set()
        for answer, text in episode.texts:
            written |= set(answer)
            odd = [sign for sign in _CONTROL.findall(text) if sign not in written] + _HALF_PAIR.findall(text)
            if odd:
                yield f"{episode}: the observation holds {odd[0]!a}, which cannot be printed"
                break


def pictures(tested: EnvUnderTest) -> Iterator[str]:
    """In a mode with pictures there is one to see, the same for the same seed, and not the same for all states."""
    mode, make = "", tested.factory.make
    if getattr(tested.fresh, "shows_images", False) is not True:
        served = getattr(tested.fresh, "options", None)  # a dictionary, where a server plays
        if "observation" not in (served if isinstance(served, dict) else tested.option_names):
            raise NotApplicable("it has no image mode")
        mode, make = "with observation='image', ", partial(make, observation="image")
    try:
        env, again = make(), make()
    except (ConfigError, BadInput) as error:
        raise NotApplicable("it has no image mode") from error
    seen: dict[str, bytes] = {}
    for seed in range(PICTURE_SEEDS):
        with environment_boundary(f"reset({seed})"):
            image: Any = getattr(env.reset(seed), "image", None)
            twin: Any = getattr(again.reset(seed), "image", None)
            instance = str(getattr(env, "instance", seed))
        if not _is_picture(image):
            yield f"{mode}reset({seed}) gives the image {_kind(image)}; it has to be uint8 [height, width, 3]"
            return
        if not np.array_equal(image, twin):
            yield f"{mode}reset({seed}) gives one picture here and another one in a second environment"
        seen[instance] = image.tobytes()
    if mode and len(seen) > 1 and len(set(seen.values())) == 1:
        yield f"{mode}seeds 0 to {PICTURE_SEEDS - 1} are {len(seen)} instances that all have the same picture; draw what differs"
    played = [replay(env, episode) for episode in tested.repeated[:PICTURE_EPISODES]] if mode else []
    steps = [step for episode in played for _, step in episode.proper_steps if step.info.get("executed")]
    shown = {step.observation.image.tobytes() for step in steps if step.observation.image is not None}
    if len(steps) > 1 and len(shown) < 2:
        yield f"{mode}the picture is the same after all of {len(steps)} steps that executed actions; draw the state as it is now"


CHECKS = (
    Check("construction", construction),
    Check("attributes", attributes, ("construction",)),
    Check("instructions", instructions, ("attributes",)),
    Check("options", options, ("construction",)),
    Check("order of calls", order_of_calls, ("attributes",)),
    Check("types", types, ("attributes",)),
    Check("never raises", never_raises, ("attributes",)),
    Check("turns", turns, ("types",)),
    Check("rewards", rewards, ("types",)),
    Check("success", success, ("types",)),
    Check("truncation", truncation, ("types",)),
    Check("stop reason", stop_reason, ("types",)),
    Check("repeatability", repeatability, ("attributes",)),
    Check("another process", another_process, ("repeatability",)),
    Check("seeds", seeds, ("repeatability", "types", "never raises")),
    Check("env_seed", env_seed, ("repeatability", "types", "never raises")),
    Check("splits", splits, ("repeatability", "types", "never raises")),
    Check("rendering", rendering, ("types",)),
    Check("pictures", pictures, ("types",)),
)


NUM_EPISODES = 200
_MAX_VIOLATIONS = 3
"""Violations reported per check."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    check: str
    violations: tuple[str, ...] = ()
    skipped: str = ""
    """Why the check was skipped, if it was."""

    @property
    def ok(self) -> bool:
        return not self.violations


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What the checks found, in their order."""

    env: str
    results: tuple[CheckResult, ...]

    @property
    def ok(self) -> bool:
        """No check failed."""
        return all(result.ok for result in self.results)

    @property
    def failed(self) -> list[str]:
        """The names of the failed checks."""
        return [result.check for result in self.results if not result.ok]

    def __str__(self) -> str:
        if self.ok:
            passed = sum(1 for result in self.results if not result.skipped)
            return f"{self.env}: all {passed} checks pass"
        lines = [f"  {result.check}: {violation}" for result in self.results for violation in result.violations]
        return "\n".join([f"{self.env} fails {len(self.failed)} of {len(self.results)} checks", *lines])


def check_env(env: EnvSource, *, episodes: int = NUM_EPISODES, **options: Any) -> CheckReport:
    """Check an environment: a name with options, a class with options, or a callable that makes one.

    In a script, call it under `if __name__ == "__main__":`; one of the checks plays in another process.
    """
    refuse_while_main_is_imported()
    return run_checks(env_factory(env, options), episodes)


def run_checks(factory: EnvFactory, episodes: int = NUM_EPISODES, on_check: Callable[[str], None] | None = None) -> CheckReport:
    """Run every check; `on_check` is called with the name of each check before it runs."""
    tested = EnvUnderTest(factory, episodes)
    results: dict[str, CheckResult] = {}
    for check in CHECKS:
        if on_check is not None:
            on_check(check.name)
        results[check.name] = _run(check, tested, results)
    return CheckReport(factory.label, tuple(results.values()))


def _run(check: Check, tested: EnvUnderTest, before: dict[str, CheckResult]) -> CheckResult:
    missing = [name for name in check.requires if not before[name].ok or before[name].skipped]
    if missing:
        return CheckResult(check.name, skipped=f"requires {missing[0]}")
    try:
        with environment_boundary(check.name):
            return CheckResult(check.name, tuple(islice(check.violations(tested), _MAX_VIOLATIONS)))
    except EnvironmentFailure as failure:
        cause = failure.__cause__
        if isinstance(cause, NotApplicable):
            return CheckResult(check.name, skipped=str(cause))
        return CheckResult(check.name, (str(cause) if isinstance(cause, TetherError) else str(failure),))
