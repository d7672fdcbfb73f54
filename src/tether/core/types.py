"""The typed records of the data flow, one per stage: Observation and Step -> Turn -> Trajectory -> Group.

A trajectory carries the very token ids that were sampled, their log-probs at the sampling temperature, the loss mask and the
span of the reasoning. Nothing downstream re-tokenises text or rebuilds a mask: packing, filtering and diagnosis read these fields.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tether.core.enums import Decision, FinishReason, StopReason
from tether.core.images import Image

Exchanges = tuple[tuple[str, str], ...]
"""Turns of a conversation as text: what was shown, and the whole reply to it, from its opening think tag on."""
AGENT = "agent"
"""How records call the environment of a user's own agent."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What the agent is shown: the text of a user message and, in image mode, a picture."""

    text: str
    image: npt.NDArray[np.uint8] | None = None
    """RGB, [height, width, 3]."""


def with_marker(observation: Observation) -> tuple[str, Image | None]:
    """What is shown, as a text: a picture stands in front of it as its marker."""
    if observation.image is None:
        return observation.text, None
    image = Image.of(observation.image)
    return f"{image.marker}\n{observation.text}", image


@dataclass(frozen=True, slots=True)
class Step:
    """What the environment says to one answer."""

    observation: Observation
    reward: float
    """Sum of the rewards of the actions executed in this step."""
    done: bool
    """The episode is over, for whatever reason."""
    success: bool
    """The task is solved; implies done."""
    info: dict[str, Any] = field(default_factory=dict)
    """Always holds `valid` (the answer was a clean action) and `truncated` (ended because turns ran out)."""


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens of one response, as the server that wrote it counts them."""

    prompt_tokens: int
    completion_tokens: int
    """Reasoning included, also where the server does not show it."""
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that the server did not have to compute."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One response as the engine sampled it."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """log p of each sampled token at the sampling temperature."""
    finish: FinishReason
    versions: tuple[int, ...] = ()
    """Of an engine with weights of its own: the step whose weights sampled each token. Empty where the weights are the learner's own."""
    usage: Usage | None = None
    """Of a model behind a chat endpoint, whose tokens are not known here: what its server counted, where it does."""


@dataclass(slots=True)
class Turn:
    """One exchange: the tokens fed, the tokens sampled, and what came of them.

    Example: context_ids end with the tokens of "<think>"; response_ids decode to " go right </think> <answer> Right </answer>";
    reasoning_span (0, 3) says that response_ids[0:3] are the thoughts.
    """

    context_ids: tuple[int, ...]
    """Tokens fed since the previous response (the whole prompt where the turn begins a new context), up to and including the opening think tag."""
    response_ids: tuple[int, ...]
    """The sampled tokens, exactly."""
    logprobs: tuple[float, ...]
    """One per response token, at the sampling temperature."""
    finish: FinishReason
    text: str
    """The response decoded, for people and for the parser."""
    reasoning_span: tuple[int, int] | None
    """Start and end in response_ids of the reasoning, tags excluded; None if the think tag was never closed."""
    reward: float = 0.0
    """What the environment paid for this turn."""
    penalty: float = 0.0
    """Format penalty (zero or negative), kept apart from the reward."""
    overlong: float = 0.0
    """Penalty of a response that comes near its budget (zero or negative), kept apart from both."""
    valid: bool = False
    """The response was well formed and every action in it was legal."""
    observation: str = ""
    """The text the environment showed before this response; a picture stands in it as its marker (core/images.py)."""
    new_context: bool = False
    """context_ids begin a new context: nothing that came before is seen. The first turn always is."""
    versions: tuple[int, ...] = ()
    """The step whose weights sampled each token, see `Completion`."""
    lenient: bool = False
    """The response is valid only because the environment read it leniently ("Up, Left" for "Up || Left")."""
    usage: Usage | None = None
    """Of a model behind a chat endpoint, see `Completion`; its turns have no token ids."""
    calls_span: tuple[int, int] | None = None
    """Start and end in response_ids of the tool calls; None where there is none."""
    trained: bool = True
    """The response takes part in the loss. One that does not is context to the turns behind it."""
    images: tuple[Image, ...] = ()
    """The pictures among context_ids: they are known as long as a turn holds them."""

    @property
    def reasoning_ids(self) -> tuple[int, ...]:
        return self.response_ids[slice(*self.reasoning_span)] if self.reasoning_span else ()

    @property
    def calls_ids(self) -> tuple[int, ...]:
        return self.response_ids[slice(*self.calls_span)] if self.calls_span else ()

    @property
    def lead_ids(self) -> tuple[int, ...]:
        """What was sampled before the reasoning: nothing, unless the model opens the think tag itself."""
        return self.response_ids[: self.reasoning_span[0]] if self.reasoning_span else ()

    @property
    def num_tokens(self) -> int:
        """Tokens of the response."""
        return len(self.response_ids) if self.usage is None else self.usage.completion_tokens

    @property
    def earned(self) -> float:
        """This turn's part of the return: reward and penalties."""
        return self.reward + self.penalty + self.overlong


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Consecutive turns of an episode that share one context: one forward pass reads them all. One row of a training batch."""

    turns: tuple[Turn, ...]

    @property
    def token_ids(self) -> list[int]:
        """Every token in order."""
        return [token for turn in self.turns for token in (*turn.context_ids, *turn.response_ids)]

    @property
    def loss_mask(self) -> list[bool]:
        """True where token_ids holds a sampled token that is trained."""
        return [flag for turn in self.turns for flag in [False] * len(turn.context_ids) + [turn.trained] * len(turn.response_ids)]

    @property
    def sampled_logprobs(self) -> list[float]:
        """Aligned with token_ids; 0 outside the loss mask."""
        values = ((turn, turn.logprobs if turn.trained else (0.0,) * len(turn.response_ids)) for turn in self.turns)
        return [value for turn, sampled in values for value in (*[0.0] * len(turn.context_ids), *sampled)]

    @property
    def turn_ends(self) -> list[int]:
        """The place in token_ids of each turn's last token."""
        return list(itertools.accumulate((len(turn.context_ids) + len(turn.response_ids) for turn in self.turns), initial=-1))[1:]

    @property
    def num_tokens(self) -> int:
        return sum(len(turn.context_ids) + len(turn.response_ids) for turn in self.turns)

    @property
    def has_trained(self) -> bool:
        """Whether any sampled token is trained."""
        return any(turn.trained and turn.response_ids for turn in self.turns)


