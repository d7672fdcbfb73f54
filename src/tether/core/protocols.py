"""The contracts between the layers, as structural types.

Env and Conversation are what the rollout drives; Engine is what samples; Scorer is all that diagnosis needs of a model; Communicator is what
divides work among the processes of a run.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Protocol, TypeGuard, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from tether.core.text import short_repr
from tether.core.types import Completion, Exchanges, Observation, Step

Part = TypeVar("Part")


@runtime_checkable
class Env(Protocol):
    """A task for an agent: reset with a seed, then step with answers until done."""

    name: str
    max_turns: int

    @property
    def instructions(self) -> str:
        """The rules of the task, for the system message."""
        ...

    def reset(self, seed: int, *, env_seed: int | None = None) -> Observation:
        """Start the instance of this seed. `env_seed` seeds the randomness inside the episode; by default it follows from the seed."""
        ...

    def step(self, answer: str) -> Step:
        """Execute one answer (the text between the answer tags; empty if the response was malformed)."""
        ...


def few_shot_of(env: Env) -> Exchanges:
    """Examples that the environment shows as turns in front of its first observation, its attribute `few_shot`; none where it has no such one."""
    few_shot = getattr(env, "few_shot", ())
    pairs = isinstance(few_shot, Sequence) and all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in few_shot)
    if not pairs or not all(isinstance(text, str) for pair in few_shot for text in pair):
        raise TypeError(f"few_shot is {few_shot!r:.80}; it has to be pairs of texts: what was shown, and the reply to it")
    return tuple((shown, reply) for shown, reply in few_shot)


def checked_observation(value: Any) -> Observation:
    """What `reset` returned, or a step shows; TypeError for anything that is no observation with a text."""
    if not isinstance(value, Observation):
        raise TypeError(f"it gave {short_repr(value)} where an Observation belongs; return tether.Observation(text)")
    if not isinstance(value.text, str):
        raise TypeError(f"the text of an observation is {short_repr(value.text)}; it must be a text")
    return value


def checked_step(value: Any) -> Step:
    """What `step` returned, as plain Python values; TypeError or ValueError for anything that cannot be learned from. Every episode's steps pass
    here: those of environments in this process, in others, and behind a server."""
    if not isinstance(value, Step):
        raise TypeError(f"it gave {short_repr(value)} where a Step belongs; return tether.Step(observation, reward, done, success, info)")
    checked_observation(value.observation)
    if not isinstance(value.info, Mapping):
        raise TypeError(f"info is {short_repr(value.info)}; it must be a dictionary")
    flags: dict[str, bool] = {
        name: truth_value(f"info['{name}']", value.info[name]) for name in ("valid", "truncated", "lenient") if name in value.info
    }
    done, success = truth_value("done", value.done), truth_value("success", value.success)
    return Step(value.observation, finite_number("the reward", value.reward), done, success, {**value.info, **flags})


def finite_number(what: str, value: Any) -> float:
    """A number from an environment; those of numpy and torch are taken."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(plain, Real):
        raise TypeError(f"{what} is {short_repr(value)}; it must be a number")
    if not math.isfinite(plain):
        raise ValueError(f"{what} is {plain}; it must be a finite number")
    return float(plain)


def truth_value(what: str, value: Any) -> bool:
    """True or False from an environment; those of numpy and torch are taken."""
    plain = value.item() if getattr(value, "ndim", None) == 0 else value
    if not isinstance(plain, bool):
        raise TypeError(f"{what} is {short_repr(value)}; it must be True or False")
    return plain


@runtime_checkable
class ConcurrentEnv(Env, Protocol):
    """An Env that also takes calls without blocking; a future that fails holds an EnvironmentFailure."""

    def submit_reset(self, seed: int, env_seed: int | None = None) -> Future[Observation]: ...

    def submit_step(self, answer: str) -> Future[Step]: ...


def is_concurrent(env: Env) -> TypeGuard[ConcurrentEnv]:
    """Whether an environment takes calls without blocking. `isinstance` would compute every property of it, instructions included."""
    return hasattr(env, "submit_reset") and hasattr(env, "submit_step")


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are sampled."""

    temperature: float = 1.0
    """0 takes the most likely token."""
    max_tokens: int = 400
    """Budget of one response."""
    top_k: int = 0
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Of these, from the fewest most likely that together have this share of their probability; 1 for all."""
    min_p: float = 0.0
    """Of these, from tokens with at least this share of the most likely one's probability; 0 for all."""
    stop_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of token ids that end a response."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end a response, beside the closing tags of its conversation."""

    @property
    def truncates(self) -> bool:
        """Whether some tokens may be excluded from a draw."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


class ContextReset(tuple[int, ...]):
    """Tokens that begin a new context: the engine forgets whatever was fed and sampled before."""

    __slots__ = ()


PromptTokens = tuple[int, ...] | None
"""Tokens to feed before the next response (after all that came before, unless ContextReset), or None when the conversation is over."""

PromptFuture = Callable[[], PromptTokens]
"""Prompt tokens that are not there yet: calling it waits for the environment. An engine calls it when it would feed the conversation."""


def settled(prompt: PromptTokens | PromptFuture) -> PromptTokens:
    """Prompt tokens, once the environment has answered."""
    return prompt() if callable(prompt) else prompt


class Conversation(Protocol):
    """A multi-turn exchange that an engine drives: it receives completions and returns the next tokens to feed."""

    @property
    def prefix_key(self) -> int:
        """Conversations with equal keys begin with the same tokens; an engine may compute that prefix once."""
        ...

    @property
    def uniforms(self) -> np.random.Generator:
        """The source of this conversation's token draws, so that a sample does not depend on its batch."""
        ...

    @property
    def closing_tags(self) -> tuple[str, ...]:
        """Texts that end a response, such as "</answer>"."""
        ...

    def begin(self) -> PromptTokens | PromptFuture:
        """The first tokens to feed, or None if there is nothing to say."""
        ...

    def receive(self, completion: Completion) -> PromptTokens | PromptFuture:
        """Take a response; return the tokens to feed before the next one, or None when the conversation is over."""
        ...


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    """What an engine can do, for callers that depend on it."""

    per_conversation_uniforms: bool
    """Token draws come from the conversation's own generator: same seed, same trajectory, whatever the batch."""
    prefix_sharing: bool
    """A prompt that conversations have in common is computed once."""
    weight_sync: bool
    """`sync` makes the engine sample from the policy's current weights. Training needs it."""
    logprobs: bool
    """Completions carry the log-prob of every sampled token. Training needs them."""
    shares_weights: bool = False
    """The engine runs on the learner's own tensors: behavior and old log-probs agree up to rounding."""


