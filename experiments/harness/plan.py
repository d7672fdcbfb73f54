"""How many seeds a claim needs to be told, and what they cost: `tether reproduce --plan`.

From the cells that are there: the estimated effect, its spread between seeds, and the smallest number of seeds at which the claim's own rule decides with
power 0.8 (`statistics.with_seeds`), if effect and spread stay what they are. Three seeds estimate both badly, so the number is a plan, not a promise. A
claim of several parts needs as many as its rule does: all of them, or most.
"""

import dataclasses
import math
from dataclasses import dataclass

from harness.claims import Claim, Judgement, Outcomes, Verdict
from harness.results import Results

MOST_SEEDS = 1000
"""Nobody runs more."""


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """What an open claim needs. Example: SeedPlan(14, 3, 9020.0)."""

    seeds: int | None
    """In all; None where no number up to MOST_SEEDS tells it."""
    now: int
    """That are there."""
    seconds: float
    """Of the steps of the further runs, by the times of those that are there."""

    def words(self) -> str:
        """
        >>> SeedPlan(14, 3, 9020.0).words(), SeedPlan(None, 3, 0.0).words()
        ('needs about 14 seeds', '1000 seeds would not tell it')
        """
        if self.seeds is None:
            return f"{MOST_SEEDS} seeds would not tell it" if self.now > 1 else "a second seed comes before a plan"
        return f"needs about {self.seeds} seeds"


def plan(claim: Claim, judged: Judgement, results: Results) -> SeedPlan:
    """The seeds that a claim which cannot be told needs. The search halves: what is told with some seeds is told with more."""
    counted = [finding.estimate.num for finding in judged.findings if finding.estimate and not math.isnan(finding.estimate.error)]
    now = min(counted, default=results.outcomes.num_seeds)
    low, high = now, MOST_SEEDS
    if not _is_told(claim, results.outcomes, high):
        return SeedPlan(None, now, 0.0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _is_told(claim, results.outcomes, middle) else (middle, high)
    return SeedPlan(high, now, _seconds(claim, results, high))


def _is_told(claim: Claim, outcomes: Outcomes, seeds: int) -> bool:
    return claim.rule.judge(dataclasses.replace(outcomes, planned_seeds=seeds)).verdict in (Verdict.HOLDS, Verdict.DOES_NOT)


def _seconds(claim: Claim, results: Results, seeds: int) -> float:
    """Of the runs that are missing to so many seeds, of every arm in every environment that the rule reads; all of the experiment where it names none."""
    arms, environments = claim.rule.arms(), claim.rule.environments_named()
    done: dict[tuple[str, str], list[float]] = {}
    for cell in results.cells:
        if cell.id in results.records and (not arms or cell.arm in arms) and (not environments or cell.env in environments):
            done.setdefault((cell.env, cell.arm), []).append(results.records[cell.id].seconds)
    return math.fsum(max(0, seeds - len(found)) * math.fsum(found) / len(found) for found in done.values())
