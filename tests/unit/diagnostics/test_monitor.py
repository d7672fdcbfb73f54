"""The monitor: when it looks, what it carries from one look to the next (spread and start), and that a checkpoint carries it too.

Two prompts (1,) and (2,), one reasoning each, (10,) and (20,), of one token. With p at the own prompt and q at the other the
gain is log(2 p / (p + q)), H(Z|X) = -log p, and the marginal is log((p + q) / 2).
"""

import json
import math
from typing import Any

import pytest

from tether import Group, Regime
from tether.core.metrics import CATALOGUE, StepMetrics
from tether.diagnostics.monitor import Health, Monitor


@pytest.fixture
def groups(turn: Any, group: Any) -> list[Group]:
    return [group(0, [[turn((1,), (10, 90), (0, 1))]]), group(1, [[turn((2,), (20, 90), (0, 1))]])]


@pytest.fixture
def silent(turn: Any, group: Any) -> list[Group]:
    return [group(0, [[turn((1,), (10, 90), None)], [turn((1,), (10, 90), (0, 0))]]), group(1, [[turn((2,), (20,), None)]])]


@pytest.fixture
def scorer(table_scorer: Any) -> Any:
    """A scorer with p at the own prompt and q at the other, for each of the two reasonings."""

    def make(p: float, q: float, p_second: float | None = None, q_second: float | None = None) -> Any:
        p_2, q_2 = p if p_second is None else p_second, q if q_second is None else q_second
        table = {((1,), (10,)): p, ((2,), (10,)): q, ((2,), (20,)): p_2, ((1,), (20,)): q_2}
        return table_scorer({pair: math.log(value) for pair, value in table.items()})

    return make


@pytest.mark.parametrize(
    ("every", "due"),
    [(0, []), (1, [1, 2, 3, 4, 5, 6, 7, 8, 9]), (2, [1, 3, 5, 7, 9]), (4, [1, 5, 9]), (100, [1])],
)
def test_cadence(every: int, due: list[int], groups: list[Group], scorer: Any) -> None:
    monitor = Monitor(every)
    assert [step for step in range(1, 10) if monitor.is_due(step)] == due
    table = scorer(0.5, 0.125)
    measured = [step for step in range(1, 10) if monitor.observe(step, groups, table).information is not None]
    assert measured == due
    assert len(table.calls) == 4 * len(due), "nothing is scored when it is not due"


def test_not_due_is_an_empty_health(groups: list[Group], scorer: Any) -> None:
    assert Monitor(3).observe(2, groups, scorer(0.5, 0.125)) == Health(None, None, {}, None)


def test_one_look(groups: list[Group], scorer: Any) -> None:
    """p 1/2, q 1/8: gain log(8/5), H(Z|X) log 2, H(Z) log(16/5), both retrieved."""
    health = Monitor(1).observe(1, groups, scorer(1 / 2, 1 / 8))
    assert health.regime is Regime.DIVERSE
    assert health.note is None
    assert health.information is not None
    assert health.information.mi == pytest.approx(math.log(8 / 5), abs=1e-15)
    expected = {
        "retrieval_acc": 1,
        "chance": 0.5,
        "mi": math.log(8 / 5),
        "mi_seq": math.log(8 / 5),
        "mi_zscore": math.log(8 / 5) / 0.001,
        "mi_zscore_ema": math.log(8 / 5) / 0.001,
        "h_conditional": math.log(2),
        "h_marginal": math.log(16 / 5),
        "recall_2": 1,
        "recall_4": 1,
        "recall_8": 1,
        "num_reasonings": 2,
        "num_prompts": 2,
        "num_empty": 0,
    }
    assert health.metrics == pytest.approx(expected, rel=1e-12)


def test_every_metric_is_in_the_catalogue(groups: list[Group], scorer: Any) -> None:
    metrics = StepMetrics()
    metrics.put("information", Monitor(1).observe(1, groups, scorer(0.5, 0.125)).metrics)
    assert set(metrics) == {name for name in CATALOGUE if name.startswith("information/")}


