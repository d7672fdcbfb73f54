"""Settings of diagnosis: what is measured and how often, when an alarm is raised, and what an alarm sets off.

The defaults of `AlarmRules` were chosen on simulated healthy runs of 200 steps (8 prompts, 16 trajectories each): fewer than one run in
twenty raises any alarm. A collapse is then seen one window after it happened. Shorter windows see it sooner and raise more false alarms.
"""

import math
from enum import StrEnum
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator

from tether.core.alarms import AlarmName, Severity
from tether.core.config import Settings
from tether.core.enums import REGIME_FRACTION, Scope
from tether.core.errors import did_you_mean

POLICY, REFERENCE = "policy", "reference"
"""Scorers that are not the name of a model."""

Positive = Annotated[int, Field(ge=1)]
Cadence = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
WindowSize = Annotated[int, Field(ge=2)]


class GradientSettings(Settings):
    """The gradient decomposition: task against regulariser, by the reward variance of the prompts."""

    every: Cadence = 0
    """Steps between decompositions; 0 turns them off."""
    prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts that are played only for the decomposition; 0 uses the step's own prompts, before the filter."""
    buckets: Positive = 6
    """Buckets into which prompts are sorted by reward variance."""
    parameters: str | list[str] = "last"
    """`all`, `last` (the last layer, cheap), or names of parameters or modules."""
    bound: bool = True
    """Also check the Cauchy-Schwarz bound: one backward pass per trajectory."""


class DiagnosisSettings(Settings):
    """What is measured, how often, by which scorer and at what cost."""

    every: Cadence = 5
    """Steps between measurements of the information proxies; 0 turns them off."""
    scopes: list[Scope] = [Scope.FIRST_TURN, Scope.TRAJECTORY]
    """The first turn is always measured; `trajectory` and `turn` draw from all turns."""
    contexts: Annotated[int, Field(ge=8)] = 32
    """Contexts that the other scopes draw; each context is a column."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Largest share of a run's work that measuring may take, in tokens computed; fewer reasonings are scored to stay inside."""
    probe_prompts: Annotated[int, Field(ge=0)] = 0
    """Validation prompts of the fixed probe on which the first turn is measured; 0 measures it on the step's own groups."""
    probe_samples: Positive = 4
    """Reasonings sampled for each prompt of the probe; fewer where the budget is short."""
    scorer: str = POLICY
    """The scorer: `policy`, `reference` (the model the run started from), another model by name, or the address of a server."""
    gradients: GradientSettings = GradientSettings()

    @field_validator("scopes")
    @classmethod
    def _scopes(cls, scopes: list[Scope]) -> list[Scope]:
        if Scope.FIRST_TURN not in scopes or len(set(scopes)) < len(scopes):
            raise ValueError("should name first_turn, which regimes and alarms need, and each scope once")
        return scopes

    @field_validator("probe_prompts")
    @classmethod
    def _prompts_can_be_told_apart(cls, prompts: int) -> int:
        if prompts == 1:
            raise ValueError("is one prompt, which has no other to be told apart from; give 2 or more, or 0 for the step's own groups")
        return prompts


