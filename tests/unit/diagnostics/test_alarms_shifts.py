"""Windows of a series, and the exact rank-sum test, against answers counted by hand and by brute force."""

import itertools

import pytest

from tether.core.errors import UnknownName
from tether.core.seeding import generator
from tether.diagnostics.alarms.history import History, MetricSeries, fall, rank_sum_p, rise


def _series(*values: float, steps: tuple[int, ...] | None = None) -> MetricSeries:
    return MetricSeries(steps or tuple(range(1, len(values) + 1)), values)


@pytest.mark.parametrize(
    ("low", "high", "p_value"),
    [
        ((1, 2), (3, 4, 5), 1 / 10),
        # Rank sums of two out of {1..5}: 3 in one way, 4 in one, 5 in two.
        ((1, 3), (2, 4, 5), 2 / 10),
        ((2, 3), (1, 4, 5), 4 / 10),
        ((4, 5), (1, 2, 3), 1.0),
        ((7, 7), (7, 7, 7), 1.0),
        # Mid-ranks 1.5 1.5 3 4: pairs with a sum of at most 3: the two equal ones only.
        ((1, 1), (2, 3), 1 / 6),
        # Mid-ranks 1 2.5 2.5 4: the sum of 3.5 is reached by (1, 2.5) in two ways.
        ((1, 2), (2, 3), 2 / 6),
        ((1, 2, 3, 4), (5, 6, 7, 8, 9), 1 / 126),
    ],
)
def test_rank_sum_by_hand(low: tuple[float, ...], high: tuple[float, ...], p_value: float) -> None:
    assert rank_sum_p(low, high) == pytest.approx(p_value, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_rank_sum_is_the_share_of_splits_that_rank_as_low(seed: int) -> None:
    draw = generator("ranks", seed)
    values = [float(value) for value in draw.integers(0, 6, 9)]
    low, pooled = values[:4], sorted(values)
    rank = {value: (pooled.index(value) + 1 + pooled.index(value) + pooled.count(value)) / 2 for value in values}
    observed = sum(rank[value] for value in low)
    splits = [sum(rank[values[place]] for place in places) for places in itertools.combinations(range(9), 4)]
    assert rank_sum_p(low, values[4:]) == pytest.approx(sum(total <= observed + 1e-9 for total in splits) / len(splits), abs=1e-12)


def test_rank_sum_of_windows_too_large_to_count_one_by_one() -> None:
    assert rank_sum_p(range(40), range(40, 100)) == pytest.approx(7.275e-29, rel=1e-3), "1 / (100 choose 40)"


def test_windows() -> None:
    series = _series(5.0, 1.0, 9.0, 8.0, 7.0, 0.0, steps=(1, 6, 11, 16, 21, 26))
    assert series.first(2).steps == (1, 6) and series.last(2).steps == (21, 26) and series.last(9) == series
    assert series.without_last(2).steps == (1, 6, 11, 16) and len(series.without_last(9)) == 0
    assert series.at((6, 21, 22)) == MetricSeries((6, 21), (1.0, 7.0))
    assert series.span == (1, 26) and series.median == 6.0 and series.mean == 5.0


def test_the_best_stretch_is_judged_by_its_median_and_the_earliest_of_equals_wins() -> None:
    assert _series(1, 5, 5, 5, 1, 5, 5, 5).best(3).steps == (1, 2, 3), "two of three at 5 are enough for the median"
    assert _series(1, 99, 1, 4, 4, 4).best(3).steps == (2, 3, 4), "one outlier does not make a stretch good"
    assert _series(1, 99, 1, 1, 4, 4, 4, 5, 5).best(3).steps == (7, 8, 9)
    assert _series(1, 2).best(3) == _series(1, 2)


def test_windows_in_steps_hold_at_least_so_many_measurements() -> None:
    rare = _series(*range(9), steps=tuple(range(1, 46, 5)))
    assert rare.recent(8, 4).steps == (26, 31, 36, 41) and rare.early(10, 5).steps == (1, 6, 11, 16, 21)
    assert rare.recent(16, 1).steps == (26, 31, 36, 41), "the last 16 steps are 26 to 41"
    assert rare.early(16, 1).steps == (1, 6, 11, 16), "the first 16 steps are 1 to 16"
    dense = _series(*range(30))
    assert dense.recent(8, 4).steps == tuple(range(23, 31)) and dense.early(10, 5).steps == tuple(range(1, 11))
    assert len(_series().recent(8, 4)) == 0 and len(_series().early(8, 4)) == 0


def test_a_fall_needs_size_and_rank() -> None:
    before = _series(10, 11, 9, 10, 12)
    found = fall(before, _series(5, 4, 5, 4), 0.5, 0.01)
    assert found is not None and found.p_value == pytest.approx(1 / 126) and found.before == before
    assert fall(before, _series(5.1, 5.1, 5.2, 5.2), 0.5, 0.01) is None, "the median is above half"
    assert fall(before, _series(4, 4, 4, 9.5), 0.5, 0.01) is None, "3 of 126 splits rank as low"
    assert fall(before, _series(4, 4, 4, 9.5), 0.5, 0.03) is not None
    assert fall(_series(0, 0, 0, 0, 0), _series(-1, -1, -1, -1), 0.5, 0.01) is None, "nothing to fall from"
    assert fall(_series(), before, 0.5, 0.01) is None and fall(before, _series(), 0.5, 0.01) is None


def test_a_rise_needs_size_and_rank() -> None:
    before = _series(10, 11, 9, 10, 12)
    found = rise(before, _series(20, 20, 21, 21), 2.0, 0.01)
    assert found is not None and found.p_value == pytest.approx(1 / 126) and found.after.median == 20.5
    assert rise(before, _series(20, 20, 19, 19), 2.0, 0.01) is None
    assert rise(before, _series(30, 30, 30, 11), 2.0, 0.01) is None, "one of them ranks among the earlier"
    assert rise(_series(0, 0, 0, 0, 0), _series(1, 1, 1, 1), 2.0, 0.01) is None
    assert rise(_series(), before, 2.0, 0.01) is None and rise(before, _series(), 2.0, 0.01) is None


def test_a_rule_can_read_every_logged_metric_and_no_other() -> None:
    """Nothing lists what the rules read: a metric that no rule reads today is on record for the next one."""
    history = History()
    for step in (1, 2, 3):
        history.append(step, {"rollout/turns": float(step)} if step != 2 else {})
    assert history["rollout/turns"] == MetricSeries((1, 3), (1.0, 3.0)) and history.until(2)["rollout/turns"].steps == (1,)
    assert len(history["update/loss"]) == 0, "never measured"
    with pytest.raises(UnknownName, match=r"metric 'rollout/turn' is not in core/metrics\.toml: did you mean 'rollout/turns'"):
        history["rollout/turn"]
    assert history.pop_from(2) == {2: {}, 3: {"rollout/turns": 3.0}} and history.steps == [1]