def test_empty_responses_are_counted_beside_the_others(groups: list[Group], silent: list[Group], scorer: Any) -> None:
    health = Monitor(1).observe(1, [*groups, *silent], scorer(0.5, 0.125))
    assert (health.metrics["num_reasonings"], health.metrics["num_empty"], health.metrics["num_prompts"]) == (2, 3, 2)


def test_no_reasoning_at_all(groups: list[Group], silent: list[Group], scorer: Any) -> None:
    monitor, table = Monitor(1), scorer(0.5, 0.125)
    health = monitor.observe(1, silent, table)
    assert (health.information, health.regime, health.metrics) == (None, None, {})
    assert health.note is not None
    assert "3 responses" in health.note
    assert "\n" not in health.note
    assert table.calls == []
    assert monitor.state() == {"sigma_ema": None, "start": None}, "the start is the first measurement, not the first look"
    assert monitor.observe(2, groups, table).regime is Regime.DIVERSE


def test_one_prompt_alone_says_nothing_about_dependence(groups: list[Group], silent: list[Group], scorer: Any) -> None:
    """The other prompt holds no reasoning: with one column every reasoning would be retrieved, and MI would be 0 by definition."""
    table = scorer(0.5, 0.125)
    health = Monitor(1).observe(1, [groups[0], silent[1]], table)
    assert (health.information, health.regime, health.metrics, table.calls) == (None, None, {}, [])
    assert health.note == "diagnosis: all reasoning of the step comes from one prompt; there is nothing to tell it from"


def test_the_spread_is_carried(groups: list[Group], scorer: Any) -> None:
    """Marginals 1/2 and 1/8 (p = q): sigma = log(4) / 2 = 0.6931. Then both 1/4: sigma 0, and the running one falls by a tenth a look."""
    monitor = Monitor(1)
    first = monitor.observe(1, groups, scorer(1 / 2, 1 / 2, 1 / 8, 1 / 8)).information
    second = monitor.observe(2, groups, scorer(1 / 4, 1 / 4)).information
    third = monitor.observe(3, groups, scorer(1 / 4, 1 / 4)).information
    assert first is not None and second is not None and third is not None
    assert [first.sigma, second.sigma, third.sigma] == pytest.approx([math.log(2), 0, 0], abs=1e-15)
    assert [look.sigma_ema for look in (first, second, third)] == pytest.approx([math.log(2) * 0.9**n for n in range(3)], rel=1e-14)
    assert monitor.state()["sigma_ema"] == third.sigma_ema


# log(2 p / (p + q)) at the start is log(8/5) = 0.47, its half 0.235; H is log 2 at the start, its half log(sqrt 2): p = 0.7071
LOOKS = [
    ((1 / 2, 1 / 8), Regime.DIVERSE),
    ((1 / 2, 0.45), Regime.TEMPLATE_COLLAPSE),  # gain log(1 / 0.95) = 0.05
    ((0.9, 0.1), Regime.COMPRESSED),  # H 0.105, gain log 1.8
    ((0.9, 0.88), Regime.LOW_ENTROPY_COLLAPSE),
    ((0.1, 0.05), Regime.DIVERSE),  # gain log(4/3) = 0.288
]


def test_regimes_are_against_the_first_look(groups: list[Group], scorer: Any) -> None:
    monitor = Monitor(1)
    assert [monitor.observe(step, groups, scorer(*values)).regime for step, (values, _) in enumerate(LOOKS, 1)] == [r for _, r in LOOKS]
    start = monitor.state()["start"]
    assert start == {"h_conditional": pytest.approx(math.log(2)), "mi_seq": pytest.approx(math.log(8 / 5))}


@pytest.mark.parametrize("cut", range(len(LOOKS) + 1))
def test_a_checkpoint_changes_nothing(cut: int, groups: list[Group], scorer: Any) -> None:
    """State goes through JSON after `cut` looks, into a new monitor; all looks are those of a run without a break."""
    whole, monitor = Monitor(1), Monitor(1)
    for step, (values, _) in enumerate(LOOKS, 1):
        if step == cut + 1:
            state = json.loads(json.dumps(monitor.state()))
            monitor = Monitor(1)
            monitor.restore(state)
            assert monitor.state() == state
        assert monitor.observe(step, groups, scorer(*values)) == whole.observe(step, groups, scorer(*values))
    assert monitor.state() == whole.state()