class AlarmRules(Settings):
    """The parameters of all alarms: how much must change, over how many steps, and with what confidence."""

    start_steps: WindowSize = 10
    """Number of steps in the run's start, and in its best stretch."""
    recent_steps: WindowSize = 8
    """Number of recent steps that are compared with the start."""
    step_p: Share = 0.002
    """Largest p-value of the rank-sum test between the two windows, for metrics of every step."""
    start_measurements: WindowSize = 5
    """The information section is measured every `diagnosis.every` steps: its start has at least this many measurements ..."""
    recent_measurements: WindowSize = 4
    """... and this many recent measurements are compared with it, however many steps they span."""
    measured_p: Share = 0.01
    """Largest p-value for the information section; few measurements cannot reach less."""
    information_share: Share = REGIME_FRACTION
    """Information has fallen where its median is at most this share of its best stretch."""
    entropy_rise: Annotated[float, Field(gt=1)] = 1.1
    """H(Z|X) is up where its median is at least this many times that of the same stretch."""
    success_share: Share = 0.7
    """Training success has fallen where its median is at most this share of its best stretch."""
    chance_excess: Share = 0.1
    """Retrieval is at chance only if it is at most this share of the way from chance to 1, whatever its interval says."""
    image_share: Share = 0.25
    """The image is ignored where what the reasoning loses with the images of another episode is at most this share of the run's start."""
    variance_share: Share = 0.25
    """Reward variance has collapsed where its median is at most this share of the run's start; above `early_stop.variance_share`."""
    solved: Share = 0.9
    """With training success at or above this, reward variance vanishes because the task is learned: no alarm."""
    valid_share: Share = 0.9
    """Text counts as format-valid where at least this share of the turns is."""
    length_share: Share = 0.25
    """Length has collapsed where its median is at most this share of the run's start."""
    budget_share: Share = 0.9
    """Length has exploded where the mean response uses at least this share of the token budget ..."""
    length_rise: Annotated[float, Field(gt=1)] = 1.25
    """... and at least this many times the length at the run's start."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """That budget, `rollout.max_tokens`; None: the longest response on record is used instead."""
    text_steps: WindowSize = 3
    """Steps with text that are pooled to detect repetition; more than half of them must show it."""
    repeated_texts: Share = 0.1
    """Share of the reasonings that the lower end of the 95% interval of degenerate ones must exceed."""
    repeated_part: Share = 0.5
    """A reasoning is degenerate where more than this part of its characters repeats the text right before it."""
    tool_share: Share = 0.25
    """An agent has stopped using its tools where the median of its calls of them is at most this share of the run's start."""
    continued_share: Share = 0.5
    """An agent's history is broken where less than this share of its follow-up requests continues a reply."""
    sampler_steps: WindowSize = 3
    """Steps over which the median of mismatch and staleness of a server counts."""
    mismatch: Annotated[float, Field(gt=0)] = 0.1
    """Server and learner differ where their log-probs do by more than this on average, in nats."""
    staleness: Annotated[float, Field(ge=0)] = 1.0
    """A server is stale where its tokens are more than this many updates behind on average."""

    @model_validator(mode="after")
    def _tests_can_fire(self) -> Self:
        """The ranks of two windows have a smallest p-value: one arrangement among all of them."""
        for start, recent, p_value, name in (
            (self.start_steps, self.recent_steps, self.step_p, "step_p"),
            (self.start_measurements, self.recent_measurements, self.measured_p, "measured_p"),
        ):
            if (best := 1 / math.comb(start + recent, recent)) > p_value:
                raise ValueError(
                    f"cannot fire: {name} is {p_value}, but windows of {start} and {recent} reach {best:.2g} at best; lengthen them"
                )
        return self


class Action(StrEnum):
    """What an alarm can set off besides its record."""

    CHECKPOINT = "checkpoint"
    """Write a checkpoint of this step."""
    TIGHTEN_FILTER = "tighten_filter"
    """Keep fewer prompts from now on."""
    LOOSEN_FILTER = "loosen_filter"
    """Keep more prompts from now on."""
    ROLL_BACK = "roll_back"
    """Continue with the weights of the newest checkpoint from before the alarm's evidence."""
    STOP = "stop"
    """End the run, with a checkpoint."""


class AlarmSettings(Settings):
    """Alarms are always on the record. An action is configured by the name of an alarm or by severity."""

    actions: dict[str, list[Action]] = {}
    """Name of an alarm, or `warning` or `critical`, to its actions; a name takes precedence over a severity."""
    cooldown: Positive = 10
    """An alarm that still stands acts again after this many steps."""
    filter_step: Share = 0.1
    """How much an action adds to or takes from filter.keep."""
    least_keep: Share = 0.3
    """Tightening ends here; loosening ends at 1."""
    roll_backs: Positive = 2
    """After this many rollbacks, a run that asks for another one stops."""
    rules: AlarmRules = AlarmRules()

    @field_validator("actions", mode="before")
    @classmethod
    def _lists(cls, actions: Any) -> Any:
        """A single action may be written without brackets."""
        if not isinstance(actions, dict):
            return actions
        known = [*AlarmName, *Severity]
        for name in actions:
            if name not in known:
                raise ValueError(f"holds '{name}', which is not an alarm: {did_you_mean(str(name), known)}")
        return {name: [asked] if isinstance(asked, str) else asked for name, asked in actions.items()}

    def of(self, name: AlarmName, severity: Severity) -> list[Action]:
        """The actions of this alarm."""
        return self.actions.get(name, self.actions.get(severity, []))

    def asks_for(self, *wanted: Action) -> str:
        """Those of the wanted actions that any alarm sets off, as text."""
        return ", ".join(sorted({str(action) for actions in self.actions.values() for action in actions if action in wanted}))
