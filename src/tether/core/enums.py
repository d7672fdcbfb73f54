"""Closed vocabularies: why an episode ended, and which reasoning regime a run is in.

Each value is a plain string, so records written to disk read the same as they compare in code.
"""

from enum import StrEnum


class StopReason(StrEnum):
    """Why an episode ended. Running out of budget is never confused with failing."""

    SUCCESS = "success"
    """The environment ended the episode and the task was solved."""
    FAILURE = "failure"
    """The environment ended the episode and the task was not solved (a hole, a wrong final answer)."""
    TURN_LIMIT = "turn_limit"
    """The turns were used up before the environment ended the episode."""
    CONTEXT_FULL = "context_full"
    """The next turn would not have fitted into the model's context."""
    ENV_ERROR = "env_error"
    """The environment raised; the message is on the trajectory."""
    MODEL_ERROR = "model_error"
    """The server of the model refused a request or failed; the message is on the trajectory."""
    UNKNOWN = "unknown"
    """The log of another trainer does not say."""


ERRORED = frozenset([StopReason.ENV_ERROR, StopReason.MODEL_ERROR])
"""How an episode ends that is no evidence."""
TRUNCATED = frozenset([StopReason.TURN_LIMIT, StopReason.CONTEXT_FULL])
"""How an episode ends that was cut: its environment would have gone on."""


class Decision(StrEnum):
    """What became of a prompt once its first members had ended (rollout/early_decision.py)."""

    CONTINUED = "continued"
    """Worth the other members: the group is whole."""
    EXPLORED = "explored"
    """Not worth them, and played whole by the share of exploration."""
    NOT_CONTINUED = "not_continued"
    """Not worth them: the group ends with its first members."""
    SURPLUS = "surplus"
    """Started beside a prompt that was continued in its place: the group ends with its first members."""


class FinishReason(StrEnum):
    """Why the model stopped writing one response."""

    STOP_TEXT = "stop_text"
    """The closing answer tag was written."""
    END_OF_TURN = "end_of_turn"
    """The model emitted its end-of-turn token."""
    LENGTH = "length"
    """The token budget of the turn was used up."""


REGIME_FRACTION = 0.5
"""An axis of the regime plane is called low once it has fallen below this share of the run's start."""


class Regime(StrEnum):
    """Where a run stands on the plane (H(Z|X), I(X;Z)), relative to its own start (paper, figure 1)."""

    DIVERSE = "diverse reasoning"
    """High conditional entropy, high information: varied within an input, different across inputs."""
    TEMPLATE_COLLAPSE = "template collapse"
    """High conditional entropy, low information: looks varied, ignores the input."""
    COMPRESSED = "compressed reasoning"
    """Low conditional entropy, high information: terse and still tied to the input."""
    LOW_ENTROPY_COLLAPSE = "low-entropy collapse"
    """Low conditional entropy, low information: one fixed text for everything."""


class Scope(StrEnum):
    """Which turns diagnosis takes reasonings from (diagnostics/pairs.py)."""

    FIRST_TURN = "first_turn"
    """The first turn of every trajectory: one column per prompt."""
    TRAJECTORY = "trajectory"
    """A trajectory drawn uniformly, then one of its turns: every drawn context is a column."""
    TURN = "turn"
    """A turn drawn uniformly from all turns: every drawn context is a column."""


class Split(StrEnum):
    """The three disjoint pools every environment draws its instances from, and all of them together."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"
    ALL = "all"
    """Every instance: for a data file that is itself a test set."""
