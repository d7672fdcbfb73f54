"""The monitor: watches a run's reasoning, always on the unfiltered groups, every few steps.

The first turn is always measured: its columns are the step's prompts. Other scopes (pairs.py) are measured beside it. A budget bounds the
cost: it is a share of the work of the steps between two measurements, and both are counted in tokens computed, not in seconds, because the
same seed must give the same numbers on a slow day. A token that diagnosis computes is the cheapest kind (many at a time, no gradient), so a
share of the tokens is a bound on the share of the time. Where the budget is short, fewer reasonings are scored (all prompts stay columns,
so means over reasonings stay unbiased), or fewer contexts in the other scopes.

Kept between steps, and handed over for the checkpoint: the running spread of the z-scores, the run's start on the regime plane, and how
many contexts the other scopes have, so that their numbers compare over the run. What fails is on the record with its cause.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tether.core.enums import Regime, Scope
from tether.core.errors import TetherError
from tether.core.seeding import derive_seed, generator
from tether.core.types import Group
from tether.diagnostics.cross_score import cross_score
from tether.diagnostics.information import Information, measure_information
from tether.diagnostics.pairs import Pairs, first_turn_pairs, trajectory_pairs, turn_pairs
from tether.diagnostics.regimes import Baseline, classify
from tether.diagnostics.sampling import sample_reasonings, sampling_error

RESAMPLES = 1000
"""Of the intervals and of the p-values; they cost milliseconds."""
FEWEST_PER_PROMPT, FEWEST_CONTEXTS = 2, 8
"""Measured whatever the budget says: below this the numbers mean nothing."""

SECTIONS = {Scope.FIRST_TURN: "information", Scope.TRAJECTORY: "information_trajectory", Scope.TURN: "information_turn"}
"""Where the metrics of a scope are logged."""

_VALUES = (
    "retrieval_acc",
    "chance",
    "mi",
    "mi_seq",
    "mi_token_mean",
    "mi_zscore",
    "mi_zscore_ema",
    "h_conditional",
    "h_marginal",
    "h_conditional_seq",
    "h_marginal_seq",
    "retrieval_p_value",
    "mi_p_value",
)
_WITH_INTERVAL = ("retrieval_acc", "mi", "mi_seq", "h_conditional")


@dataclass(frozen=True, slots=True)
class Health:
    """What one observation found. Where a scope could not be measured, a note says why."""

    information: dict[Scope, Information] = field(default_factory=dict)
    regime: Regime | None = None
    """Of the first turn."""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    """Section to values, for the step's metrics."""
    notes: list[str] = field(default_factory=list)


