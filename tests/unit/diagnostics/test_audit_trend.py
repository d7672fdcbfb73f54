"""When a decline began: the rule, on series worked out by hand."""

import pytest

from tether.diagnostics.audit.reading import Window
from tether.diagnostics.audit.trend import ChangePoint, Point, _first_to_last, _success_words, change_point


def _points(*values: float, margin: float = 0.1) -> list[Point]:
    return [Point(Window((10 * index,)), value, value - margin, value + margin) for index, value in enumerate(values)]


def _dates(found: ChangePoint | None) -> tuple[str, str, str]:
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
    assert _dates(change_point(_points(*values))) == dates


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
    assert change_point(_points(*values)) is None


def test_a_fall_must_be_large_even_where_it_is_sure() -> None:
    assert change_point(_points(1.0, 1.0, 1.0, 0.75, margin=0.01)) is None
    assert change_point(_points(1.0, 1.0, 1.0, 0.69, margin=0.01)) is not None


def test_order_of_the_two_falls_in_words() -> None:
    early, late = change_point(_points(0.9, 0.9, 0.1, 0.1, 0.1)), change_point(_points(0.9, 0.9, 0.9, 0.9, 0.1))
    rates = _points(0.9, 0.9, 0.1)
    assert _success_words(rates, early, late).endswith(": after dependence on the prompt did.")
    assert _success_words(rates, late, early).endswith(": before dependence on the prompt did.")
    assert _success_words(rates, late, late).endswith("together with dependence on the prompt.")
    assert "read the reasoning, not only the reward" in _success_words(rates, early, None)
    assert _success_words(rates, None, late).endswith("; dependence on the prompt did not.")
    assert _success_words(rates, None, None).startswith("Success shows no decline (90%")


def test_two_windows_are_only_compared() -> None:
    assert _first_to_last("It", _points(0.9, 0.1)) == "It fell: 90% (80% to 100%) at step 0, 10% (0% to 20%) at step 10."
    assert _first_to_last("It", _points(0.1, 0.9)).startswith("It rose: ")
    assert _first_to_last("It", _points(0.5, 0.6)).startswith("It did not measurably change: ")


# All windows together: intervals so wide that no single window can tell.


def test_many_windows_know_more_than_one() -> None:
    """Before (0.42 + 0.38 + 0.40 + 0.44 + 0.36) / 5 = 0.40, after (0.05 + 0.02 + 0.06 + 0.03 + 0.04) / 5 = 0.04."""
    values = (0.42, 0.38, 0.40, 0.44, 0.36, 0.05, 0.02, 0.06, 0.03, 0.04)
    found = change_point(_points(*values, margin=0.6))
    assert found is not None
    assert (found.best.window.name, found.last_good.window.name, found.began.window.name, found.end.window.name) == (
        "0-40",
        "40",
        "50",
        "50-90",
    )
    assert (found.best.value, found.end.value) == (pytest.approx(0.40), pytest.approx(0.04))
    assert found.best.low < 0.40 < found.best.high < 0.45


def test_a_rise_before_the_fall_is_not_part_of_what_fell() -> None:
    found = change_point(_points(0.1, 0.1, 0.12, 0.6, 0.62, 0.58, 0.61, 0.6, 0.1, 0.12, 0.09, 0.1, 0.11, 0.1, margin=0.9))
    assert found is not None and (found.best.window.name, found.began.window.name) == ("30-70", "80")


@pytest.mark.parametrize(
    "values",
    [
        (0.40, 0.38, 0.41, 0.37, 0.40, 0.30, 0.32, 0.31, 0.30, 0.33),  # clear, and too small to matter
        (0.5, 0.1, 0.4, 0.2, 0.5, 0.1, 0.4, 0.1, 0.3, 0.2),  # noise
        (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),  # learning
        (0.4, 0.4, 0.4, 0.0, 0.0),  # five windows
        (-0.1, -0.1, -0.1, -0.5, -0.5, -0.5, -0.5),  # nothing to lose
    ],
)
def test_no_decline_together(values: tuple[float, ...]) -> None:
    assert change_point(_points(*values, margin=0.9)) is None
