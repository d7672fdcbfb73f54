"""What success costs: tokens and seconds to a level and success at a budget, worked out by hand; and the curves that cells keep for it."""

import pytest

from harness.grid import Library
from harness.harvest import spent_curves
from harness.spending import Target, bought
from tether.runs.quantities import Quantity
from tether.runs.schema import StepRecord

RUN = {
    "validation/success": {0: 0.2, 10: 0.6, 20: 1.0, 30: 0.5},
    "spent/tokens": {0: 0.0, 10: 1e6, 20: 3e6, 25: 3.5e6, 30: 4e6},
    "spent/seconds": {0: 0.0, 10: 10.0, 20: 50.0, 25: 51.0, 30: 60.0},
}
STOPPED = {
    "validation/success": {0: 0.1, 10: 0.3},
    "spent/tokens": {0: 0.0, 10: 1e6},
    "spent/seconds": {0: 0.0, 10: 8.0},
}


@pytest.mark.parametrize(
    ("curves", "level", "budget", "tokens", "seconds", "success"),
    [
        (RUN, 0.7, 5.0, 1.5, 20.0, 0.5),  # a quarter of the way from step 10 to 20; the run ends with 4 million, at 0.5
        (RUN, 0.7, 2.0, 1.5, 20.0, 0.8),  # at 2 million half of that way
        (RUN, 0.9, 2.0, 2.0, 30.0, 0.8),  # reached at 2.5 million, which is past the budget
        (RUN, 0.9, 2.5, 2.5, 40.0, 0.9),  # just within
        (RUN, 0.1, 2.0, 0.0, 0.0, 0.8),  # above it from the start
        (STOPPED, 0.5, 4.0, 4.0, 32.0, 0.3),  # never: the whole budget, at 8 seconds for a million
    ],
)
def test_what_was_bought(
    curves: dict[str, dict[int, float]], level: float, budget: float, tokens: float, seconds: float, success: float
) -> None:
    found = bought(curves, Target(level=level, million_tokens=budget))
    names = ("million_tokens_to_level", "seconds_to_level", "success_at_budget")
    values = [Quantity.parse(f"last spent/{name}").of(found, 30) for name in names]
    assert values == pytest.approx([tokens, seconds, success])


def test_a_cell_that_does_not_say_what_was_spent_has_no_such_number() -> None:
    assert bought({"validation/success": {0: 0.1}}, Target(level=0.5, million_tokens=1.0)) == {} == bought(RUN, None)


def test_cells_keep_what_was_spent() -> None:
    """Step n of the first ten samples 10 n tokens and trains on n; step 11 samples 100 and trains on none, step 12 on 60 of 140."""
    sampled = {**{step: 10.0 * step for step in range(1, 11)}, 11: 100.0, 12: 140.0}
    trained = {**{step: 1.0 * step for step in range(1, 11)}, 11: 0.0, 12: 60.0}
    played = [StepRecord(step, {"rollout/tokens_sampled": sampled[step], "groups/tokens_trained": trained[step]}) for step in sampled]
    played[4].metrics["validation/success"] = 0.5
    timings = [{"step": step, "seconds": {"rollout": 1.0, "update": 2.0, "validation": 100.0, "checkpoint": 7.0}} for step in sampled]
    curves = spent_curves([StepRecord(0, {"validation/success": 0.1}), *played], [{"step": 0, "seconds": {"validation": 9.0}}, *timings])
    assert curves["spent/tokens"] == {0: 0.0, 5: 150.0, 10: 550.0, 12: 790.0}
    assert curves["spent/seconds"] == {0: 0.0, 5: 15.0, 10: 30.0, 12: 36.0}
    assert curves["spent/trained_share"] == pytest.approx({10: 0.1, 12: 0.25})


def test_runs_of_before_keep_none() -> None:
    assert spent_curves([StepRecord(1, {"rollout/tokens_sampled": 5.0})], []) == {}


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("last spent/trained_share", (0.0, 1.0)),
        ("last spent/success_at_budget", (0.0, 1.0)),
        ("last spent/million_tokens_to_level", (0.0, float("inf"))),
        ("last spent/seconds_to_level", (0.0, float("inf"))),
        ("last update/tokens_shared", (0.0, float("inf"))),
    ],
)
def test_the_range_of_what_was_spent(library: Library, text: str, bounds: tuple[float, float]) -> None:
    assert Quantity.parse(text).bounds == bounds
