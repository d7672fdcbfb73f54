"""One environment played by one member of a group, as a conversation that an engine drives.

The episode feeds observations, takes completions, steps the environment and records every turn with its exact tokens. Whatever the
environment raises ends this episode with ENV_ERROR and its message; the other episodes continue. A concurrent environment is asked for
its answer only when the engine is about to feed it, so that many environments run at the same time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tether.core.enums import FinishReason, StopReason
from tether.core.errors import BadInput, EnvironmentFailure, environment_boundary
from tether.core.grammar import ANSWER_TAGS, parse_response
from tether.core.images import Image, image_digests, markers
from tether.core.protocols import (
    ContextReset,
    Env,
    PromptFuture,
    PromptTokens,
    checked_observation,
    checked_step,
    few_shot_of,
    finite_number,
    is_concurrent,
)
from tether.core.types import Completion, Observation, Step, Trajectory, Turn, with_marker
from tether.models.chat import PromptFormat
from tether.rollout.context import make_context

LARGEST_REWARD = 1e12
"""Of a step, and of a measure: sums and squares of it stay finite in single precision."""
LONGEST_TEXT = 1_000_000
"""Characters of an observation, and of the instructions."""


@dataclass(frozen=True, slots=True)
class EpisodeRules:
    """What every episode of a run has in common."""

    max_context: int
    """Tokens of a context; an episode whose next response would not fit ends with CONTEXT_FULL."""
    max_tokens: int
    """Budget of one response."""
    format_penalty: float
    """Added once per turn that is malformed or holds an illegal action; zero or negative."""
    context: str = "full"
    """What the model sees of earlier turns, see tether.rollout.context."""
    last_k: int = 1
    """Earlier turns that the context `last_k` shows."""
    overlong_buffer: int = 0
    """The last tokens of a response's budget, in which a penalty grows; 0 for none."""
    overlong_factor: float = 1.0
    """That penalty where the budget is used up, as a positive number."""
    first_turn_only: bool = False
    """The episode ends with its first response, and its environment takes no step."""


@dataclass(frozen=True, slots=True)
class EpisodeSeeds:
    """The place of an episode in its step, and its three seeds."""

    group: int
    member: int
    instance: int
    env_seed: int
    sampling: int
    env_index: int = 0
    """Which of the run's environments is played."""


Follow = Callable[[Trajectory], Sequence[EpisodeSeeds]]
"""Gets every episode that has ended, and says what is to be played after it."""