class Monitor:
    """Information at a cadence. `every` steps between observations; 0 never observes."""

    def __init__(self, every: int, scopes: Sequence[Scope] = (), *, budget: float = 1.0, contexts: int = 32, seed: int = 0) -> None:
        """`scopes` are measured beside the first turn, with at most `contexts` columns; `budget` is a share of the steps' work."""
        self._every, self._budget, self._seed = every, budget, seed
        self._scopes = [Scope.FIRST_TURN, *(scope for scope in scopes if scope is not Scope.FIRST_TURN)]
        self._contexts = dict.fromkeys(self._scopes, contexts)
        self._sigma_ema: dict[Scope, float] = {}
        self._start: Baseline | None = None

    def is_due(self, step: int) -> bool:
        """The first step, and every `every` steps after it."""
        return self._every > 0 and (step - 1) % self._every == 0

    def observe(self, step: int, groups: Sequence[Group], scorer: Any, work: float = math.inf) -> Health:
        """Cross-score the step's reasonings and place the run on the regime plane; an empty Health when not due.

        `work` is what the step computes without this, in tokens: those of the rollout, and three times those trained on.
        """
        health = Health()
        if not self.is_due(step):
            return health
        left, regime = self._budget * self._every * work, None
        for place, scope in enumerate(self._scopes):
            pairs = self._affordable(scope, step, groups, max(0.0, left) / (len(self._scopes) - place))
            values: dict[str, float] = {
                "num_reasonings": len(pairs.reasonings),
                "num_prompts": len(pairs.prompts),
                "num_empty": pairs.num_empty,
                "failed": 0,
            }
            health.metrics[SECTIONS[scope]] = values
            if (missing := _nothing_to_measure(pairs)) is not None:
                health.notes.append(f"diagnosis ({scope}): {missing}")
                continue
            left -= pairs.cost
            try:
                information, error = self._measure(scope, step, pairs, scorer)
            except TetherError as failure:
                values["failed"] = 1
                health.notes.append(f"diagnosis ({scope}) failed: {failure}")
                continue
            health.information[scope] = information
            values.update(_metrics(information), sampling_error=error)
            if scope is Scope.FIRST_TURN:
                self._start = self._start or Baseline.of(information)
                regime = classify(information.h_conditional, information.mi_seq, self._start)
        return dataclasses.replace(health, regime=regime)

    def state(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        return {
            "sigma_ema": {str(scope): value for scope, value in self._sigma_ema.items()},
            "start": dataclasses.asdict(self._start) if self._start else None,
            "contexts": {str(scope): count for scope, count in self._contexts.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._sigma_ema = {Scope(scope): float(value) for scope, value in state["sigma_ema"].items()}
        self._start = Baseline(**state["start"]) if state["start"] else None
        kept = {Scope(scope): int(count) for scope, count in state["contexts"].items()}
        self._contexts = {scope: min(count, kept.get(scope, count)) for scope, count in self._contexts.items()}

    def _affordable(self, scope: Scope, step: int, groups: Sequence[Group], budget: float) -> Pairs:
        """The pairs of a scope, as many as the budget allows."""
        if scope is not Scope.FIRST_TURN:
            return self._drawn(scope, step, groups, budget)
        pairs = first_turn_pairs(groups)
        if pairs.cost <= budget:
            return pairs
        rows = (budget - sum(map(len, pairs.prompts))) / (len(pairs.prompts) * float(np.mean(pairs.lengths)))
        count = max(FEWEST_PER_PROMPT * len(pairs.prompts), int(rows))
        return pairs.only(sample_reasonings(pairs.source, count, self._rng(scope, step)).rows)

    def _drawn(self, scope: Scope, step: int, groups: Sequence[Group], budget: float) -> Pairs:
        """Draw contexts; where they cost too much, draw fewer, now and from now on."""
        draw = trajectory_pairs if scope is Scope.TRAJECTORY else turn_pairs
        pairs = draw(groups, self._contexts[scope], self._rng(scope, step))
        if pairs.cost <= budget:
            return pairs
        # k contexts of a tokens and k x k reasonings of b tokens: k a + k^2 b = budget
        a, b = float(np.mean([len(prompt) for prompt in pairs.prompts])), float(np.mean(pairs.lengths))
        count = max(FEWEST_CONTEXTS, int((math.sqrt(a * a + 4 * b * budget) - a) / (2 * b)))
        self._contexts[scope] = min(count, self._contexts[scope])
        return draw(groups, self._contexts[scope], self._rng(scope, step))

    def _rng(self, scope: Scope, step: int) -> np.random.Generator:
        return generator("diagnosis", self._seed, step, str(scope))

    def _measure(self, scope: Scope, step: int, pairs: Pairs, scorer: Any) -> tuple[Information, float]:
        """The information of these pairs, and the standard error that leaving reasonings out adds to MI-Seq-Est."""
        scores = cross_score(scorer, pairs.prompts, pairs.reasonings)
        information = measure_information(
            scores,
            pairs.lengths,
            pairs.source,
            sigma_ema=self._sigma_ema.get(scope),
            bootstrap=RESAMPLES,
            permutations=RESAMPLES,
            seed=derive_seed("resampling", self._seed, step, str(scope)),
        )
        self._sigma_ema[scope] = information.sigma_ema
        gains = scores[np.arange(len(scores)), pairs.source] - np.logaddexp.reduce(scores, axis=1)
        return information, sampling_error(gains, pairs.population)


def _nothing_to_measure(pairs: Pairs) -> str | None:
    if not pairs.reasonings:
        return f"none of {pairs.num_empty} responses holds reasoning; nothing to measure"
    if len(pairs.prompts) < 2:
        return "all reasoning of the step comes from one prompt; there is nothing to tell it from"
    return None


def _metrics(information: Information) -> dict[str, float]:
    values = {name: getattr(information, name) for name in _VALUES}
    values.update({f"recall_{k}": value for k, value in information.recall.items()})
    for name in _WITH_INTERVAL:
        values[f"{name}_low"], values[f"{name}_high"] = information.intervals[name]
    return values
