"""One environment played by one member of a group, as a dialogue that an engine drives.

The episode feeds observations, takes completions, steps the environment and writes down every turn with the exact tokens. Whatever
the environment raises ends this episode with ENV_ERROR and its message; the other episodes do not notice. An environment that can
run beside others is only asked for its answer when the engine is about to feed it, so that many wait at the same time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tether.core.enums import StopReason
from tether.core.errors import EnvironmentFailure, environment_boundary
from tether.core.grammar import ANSWER_TAGS, parse_response
from tether.core.protocols import ConcurrentEnv, Env, Feed, Pending
from tether.core.types import Completion, Observation, Step, Trajectory, Turn
from tether.models.chat import ChatFormat


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """What every episode of a run has in common."""

    max_context: int
    """Tokens of a conversation; an episode whose next response would not fit ends with CONTEXT_FULL."""
    max_tokens: int
    """Budget of one response."""
    format_penalty: float
    """Added once per turn that is malformed or holds an illegal action; zero or negative."""


@dataclass(frozen=True, slots=True)
class EpisodeSeeds:
    """Where an episode stands in its step, and its three sources of chance."""

    group: int
    member: int
    instance: int
    luck: int
    sampling: int


class Episode:
    """A Dialogue over one environment."""

    def __init__(self, env: Env, chat: ChatFormat, seeds: EpisodeSeeds, rules: EpisodeRules) -> None:
        self._env = env
        self._chat = chat
        self._rules = rules
        self._seeds = seeds
        self._context: tuple[int, ...] = ()
        self._observation = ""
        self._num_tokens = 0
        self._tags: tuple[str, ...] = getattr(env, "reply_tags", ANSWER_TAGS)
        self.closing_tags = tuple(f"</{tag}>" for tag in self._tags)
        self.prefix_key = seeds.group
        self.uniforms = np.random.Generator(np.random.PCG64(seeds.sampling))
        self.trajectory = Trajectory(seeds.group, seeds.member, seeds.instance, turns=[], stop_reason=StopReason.TURN_LIMIT)

    def begin(self) -> Feed | Pending:
        env, seeds = self._env, self._seeds
        if isinstance(env, ConcurrentEnv):
            submitted = env.submit_reset(seeds.instance, luck=seeds.luck)
            return lambda: self._open(submitted.result)
        return self._open(lambda: env.reset(seeds.instance, luck=seeds.luck))

    def receive(self, completion: Completion) -> Feed | Pending:
        turn, answer = self._read(completion)
        self.trajectory.turns.append(turn)
        self._num_tokens += len(turn.response_ids)
        env = self._env
        if isinstance(env, ConcurrentEnv):
            submitted = env.submit_step(answer)
            return lambda: self._advance(turn, answer, submitted.result)
        return self._advance(turn, answer, lambda: env.step(answer))

    def _open(self, reset: Callable[[], Observation]) -> Feed:
        """Show the first observation, once the environment has it."""
        try:
            with environment_boundary("reset"):
                shown = str(reset().text)
                instructions = str(self._env.instructions)
        except EnvironmentFailure as failure:
            self._fail(failure)
            return None
        return self._show(shown, self._chat.first_prompt(instructions, shown))

    def _advance(self, turn: Turn, answer: str, take: Callable[[], Step]) -> Feed:
        """Write down what a turn brought, once the environment says so, and show what comes next."""
        try:
            with environment_boundary(f"step {len(self.trajectory.turns)}"):
                step = take()
                turn.reward = _finite(step.reward)
                turn.valid = bool(step.info.get("valid", True)) and bool(answer)
                shown = str(step.observation.text)
        except EnvironmentFailure as failure:
            self._fail(failure)
            return None
        turn.penalty = 0.0 if turn.valid else self._rules.format_penalty
        if step.done:
            self._end(step)
            return None
        return self._show(shown, self._chat.next_prompt(shown, turn.response_ids))

    def _read(self, completion: Completion) -> tuple[Turn, str]:
        """The turn as sampled, and the answer in it (empty if malformed)."""
        text = self._chat.decode(completion.token_ids)
        parsed = parse_response(text, self._tags)
        span = None
        if parsed.reasoning_end is not None:
            span = (0, self._chat.tokens_before(completion.token_ids, parsed.reasoning_end))
        turn = Turn(
            context_ids=self._context,
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            text=text,
            reasoning_span=span,
            observation=self._observation,
        )
        return turn, parsed.answer or ""

    def _show(self, observation: str, context: tuple[int, ...]) -> Feed:
        """Put the next observation before the model, if a response to it still fits."""
        self._num_tokens += len(context)
        if self._num_tokens + self._rules.max_tokens > self._rules.max_context:
            self.trajectory.stop_reason = StopReason.CONTEXT_FULL
            return None
        self._context, self._observation = context, observation
        return context

    def _end(self, step: Step) -> None:
        self.trajectory.success = bool(step.success)
        if step.success:
            self.trajectory.stop_reason = StopReason.SUCCESS
        else:
            self.trajectory.stop_reason = StopReason.TURN_LIMIT if step.info.get("truncated") else StopReason.FAILURE

    def _fail(self, failure: EnvironmentFailure) -> None:
        self.trajectory.stop_reason = StopReason.ENV_ERROR
        self.trajectory.error = str(failure)


def _finite(reward: float) -> float:
    """A reward that can be averaged; anything else is the environment's error."""
    value = float(reward)
    if not math.isfinite(value):
        raise ValueError(f"the reward is {value}")
    return value
