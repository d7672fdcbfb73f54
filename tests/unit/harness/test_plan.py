"""Seeds that a claim needs, against the textbook; their cost; and the words on pages."""

from typing import Any

import pytest

from harness.cells import Cell, CellRecord
from harness.claims import Claim, Outcomes, RunNumbers, Verdict
from harness.plan import MOST_SEEDS, SeedPlan, plan
from harness.results import Results
from harness.statistics import with_seeds
from tether.core.intervals import Estimate, level

ARMS = {"b": 1.0, "a": -1.0}


def _results(rule: dict[str, Any], values: dict[str, list[float]], seconds: float = 100.0) -> tuple[Claim, Any, Results]:
    """Differences between arms a and b on one environment, by seed: arm a is 0 everywhere."""
    cells = [
        Cell(f"{env}-{arm}-{seed}", arm, seed, 10, {}, {}, "tiny", env)
        for env, column in values.items()
        for seed in range(len(column))
        for arm in "ab"
    ]
    metric = {cell.id: 0.0 if cell.arm == "a" else values[cell.env][cell.seed] for cell in cells}
    runs = [RunNumbers(cell.env, cell.arm, cell.seed, 10, {"update/loss": {10: metric[cell.id]}}) for cell in cells]
    records = {cell.id: CellRecord(cell.id, cell.seed, 10, "done", seconds, {}, {}) for cell in cells}
    claim = Claim(text="b is above a.", rule={"quantity": "last update/loss", "margin": 0.0, "contrast": ARMS, **rule})  # type: ignore[arg-type]
    outcomes = Outcomes(runs)
    judged = claim.rule.judge(outcomes)
    return claim, judged, Results("one", "tiny", cells, records, {}, outcomes, [], [(claim, judged)], [])


ABOVE: dict[str, Any] = {"kind": "above", "environments": ["lake"]}


def _spread(mean: float, deviation: float) -> list[float]:
    """Three values with this mean and this standard deviation."""
    return [mean - deviation, mean, mean + deviation]


@pytest.mark.parametrize(("effect", "seeds"), [(1.0, 10), (0.5, 34), (0.8, 15), (-0.5, 34)])
def test_the_seeds_of_a_paired_test_are_the_textbooks(effect: float, seeds: int) -> None:
    """Effects in standard deviations; a two-sided paired t test at 5% with power 0.8 needs so many pairs."""
    found = plan(*_results(ABOVE, {"lake": _spread(effect, 1.0)}))
    assert (found.seeds, found.now) == (seeds, 3)
    assert found.seconds == (seeds - 3) * 2 * 100.0  # a run of each arm


def test_the_interval_of_a_plan_by_hand() -> None:
    estimate = level([0.0, 1.0, 2.0])  # mean 1, spread 1
    planned = with_seeds(estimate, 10, 3)
    half = (2.262 + 0.883) / 10**0.5  # Student's t with 9 degrees of freedom, at 97.5% and 80%
    assert planned.low == pytest.approx(1 - half, abs=2e-3) and planned.high == pytest.approx(1 + half, abs=2e-3)
    shrunk = with_seeds(Estimate(0.4, -0.2, 0.8, 12, "bootstrap"), 12, 3)  # four times the runs: half the width, times 1 + 0.842 / 1.960
    assert (shrunk.low, shrunk.high) == (pytest.approx(0.4 - 0.3 * 1.4294, abs=1e-3), pytest.approx(0.4 + 0.2 * 1.4294, abs=1e-3))
    alone = level([1.0])
    assert with_seeds(alone, 10, 1) == alone


def test_an_effect_inside_the_margin_is_told_as_none() -> None:
    """Mean 0, spread 1, margin 1: (t + t) / sqrt(n) below 1 is the same condition as an effect of one standard deviation."""
    claim, judged, results = _results({**ABOVE, "margin": 1.0}, {"lake": _spread(0.0, 1.0)})
    assert judged.verdict is Verdict.CANNOT_TELL and plan(claim, judged, results).seeds == 10
    assert plan(*_results(ABOVE, {"lake": _spread(0.0, 1.0)})) == SeedPlan(None, 3, 0.0)  # no effect, no margin


def test_a_claim_of_parts_needs_what_its_rule_does() -> None:
    columns = {"lake": _spread(1.0, 1.0), "box": _spread(0.5, 1.0), "sum": _spread(0.8, 1.0)}
    rule = {"kind": "above", "environments": list(columns)}
    assert plan(*_results({**rule, "over": "each"}, columns)).seeds == 34
    assert plan(*_results({**rule, "over": "most"}, columns)).seeds == 15
    against = {**columns, "lake": _spread(-1.0, 1.0)}
    assert plan(*_results({**rule, "over": "each"}, against)).seeds == 10  # one that does not is enough


def test_one_seed_has_no_plan() -> None:
    found = plan(*_results(ABOVE, {"lake": [1.0]}))
    assert found == SeedPlan(None, 1, 0.0) and found.words() == "a second seed comes before a plan"
    assert SeedPlan(None, 3, 0.0).words() == f"{MOST_SEEDS} seeds would not tell it"
