"""What success costs: the tokens and seconds that a run spends until it reaches a level, and the success that a budget buys.

Runs of as many steps may sample very different numbers of tokens, so success at a step does not compare them. A grid states a level of validation
success and a budget of sampled tokens for each environment (`targets`), the same for all arms. A run that does not reach the level within the budget
counts with the whole budget, also one that stopped before: an arm that fails cannot look cheap.
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated

import numpy as np
from pydantic import Field

from tether.core.config import Settings
from tether.runs.quantities import SUCCESS, Curve, Curves

TOKENS, SECONDS, TRAINED_SHARE = "spent/tokens", "spent/seconds", "spent/trained_share"
"""Curves that a cell keeps."""
MILLION_TOKENS_TO_LEVEL, SECONDS_TO_LEVEL, SUCCESS_AT_BUDGET = (
    "spent/million_tokens_to_level",
    "spent/seconds_to_level",
    "spent/success_at_budget",
)
SPENDING_METRICS: dict[str, str] = {
    TOKENS: "tokens sampled in the rollouts of all steps so far",
    SECONDS: "seconds of all steps so far, without validation, diagnosis and checkpoints",
    TRAINED_SHARE: "tokens trained on / tokens sampled, over ten steps",
    MILLION_TOKENS_TO_LEVEL: "millions of tokens sampled until validation success reaches the level of the grid's targets",
    SECONDS_TO_LEVEL: "seconds of steps until then",
    SUCCESS_AT_BUDGET: "validation success when the budget of the grid's targets is sampled",
}


class Target(Settings):
    """What the runs of an environment are compared at."""

    level: Annotated[float, Field(gt=0, lt=1)]
    """Of validation success."""
    million_tokens: Annotated[float, Field(gt=0)]
    """The budget."""


def bought(curves: Curves, target: Target | None) -> Mapping[str, Curve]:
    """What a run reached for what it spent, as curves of one point at its last step; nothing where the cell does not say what was spent.

    Between two evaluations success, tokens and seconds are read off a straight line. A run that ended before the budget keeps its last success,
    and goes on spending at the pace it had.
    """
    if target is None or TOKENS not in curves or SUCCESS not in curves:
        return {}
    tokens, seconds, end = curves[TOKENS], curves[SECONDS], max(curves[TOKENS])
    spent = list(tokens.values())
    budget = 1e6 * target.million_tokens
    is_over = budget > tokens[end]  # the run ended before
    seconds_at_budget = seconds[end] * budget / tokens[end] if is_over else float(np.interp(budget, spent, list(seconds.values())))
    evaluated = [(tokens[step], seconds[step], success) for step, success in sorted(curves[SUCCESS].items())]
    reached = _first_reached(evaluated, target.level)
    cost = reached if reached is not None and reached[0] <= budget else (budget, seconds_at_budget)
    success_at_budget = float(np.interp(budget, [at for at, _, _ in evaluated], [success for _, _, success in evaluated]))
    named = {MILLION_TOKENS_TO_LEVEL: cost[0] / 1e6, SECONDS_TO_LEVEL: cost[1], SUCCESS_AT_BUDGET: success_at_budget}
    return {name: {end: value} for name, value in named.items()}


def _first_reached(evaluated: list[tuple[float, float, float]], level: float) -> tuple[float, float] | None:
    """Tokens and seconds at which success first reaches the level."""
    if evaluated[0][2] >= level:
        return evaluated[0][:2]
    for (tokens, seconds, before), (more_tokens, more_seconds, after) in pairwise(evaluated):
        if after >= level:
            share = (level - before) / (after - before)
            return tokens + share * (more_tokens - tokens), seconds + share * (more_seconds - seconds)
    return None