class Episode:
    """A Conversation over one environment."""

    def __init__(
        self, env: Env, chat: PromptFormat, seeds: EpisodeSeeds, rules: EpisodeRules, name: str = "", metrics: Sequence[str] = ()
    ) -> None:
        """`name` is what the run calls the environment, `metrics` the keys of its info whose last values are kept (0 where it has none)."""
        self._env = env
        self._concurrent = env if is_concurrent(env) else None
        self._chat = chat
        self._rules = rules
        self._seeds = seeds
        self._metrics = metrics
        self._context = make_context(rules.context, rules.last_k, chat)
        self._prompt: tuple[int, ...] = ()
        self._observation = ""
        self._images: dict[str, Image] = {}
        """All that were shown so far, by digest: a context that begins anew may show an earlier one again."""
        self._num_tokens = 0
        self.tags: tuple[str, ...] = getattr(env, "reply_tags", ANSWER_TAGS)
        """Those that an answer may stand between."""
        self.closing_tags = tuple(f"</{tag}>" for tag in self.tags)
        self.prefix_key = seeds.group
        self.uniforms = np.random.Generator(np.random.PCG64(seeds.sampling))
        self.trajectory = Trajectory(seeds.group, seeds.member, seeds.instance, [], StopReason.TURN_LIMIT, env=name)
        self.trajectory.measures = dict.fromkeys(metrics, 0.0)

    def begin(self) -> PromptTokens | PromptFuture:
        env, seeds = self._env, self._seeds
        if self._concurrent is not None:
            submitted = self._concurrent.submit_reset(seeds.instance, env_seed=seeds.env_seed)
            return lambda: self._open(submitted.result)
        return self._open(lambda: env.reset(seeds.instance, env_seed=seeds.env_seed))

    def receive(self, completion: Completion) -> PromptTokens | PromptFuture:
        turn, answer = self._read(completion)
        self.trajectory.turns.append(turn)
        self._num_tokens += len(turn.response_ids)
        if self._rules.first_turn_only:
            return None
        env = self._env
        if self._concurrent is not None:
            submitted = self._concurrent.submit_step(answer)
            return lambda: self._advance(turn, answer, submitted.result)
        return self._advance(turn, answer, lambda: env.step(answer))

    def _open(self, reset: Callable[[], Observation]) -> PromptTokens:
        """Show the first observation, once the environment has it."""
        try:
            with environment_boundary("reset"):
                shown = self._seen(checked_observation(reset()))
                instructions = _readable("instructions", self._env.instructions)
                few_shot = tuple((_readable("few_shot", seen), _readable("few_shot", reply)) for seen, reply in few_shot_of(self._env))
        except EnvironmentFailure as failure:
            self._fail(failure)
            return None
        self._check_eyes()
        return self._show(shown, self._context.begin(instructions, shown, few_shot))

    def _advance(self, turn: Turn, answer: str, take: Callable[[], Step]) -> PromptTokens:
        """Record the result of a turn, once the environment has it, and show the next observation."""
        try:
            with environment_boundary(f"step {len(self.trajectory.turns)}"):
                step = checked_step(take())
                turn.reward = _bounded("reward", step.reward)
                turn.valid = step.info.get("valid", True) and bool(answer)
                turn.lenient = turn.valid and (turn.lenient or step.info.get("lenient", False))
                shown = self._seen(step.observation)
                self.trajectory.categories = {str(key): str(value) for key, value in dict(step.info.get("categories", {})).items()}
                self.trajectory.measures = {key: _bounded(key, finite_number(key, step.info.get(key, 0.0))) for key in self._metrics}
        except EnvironmentFailure as failure:
            self._fail(failure)
            return None
        turn.penalty = 0.0 if turn.valid else self._rules.format_penalty
        if step.done:
            self._end(step)
            return None
        self._check_eyes()
        return self._show(shown, self._context.advance(turn, answer, shown))

    def _seen(self, observation: Observation) -> str:
        """What is shown, as a text: a picture stands in front of it as its marker."""
        text = _readable("observation", observation.text)
        if next(markers(text), None) is not None:
            raise ValueError("the text of the observation holds the marker of an image; give the picture as the observation's image")
        shown, image = with_marker(observation)
        if image is not None:
            self._images[image.digest] = image
        return shown

    def _read(self, completion: Completion) -> tuple[Turn, str]:
        """The turn as sampled, and the answer in it (empty if malformed)."""
        text = self._chat.decode(completion.token_ids)
        ended = completion.finish is FinishReason.END_OF_TURN
        # The token that ends the turn is no part of an answer that it closes.
        parsed = parse_response(self._chat.decode(completion.token_ids[:-1]) if ended else text, self.tags, ended=ended)
        span = None
        if parsed.reasoning_end is not None:
            span = (0, self._chat.tokens_before(completion.token_ids, parsed.reasoning_end))
        rules, length = self._rules, len(completion.token_ids)
        turn = Turn(
            context_ids=tuple(self._prompt),
            response_ids=completion.token_ids,
            logprobs=completion.logprobs,
            finish=completion.finish,
            text=text,
            reasoning_span=span,
            overlong=overlong_penalty(length, rules.max_tokens, rules.overlong_buffer, rules.overlong_factor),
            observation=self._observation,
            new_context=isinstance(self._prompt, ContextReset),
            lenient=parsed.unclosed,
            versions=completion.versions,
            usage=completion.usage,
            images=tuple(self._images[digest] for digest in dict.fromkeys((*image_digests(self._prompt), *markers(self._observation)))),
        )
        return turn, parsed.answer or ""

    def _check_eyes(self) -> None:
        """A mistake of the configuration, not of the environment: it ends everything, before anything is played."""
        if self._images and not self._chat.sees:
            raise BadInput(
                f"environment '{self.trajectory.env or self._env.name}' shows images, and the model reads text only; "
                "choose a model that reads images, or a text observation, such as env.options.observation=grid"
            )

    def _show(self, observation: str, prompt: tuple[int, ...]) -> PromptTokens:
        """The prompt with the next observation, if a response to it still fits into the context."""
        self._num_tokens = len(prompt) + (0 if isinstance(prompt, ContextReset) else self._num_tokens)
        if self._num_tokens + self._rules.max_tokens > self._rules.max_context:
            self.trajectory.stop_reason = StopReason.CONTEXT_FULL
            return None
        self._prompt, self._observation = prompt, observation
        return prompt

    def _end(self, step: Step) -> None:
        self.trajectory.success = step.success
        if step.success:
            self.trajectory.stop_reason = StopReason.SUCCESS
        else:
            self.trajectory.stop_reason = StopReason.TURN_LIMIT if step.info.get("truncated") else StopReason.FAILURE

    def _fail(self, failure: EnvironmentFailure) -> None:
        self.trajectory.stop_reason = StopReason.ENV_ERROR
        self.trajectory.error = str(failure)


def overlong_penalty(length: int, max_tokens: int, buffer: int, factor: float = 1.0) -> float:
    """DAPO's soft overlong punishment (arXiv 2503.14476, equation 13): 0 up to max_tokens - buffer, then linear, -factor at max_tokens.

    A response close to its limit is penalised before it is cut off. Without a buffer there is no penalty.
    """
    overlong = min(max(length - (max_tokens - buffer), 0), buffer)
    return -factor * overlong / buffer if overlong else 0.0


def _bounded(what: str, number: float) -> float:
    """A number that can be averaged; a larger one is the environment's error."""
    if not abs(number) <= LARGEST_REWARD:
        raise ValueError(f"the {what} is {number:g}; it must be a number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}")
    return number


def _readable(what: str, value: object) -> str:
    """Text that can be tokenised and written down; anything else is the environment's error."""
    text = str(value)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"the {what} has {len(text)} characters; a model reads far fewer, and {LONGEST_TEXT} are the most that are taken")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} holds half a character ({text[error.start]!a} at {error.start}), which is no text") from None
    return text
