"""When a decline began: the rule, on series worked out by hand."""

import pytest

from tether.diagnostics.audit.course import Decline, Point, _first_to_last, _success_words, decline
from tether.diagnostics.audit.windows import Window


def _points(*values: float, margin: float = 0.1) -> list[Point]:
    return [Point(Window((10 * index,)), value, value - margin, value + margin) for index, value in enumerate(values)]


def _dates(found: Decline | None) -> tuple[str, str, str]:
    assert found is not None
    return found.best.window.name, found.last_good.window.name, found.began.window.name


@pytest.mark.parametrize(
    ("values", "dates"),
    [
        ((0.9, 0.9, 0.9, 0.2, 0.1), ("0", "20", "30")),
        ((0.5, 0.9, 0.85, 0.5, 0.3, 0.2), ("10", "20", "30")),  # it rose before it fell
        ((0.9, 0.3, 0.9, 0.3, 0.2), ("0", "20", "30")),  # a dip that recovers is not where it began
        ((0.9, 0.1), ("0", "0", "10")),
    ],
)
def test_when_it_began(values: tuple[float, ...], dates: tuple[str, str, str]) -> None:
    assert _dates(decline(_points(*values))) == dates


@pytest.mark.parametrize(
    "values",
    [
        (0.9, 0.9, 0.8, 0.75),  # overlaps
        (0.5, 0.5, 0.5, 0.33),  # a third less, and overlaps
        (0.9, 0.1, 0.1, 0.9),  # recovered
        (0.1, 0.2, 0.5, 0.9),
        (0.0, 0.0, -0.2, -0.3),  # there was nothing to lose
        (0.9,),
    ],
)
def test_no_decline(values: tuple[float, ...]) -> None:
    assert decline(_points(*values)) is None


def test_a_fall_must_be_large_even_where_it_is_sure() -> None:
    assert decline(_points(1.0, 1.0, 1.0, 0.75, margin=0.01)) is None
    assert decline(_points(1.0, 1.0, 1.0, 0.69, margin=0.01)) is not None


def test_order_of_the_two_falls_in_words() -> None:
    early, late = decline(_points(0.9, 0.9, 0.1, 0.1, 0.1)), decline(_points(0.9, 0.9, 0.9, 0.9, 0.1))
    rates = _points(0.9, 0.9, 0.1)
    assert _success_words(rates, early, late).endswith(": after dependence on the prompt did.")
    assert _success_words(rates, late, early).endswith(": before dependence on the prompt did.")
    assert _success_words(rates, late, late).endswith("together with dependence on the prompt.")
    assert "look at the reasoning, not at the reward" in _success_words(rates, early, None)
    assert _success_words(rates, None, late).endswith("; dependence on the prompt did not.")
    assert _success_words(rates, None, None).startswith("Success shows no decline (90%")


def test_two_windows_are_only_compared() -> None:
    assert _first_to_last("It", _points(0.9, 0.1)) == "It fell: 90% (80% to 100%) at step 0, 10% (0% to 20%) at step 10."
    assert _first_to_last("It", _points(0.1, 0.9)).startswith("It rose: ")
    assert _first_to_last("It", _points(0.5, 0.6)).startswith("It did not measurably change: ")
