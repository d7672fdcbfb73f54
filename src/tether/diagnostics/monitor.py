"""The monitor: watches a run's reasoning, always on the unfiltered groups, every few steps.

It keeps the two things that outlive a step, the running spread of the z-score and the run's start on the regime plane, and hands them
over as a plain dictionary for the checkpoint.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tether.core.enums import Regime
from tether.core.types import Group
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.information import Information, measure_information
from tether.diagnostics.pairs import Pairs, first_turn_pairs
from tether.diagnostics.regimes import Baseline, classify


@dataclass(frozen=True, slots=True)
class Health:
    """What one observation found; nothing was measured where `information` is None, and `note` says why."""

    information: Information | None = None
    regime: Regime | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    """Values for the "information/" section of the step's metrics."""
    note: str | None = None


class Monitor:
    """First-turn information at a cadence. `every` steps between observations; 0 never observes."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._sigma_ema: float | None = None
        self._start: Baseline | None = None

    def is_due(self, step: int) -> bool:
        """The first step, and every `every` steps after it."""
        return self._every > 0 and (step - 1) % self._every == 0

    def observe(self, step: int, groups: Sequence[Group], scorer: Any) -> Health:
        """Cross-score the step's reasonings and place the run on the regime plane; an empty Health when not due."""
        if not self.is_due(step):
            return Health()
        pairs = first_turn_pairs(groups)
        if not pairs.reasonings:
            return Health(note=f"diagnosis: none of {pairs.num_empty} responses holds reasoning; nothing to measure")
        if len(pairs.prompts) < 2:
            return Health(note="diagnosis: all reasoning of the step comes from one prompt; there is nothing to tell it from")
        scores = cross_score(scorer, pairs.prompts, pairs.reasonings)
        information = measure_information(scores, pairs.lengths, pairs.source, sigma_ema=self._sigma_ema)
        self._sigma_ema = information.sigma_ema
        self._start = self._start or Baseline.of(information)
        regime = classify(information.h_conditional, information.mi_seq, self._start)
        return Health(information, regime, _metrics(information, pairs))

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {"sigma_ema": self._sigma_ema, "start": dataclasses.asdict(self._start) if self._start else None}

    def restore(self, state: dict[str, Any]) -> None:
        self._sigma_ema = state["sigma_ema"]
        self._start = Baseline(**state["start"]) if state["start"] else None


def _metrics(information: Information, pairs: Pairs) -> dict[str, float]:
    names = ("retrieval_acc", "chance", "mi", "mi_seq", "mi_zscore", "mi_zscore_ema", "h_conditional", "h_marginal")
    return {
        **{name: getattr(information, name) for name in names},
        **{f"recall_{k}": value for k, value in information.recall.items()},
        "num_reasonings": len(pairs.reasonings),
        "num_prompts": len(pairs.prompts),
        "num_empty": pairs.num_empty,
    }