@dataclass(slots=True)
class EngineStatistics:
    """What one run of an engine did."""

    sampled_tokens: int = 0
    """Tokens of responses."""
    fed_tokens: int = 0
    """Tokens of prompts and observations that were computed."""
    shared_tokens: int = 0
    """Tokens of prompts that were not computed, because the cache held them: another member of the group, or another conversation."""
    dropped_tokens: int = 0
    """Tokens drawn past the end of a response."""
    evictions: int = 0
    """How often a row lost its cache because memory ran out."""
    recomputed_tokens: int = 0
    """Of the fed tokens, those that had been evicted."""
    decode_calls: int = 0
    drafts: int = 0
    """How often the next tokens of a conversation were guessed."""
    accepted_tokens: int = 0
    """Guessed tokens that were right."""

    def __add__(self, other: "EngineStatistics") -> "EngineStatistics":
        return EngineStatistics(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})


def server_addresses(engine: str) -> list[str]:
    """The addresses that the name of an engine holds; none where it is a name.

    >>> server_addresses("http://a:8000, http://b:8000"), server_addresses("native")
    (['http://a:8000', 'http://b:8000'], [])
    """
    return [address.strip() for address in engine.split(",")] if "://" in engine else []


class FollowUp(Protocol):
    """What a run of an engine goes on with: it gets each conversation that has ended, and returns conversations to drive as well."""

    @property
    def num_open(self) -> int:
        """Conversations that it lets live at a time, at most."""
        ...

    def __call__(self, ended: Conversation) -> Sequence[Conversation]: ...


class Engine(Protocol):
    """Samples responses for conversations. `rollout.engines.registry.make_engine` builds one by name."""

    @property
    def capabilities(self) -> EngineCapabilities: ...

    @property
    def backend(self) -> str:
        """Which implementation serves the model, for records and people."""
        ...

    @property
    def statistics(self) -> EngineStatistics:
        """Of the latest run."""
        ...

    def run(
        self,
        conversations: Sequence[Conversation],
        sampling: Sampling,
        on_finished: Callable[[], None] | None = None,
        follow_up: FollowUp | None = None,
    ) -> None:
        """Drive every conversation to its end, and what `follow_up` adds; `on_finished` is called once for each."""
        ...

    def sync(self, version: int | None = None) -> dict[str, float]:
        """Take over the policy's current weights (nothing to do where they are the same tensors); returns numbers for the "update/" metrics.

        `version` is the step that the weights come from; None counts up.
        """
        ...

    def free(self) -> None:
        """Release memory that the next run can take again."""
        ...


@runtime_checkable
class AsyncEngine(Engine, Protocol):
    """An engine with weights of its own, which can sample while the learner changes the policy's."""

    @property
    def version(self) -> int | None:
        """Of the weights that were published last; None before the first time."""
        ...

    def snapshot(self, version: int) -> Any:
        """A copy of the policy's current weights, for `publish`; called by the thread that trains."""
        ...

    def publish(self, snapshot: Any) -> dict[str, float]:
        """As `sync`, with the weights of a snapshot; the policy is not looked at."""
        ...

    def adopt(self, snapshot: Any) -> None:
        """Go on with a snapshot of the weights that were published last: from here on the policy, which `sync` published, may change."""
        ...

    def republish(self) -> dict[str, float]:
        """Publish again what was published last: a server has lost it. All ranks call it together."""
        ...

    def take_notes(self) -> list[str]:
        """What happened to its servers since the last call, for the record."""
        ...

    def cancel(self) -> None:
        """Let whatever the engine does in another thread end soon, with an error. The engine is not used again."""
        ...


@runtime_checkable
class Scorer(Protocol):
    """log p(z | x) of a reasoning after a prompt, both as token ids."""

    def score(self, prompt: Sequence[int], reasoning: Sequence[int]) -> float: ...


@runtime_checkable
class BatchScorer(Protocol):
    """A scorer that scores many reasonings after one prompt at once, computing the prompt a single time."""

    def score_many(self, prompt: Sequence[int], reasonings: Sequence[Sequence[int]]) -> npt.NDArray[np.float64]: ...


class Communicator(Protocol):
    """The processes (ranks) that a run is divided among. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this process, from 0."""
        ...

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    def share(self, part: Callable[[], Part]) -> list[Part]:
        """Do this rank's part of some work; returns the parts of all ranks, in the order of the ranks. What fails on one rank is raised on
        every rank."""
        ...


class SingleProcess:
    """The only process of a run: its part is the whole."""

    rank = 0
    size = 1

    def share(self, part: Callable[[], Part]) -> list[Part]:
        return [part()]
