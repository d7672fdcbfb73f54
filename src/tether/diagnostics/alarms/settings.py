"""How much must change, over how long and how surely, before an alarm is raised: every number the rules use, once.

The defaults were chosen on simulated healthy runs of 200 steps (8 prompts, 16 trajectories each): fewer than one run in twenty raises
any alarm. A collapse is then seen a window after it happened. Shorter windows see it sooner and cry wolf more often.
"""

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from tether.core.config import Settings
from tether.core.enums import REGIME_FRACTION

Window = Annotated[int, Field(ge=2)]
Share = Annotated[float, Field(gt=0, lt=1)]


class AlarmRules(Settings):
    """The parameters of all alarms."""

    start_steps: Window = 10
    """Steps that are the run's start, and the length of its best stretch."""
    recent_steps: Window = 8
    """Steps that are compared with them."""
    step_p: Share = 0.002
    """Largest p-value of the rank-sum test between the two, for what every step measures."""
    start_measurements: Window = 5
    """The information section is measured every `diagnosis.every` steps: at least so many measurements are its start ..."""
    recent_measurements: Window = 4
    """... and so many are compared with them, however many steps they span."""
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
    """... and at least this many times what it used at the run's start."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """That budget, `rollout.max_tokens`; None: the longest response on record stands for it."""
    text_steps: Window = 3
    """Steps with text that are pooled to judge repetition; more than half of them must show it."""
    repeated_texts: Share = 0.1
    """Share of the reasonings that the lower end of the 95% interval of degenerate ones must exceed."""
    repeated_part: Share = 0.5
    """A reasoning is degenerate where more than this part of its characters repeats what stands right before."""

    @model_validator(mode="after")
    def _tests_can_fire(self) -> Self:
        """Two windows can be told apart by their ranks only so well: one arrangement in all."""
        for start, recent, p_value, name in (
            (self.start_steps, self.recent_steps, self.step_p, "step_p"),
            (self.start_measurements, self.recent_measurements, self.measured_p, "measured_p"),
        ):
            if (best := 1 / math.comb(start + recent, recent)) > p_value:
                raise ValueError(
                    f"cannot fire: {name} is {p_value}, but windows of {start} and {recent} reach {best:.2g} at best; lengthen them"
                )
        return self
