"""Settings of what watches a run: the measurements and their cadence, the alarms and what they set off."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, field_validator

from tether.core.alarms import AlarmName, Severity
from tether.core.config import Settings
from tether.core.enums import Scope
from tether.core.errors import did_you_mean
from tether.diagnostics.settings import AlarmRules

POLICY, REFERENCE = "policy", "reference"
"""Scorers that are no model's name."""

Positive = Annotated[int, Field(ge=1)]
Cadence = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class GradientSettings(Settings):
    """The gradient decomposition: task against regulariser, by the reward variance of the prompts."""

    every: Cadence = 0
    """Steps between decompositions; 0 turns them off."""
    prompts: Annotated[int, Field(ge=0)] = 0
    """Prompts played for it alone; 0 takes the step's own, before the filter."""
    buckets: Positive = 6
    parameters: str | list[str] = "last"
    """`all`, `last` (the last layer, cheap), or names of parameters or modules."""
    bound: bool = True
    """Check the Cauchy-Schwarz bound too: one backward pass per trajectory."""


class DiagnosisSettings(Settings):
    every: Cadence = 5
    """Steps between measurements of the information proxies; 0 turns them off."""
    scopes: list[Scope] = [Scope.FIRST_TURN, Scope.TRAJECTORY]
    """The first turn is always measured; `trajectory` and `turn` draw from all turns."""
    contexts: Annotated[int, Field(ge=8)] = 32
    """Contexts that the other scopes draw, each of them a column."""
    budget: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Share of a run's work that measuring may take, counted in tokens computed; it scores fewer reasonings to stay inside."""
    scorer: str = POLICY
    """Who judges: `policy`, `reference` (the model the run started from), another model by name, or the address of a server."""
    gradients: GradientSettings = GradientSettings()

    @field_validator("scopes")
    @classmethod
    def _scopes(cls, scopes: list[Scope]) -> list[Scope]:
        if Scope.FIRST_TURN not in scopes or len(set(scopes)) < len(scopes):
            raise ValueError("should name first_turn, which regimes and alarms need, and each scope once")
        return scopes


class Action(StrEnum):
    """What an alarm can set off beside its record."""

    CHECKPOINT = "checkpoint"
    """Write a checkpoint of this step."""
    TIGHTEN_FILTER = "tighten_filter"
    """Keep fewer prompts from now on."""
    LOOSEN_FILTER = "loosen_filter"
    """Keep more prompts from now on."""
    ROLL_BACK = "roll_back"
    """Go on with the weights of the newest checkpoint from before the alarm's evidence."""
    STOP = "stop"
    """End the run, with a checkpoint."""


class AlarmSettings(Settings):
    """Alarms are always on the record; actions are asked for by name of an alarm or by severity."""

    actions: dict[str, list[Action]] = {}
    """Name of an alarm, or `warning` or `critical`, to what it sets off; a name counts more than a severity."""
    cooldown: Positive = 10
    """An alarm that still stands acts again after so many steps."""
    filter_step: Share = 0.1
    """How much of filter.keep an action takes away or adds."""
    least_keep: Share = 0.3
    """Tightening ends here; loosening ends at 1."""
    roll_backs: Positive = 2
    """After so many a run that asks for another one stops."""
    rules: AlarmRules = AlarmRules()

    @field_validator("actions", mode="before")
    @classmethod
    def _lists(cls, actions: Any) -> Any:
        """One action may be written without brackets."""
        if not isinstance(actions, dict):
            return actions
        known = [*AlarmName, *Severity]
        for name in actions:
            if name not in known:
                raise ValueError(f"holds '{name}', which is not an alarm: {did_you_mean(str(name), known)}")
        return {name: [asked] if isinstance(asked, str) else asked for name, asked in actions.items()}

    def of(self, name: AlarmName, severity: Severity) -> list[Action]:
        """What this alarm sets off."""
        return self.actions.get(name, self.actions.get(severity, []))

    def asks_for(self, *wanted: Action) -> str:
        """Those of the wanted actions that any alarm sets off, as text."""
        return ", ".join(sorted({str(action) for actions in self.actions.values() for action in actions if action in wanted}))