@dataclass(slots=True)
class Trajectory:
    """One episode of one member of a group."""

    group: int
    """Index of the group within the step."""
    member: int
    """Index of the member within the group."""
    seed: int
    """The instance played; equal for all members of a group."""
    turns: list[Turn]
    stop_reason: StopReason
    success: bool = False
    error: str | None = None
    """What went wrong, where stop_reason is ENV_ERROR or MODEL_ERROR."""
    env: str = ""
    """The environment played, as the run calls it."""
    measures: dict[str, float] = field(default_factory=dict)
    """The environment's own numbers after the last step, such as a score; 0 where it never came to one."""
    retries: int = 0
    """How often the episode was played before, because an environment error ended it."""
    categories: dict[str, str] = field(default_factory=dict)
    """What kind of instance it is, where the environment says so. Example: {"subject": "Algebra", "level": "5"}."""

    @property
    def reward(self) -> float:
        """The episode's return: rewards and penalties of all turns."""
        return sum(turn.earned for turn in self.turns)

    @property
    def sequences(self) -> list[TokenSequence]:
        """The episode cut before each turn that begins a new context: a single sequence where the whole history is kept."""
        cuts = [n for n, turn in enumerate(self.turns) if n == 0 or turn.new_context]
        return [TokenSequence(tuple(self.turns[first:last])) for first, last in itertools.pairwise([*cuts, len(self.turns)])]

    @property
    def num_sampled(self) -> int:
        return sum(turn.num_tokens for turn in self.turns)

    @property
    def has_trained(self) -> bool:
        """Whether any sampled token is trained."""
        return any(turn.trained and turn.num_tokens for turn in self.turns)

    @property
    def mean_nll(self) -> float:
        """Mean of -log p over the sampled tokens: an estimate of the policy's entropy along this episode."""
        return -sum(value for turn in self.turns for value in turn.logprobs) / max(1, self.num_sampled)


@dataclass(slots=True)
class Group:
    """All trajectories of one prompt.

    An errored rollout is no evidence: it stands in `errored` and takes no part in scores, baselines, loss or success rates. A server that is
    down for half of a group would otherwise look like reward variance, which the filter seeks.
    """

    index: int
    seed: int
    trajectories: list[Trajectory]
    """Those that ended without an error; may be empty."""
    errored: list[Trajectory] = field(default_factory=list)
    """Those that an error of the environment or of the model's server ended, for the record."""
    env: str = ""
    """The environment played, as the run calls it."""
    choice: dict[str, Any] = field(default_factory=dict)
    """Which prompt it is and why it was chosen, in a run with prompt memory. Example: {"prompt": "row 17", "why": "new", "expected": 0.2}."""
    decision: Decision | None = None
    """What was decided after its first members; None where nothing is decided early."""

    @property
    def is_whole(self) -> bool:
        """Whether all its members were played."""
        return self.decision not in (Decision.NOT_CONTINUED, Decision.SURPLUS)

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.trajectories]

    @property
    def successes(self) -> list[bool]:
        return [trajectory.success for trajectory in self.trajectories]
