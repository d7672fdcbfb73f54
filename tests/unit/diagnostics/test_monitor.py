"""The monitor: when it looks, what it carries from one look to the next (spread and start), and that a checkpoint carries it too.

Two prompts (1,) and (2,), one reasoning each, (10,) and (20,), of one token. With p at the own prompt and q at the other the
gain is log(2 p / (p + q)), H(Z|X) = -log p, and the marginal is log((p + q) / 2).
"""

import json
import math
import re
from typing import Any

import pytest

from tether import Group, Regime
from tether.core.enums import Scope
from tether.core.errors import BadInput
from tether.core.metrics import CATALOGUE, StepMetrics
from tether.diagnostics.monitor import SECTIONS, Health, Monitor

FIRST = Scope.FIRST_TURN


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
def test_cadence(every: int, due: list[int], groups: list[Group], scorer: Any, observe: Any) -> None:
    monitor = Monitor(None, every=every, rules=None)
    assert [step for step in range(1, 10) if monitor.is_due(step)] == due
    table = scorer(0.5, 0.125)
    measured = [step for step in range(1, 10) if observe(monitor, step, groups, table).information]
    assert measured == due
    assert len(table.calls) == 4 * len(due), "nothing is scored when it is not due"


def test_not_due_is_an_empty_health(groups: list[Group], scorer: Any, observe: Any) -> None:
    assert observe(Monitor(None, every=3, rules=None), 2, groups, scorer(0.5, 0.125)) == Health({}, None, {}, [])


def test_one_look(groups: list[Group], scorer: Any, observe: Any) -> None:
    """p 1/2, q 1/8: gain log(8/5), H(Z|X) log 2, H(Z) log(16/5), both retrieved; both prompts say the same, so intervals are points."""
    health = observe(Monitor(None, every=1, rules=None), 1, groups, scorer(1 / 2, 1 / 8))
    assert (health.regime, health.notes, list(health.information), list(health.metrics)) == (None, [], [FIRST], ["information"])
    assert health.verdict is not None and health.verdict.reasons[0].startswith("Only 2 reasonings under 2 prompts, one for each prompt:")
    assert health.information[FIRST].mi == pytest.approx(math.log(8 / 5), abs=1e-15)
    metrics = dict(health.metrics["information"])
    for name in ("retrieval_p_value", "mi_p_value"):  # of the two ways to deal two reasonings, one is what was seen
        assert 0.4 < metrics.pop(name) < 0.6
    gain, given, all_in_all = math.log(8 / 5), math.log(2), math.log(16 / 5)
    expected = {
        **dict.fromkeys(("retrieval_acc", "retrieval_acc_low", "retrieval_acc_high", "recall_2", "recall_4", "recall_8"), 1),
        "chance": 0.5,
        **dict.fromkeys(("mi", "mi_low", "mi_high", "mi_seq", "mi_seq_low", "mi_seq_high", "mi_token_mean"), gain),
        **dict.fromkeys(("mi_zscore", "mi_zscore_ema"), gain / 0.001),
        **dict.fromkeys(("h_conditional", "h_conditional_low", "h_conditional_high", "h_conditional_seq"), given),
        **dict.fromkeys(("h_marginal", "h_marginal_seq"), all_in_all),
        "num_reasonings": 2,
        "num_prompts": 2,
        "num_empty": 0,
        "sampling_error": 0,
        "failed": 0,
    }
    assert metrics == pytest.approx(expected, rel=1e-12)


def test_every_metric_is_in_the_catalogue(groups: list[Group], scorer: Any, observe: Any) -> None:
    health = observe(Monitor(None, every=1, scopes=list(Scope), rules=None), 1, groups, scorer(0.5, 0.125))
    assert list(health.metrics) == list(SECTIONS.values()) == ["information", "information_trajectory", "information_turn"]
    metrics = StepMetrics()
    for section, values in health.metrics.items():
        metrics.put(section, values)
    elsewhere = re.compile(r"information/(probe_.*|image_.*|.*_change(_low|_high)?)")
    named = {name.partition("/")[2] for name in CATALOGUE if name.startswith("information/") and not elsewhere.fullmatch(name)}
    assert all(values.keys() == named for values in health.metrics.values())


def test_episodes_of_one_turn_look_the_same_in_every_scope(groups: list[Group], scorer: Any, observe: Any) -> None:
    health = observe(Monitor(None, every=1, scopes=[Scope.TURN, Scope.TRAJECTORY], rules=None), 1, groups, scorer(0.5, 0.125, 0.25, 0.2))
    first, turn, trajectory = (health.information[scope] for scope in (FIRST, Scope.TURN, Scope.TRAJECTORY))
    assert first.mi == turn.mi == trajectory.mi and first.h_conditional == turn.h_conditional == trajectory.h_conditional
    assert first.mi == pytest.approx((math.log(8 / 5) + math.log(0.5 / 0.45)) / 2)


def test_later_turns_are_columns_of_their_own(turn: Any, group: Any, table_scorer: Any, observe: Any) -> None:
    """Two turns: what is thought in the second is scored after all that came before it. p 1/2 at home, 1/8 elsewhere: log(1/2 / (7/32))."""
    groups = [group(0, [[turn((1,), (10, 90), (0, 1)), turn((3,), (11, 90), (0, 1))]])]
    groups.append(group(1, [[turn((2,), (20, 90), (0, 1)), turn((4,), (21, 90), (0, 1))]]))
    contexts = {(10,): (1,), (11,): (1, 10, 90, 3), (20,): (2,), (21,): (2, 20, 90, 4)}
    table = {(x, z): math.log(1 / 2 if contexts[z] == x else 1 / 8) for x in contexts.values() for z in contexts}
    health = observe(Monitor(None, every=1, scopes=[Scope.TURN], rules=None), 1, groups, table_scorer(table))
    assert health.metrics["information"]["num_prompts"] == 2 and health.metrics["information_turn"]["num_prompts"] == 4
    assert health.information[Scope.TURN].mi_seq == pytest.approx(math.log(16 / 7)) and health.information[Scope.TURN].chance == 0.25
    assert health.information[FIRST].mi_seq == pytest.approx(math.log(8 / 5))


def test_empty_responses_are_counted_beside_the_others(groups: list[Group], silent: list[Group], scorer: Any, observe: Any) -> None:
    health = observe(Monitor(None, every=1, scopes=[Scope.TURN], rules=None), 1, [*groups, *silent], scorer(0.5, 0.125))
    for section in ("information", "information_turn"):
        assert [health.metrics[section][name] for name in ("num_reasonings", "num_empty", "num_prompts", "failed")] == [2, 3, 2, 0]


def test_no_reasoning_at_all(groups: list[Group], silent: list[Group], scorer: Any, observe: Any) -> None:
    monitor, table = Monitor(None, every=1, scopes=[Scope.TRAJECTORY], rules=None), scorer(0.5, 0.125)
    health = observe(monitor, 1, silent, table)
    assert (health.information, health.regime) == ({}, None)
    counts = {"num_reasonings": 0, "num_prompts": 0, "num_empty": 3, "failed": 0}
    assert health.metrics == {"information": counts, "information_trajectory": counts}
    assert health.notes == [
        f"diagnosis ({scope}): none of 3 responses holds reasoning; nothing to measure" for scope in ("first_turn", "trajectory")
    ]
    assert table.calls == []
    assert (monitor.state()["sigma_ema"], monitor.state()["start"]) == ({}, None), "the start is the first measurement, not the first look"
    assert observe(monitor, 2, groups, table).information[FIRST].retrieval_acc == 1


def test_one_prompt_alone_says_nothing_about_dependence(groups: list[Group], silent: list[Group], scorer: Any, observe: Any) -> None:
    """The other prompt holds no reasoning: with one column every reasoning would be retrieved, and MI would be 0 by definition."""
    table = scorer(0.5, 0.125)
    health = observe(Monitor(None, every=1, rules=None), 1, [groups[0], silent[1]], table)
    assert (health.information, health.regime, table.calls) == ({}, None, [])
    assert health.metrics == {"information": {"num_reasonings": 1, "num_prompts": 1, "num_empty": 1, "failed": 0}}
    assert health.notes == [
        "diagnosis (first_turn): all reasoning of the step comes from one prompt; there is no other prompt to compare with"
    ]


def test_the_spread_is_carried(groups: list[Group], scorer: Any, observe: Any) -> None:
    """Marginals 1/2 and 1/8 (p = q): sigma = log(4) / 2 = 0.6931. Then both 1/4: sigma 0, and the running one falls by a tenth a look."""
    monitor = Monitor(None, every=1, scopes=[Scope.TURN], rules=None)
    values = [(1 / 2, 1 / 2, 1 / 8, 1 / 8), (1 / 4, 1 / 4), (1 / 4, 1 / 4)]
    looks = [observe(monitor, step, groups, scorer(*value)).information for step, value in enumerate(values, 1)]
    for scope in (FIRST, Scope.TURN):
        assert [look[scope].sigma for look in looks] == pytest.approx([math.log(2), 0, 0], abs=1e-15)
        assert [look[scope].sigma_ema for look in looks] == pytest.approx([math.log(2) * 0.9**n for n in range(3)], rel=1e-14)
        assert monitor.state()["sigma_ema"][scope] == looks[2][scope].sigma_ema


# Six prompts with two reasonings each, p under the own prompt and q under each other: the gain is log(6 p / (p + 5 q)). At the start it is
# log(8/3) = 0.98, its half 0.49; H is log 2 at the start, its half log(sqrt 2): p = 0.7071.
LOOKS = [
    ((1 / 2, 1 / 8), Regime.DIVERSE),
    ((1 / 2, 1 / 2), Regime.TEMPLATE_COLLAPSE),
    ((0.9, 0.1), Regime.COMPRESSED),
    ((0.9, 0.9), Regime.LOW_ENTROPY_COLLAPSE),
    ((0.1, 0.03), Regime.DIVERSE),
]


@pytest.fixture
def six(turn: Any, group: Any) -> list[Group]:
    return [group(n, [[turn((n,), (10 * n + k, 9), (0, 1))] for k in (1, 2)]) for n in range(1, 7)]


@pytest.fixture
def six_scorer(table_scorer: Any) -> Any:
    def make(p: float, q: float) -> Any:
        reasonings = [(n, (10 * n + k,)) for n in range(1, 7) for k in (1, 2)]
        return table_scorer({((x,), z): math.log(p if n == x else q) for n, z in reasonings for x in range(1, 7)})

    return make


def test_regimes_are_against_the_first_look(six: list[Group], six_scorer: Any, observe: Any) -> None:
    monitor = Monitor(None, every=1, scopes=[Scope.TURN], rules=None)
    looks = [observe(monitor, step, six, six_scorer(*values)) for step, (values, _) in enumerate(LOOKS, 1)]
    assert [look.regime for look in looks] == [regime for _, regime in LOOKS]
    assert all(look.verdict.regime is look.regime for look in looks)
    start = monitor.state()["start"]
    assert start == {"h_conditional": pytest.approx(math.log(2)), "mi_seq": pytest.approx(math.log(8 / 3))}


def test_the_start_is_the_first_measurement_that_is_large_enough(
    groups: list[Group], scorer: Any, six: list[Group], six_scorer: Any, observe: Any
) -> None:
    monitor = Monitor(None, every=1, rules=None)
    assert observe(monitor, 1, groups, scorer(0.9, 0.1)).regime is None and monitor.state()["start"] is None
    assert observe(monitor, 2, six, six_scorer(1 / 2, 1 / 8)).regime is Regime.DIVERSE
    assert monitor.state()["start"] == {"h_conditional": pytest.approx(math.log(2)), "mi_seq": pytest.approx(math.log(8 / 3))}


@pytest.mark.parametrize("cut", range(len(LOOKS) + 1))
def test_a_checkpoint_changes_nothing(cut: int, groups: list[Group], scorer: Any, observe: Any) -> None:
    """State goes through JSON after `cut` looks, into a new monitor; all looks are those of a run without a break."""
    whole, monitor = Monitor(None, every=1, scopes=[Scope.TURN], rules=None), Monitor(None, every=1, scopes=[Scope.TURN], rules=None)
    for step, (values, _) in enumerate(LOOKS, 1):
        if step == cut + 1:
            state = json.loads(json.dumps(monitor.state()))
            monitor = Monitor(None, every=1, scopes=[Scope.TURN], rules=None)
            monitor.restore(state)
            assert monitor.state() == state
        assert observe(monitor, step, groups, scorer(*values)) == observe(whole, step, groups, scorer(*values))
    assert monitor.state() == whole.state()


# What fails is on the record, and the rest is measured.


class _Failing:
    """A table that refuses what it does not know."""

    def __init__(self, table: Any, *refused: tuple[int, ...]) -> None:
        self._table, self._refused = table, refused

    def score(self, prompt: Any, reasoning: Any) -> float:
        if tuple(prompt) in self._refused:
            raise BadInput(f"prompt {tuple(prompt)} is too long; shorten it")
        return float(self._table.score(prompt, reasoning))


def _two_turns(turn: Any, group: Any) -> list[Group]:
    """The second turn forgets the first, and thinks (10,) or (20,) again, after (3,) or (4,)."""
    members = []
    for first, second, thought in ((1, 3, 10), (2, 4, 20)):
        later = turn((second,), (thought, 90), (0, 1))
        later.new_context = True
        members.append([turn((first,), (thought, 90), (0, 1)), later])
    return [group(number, [turns]) for number, turns in enumerate(members)]


@pytest.mark.parametrize(("refused", "failing", "other"), [((3,), "turn", "first_turn"), ((1,), "first_turn", "turn")])
def test_a_failure_is_a_note_and_the_other_scope_is_measured(
    refused: tuple[int, ...], failing: str, other: str, turn: Any, group: Any, table_scorer: Any, observe: Any
) -> None:
    groups = _two_turns(turn, group)
    table = table_scorer({((x,), (z,)): math.log(1 / 2 if x % 2 == (z == 10) else 1 / 8) for x in range(1, 5) for z in (10, 20)})
    monitor = Monitor(None, every=1, scopes=[Scope.TURN], rules=None)
    # The scope of turns holds the first turns too: there only the first look at prompt (1,) fails.
    health = observe(monitor, 1, groups, _FailingOnce(table, refused) if failing == "first_turn" else _Failing(table, refused))
    assert [str(scope) for scope in health.information] == [other]
    assert health.metrics[SECTIONS[Scope(failing)]]["failed"] == 1 and "mi" not in health.metrics[SECTIONS[Scope(failing)]]
    assert health.metrics[SECTIONS[Scope(other)]]["failed"] == 0 and "mi" in health.metrics[SECTIONS[Scope(other)]]
    (note,) = health.notes
    assert note == f"diagnosis ({failing}) failed: prompt {refused} is too long; shorten it"
    assert (health.verdict is None) == (failing == "first_turn")
    assert list(monitor.state()["sigma_ema"]) == [other]


class _FailingOnce(_Failing):
    def score(self, prompt: Any, reasoning: Any) -> float:
        try:
            return super().score(prompt, reasoning)
        finally:
            self._refused = ()


def test_a_score_that_is_not_finite_is_a_failure_with_its_cause(groups: list[Group], table_scorer: Any, observe: Any) -> None:
    table = table_scorer({((x,), (z,)): math.nan for x in (1, 2) for z in (10, 20)})
    health = observe(Monitor(None, every=1, rules=None), 1, groups, table)
    assert health.metrics["information"]["failed"] == 1 and "the scorer gave log p = nan" in health.notes[0]


def test_a_defect_is_not_hidden(groups: list[Group], table_scorer: Any, observe: Any) -> None:
    with pytest.raises(KeyError):
        observe(Monitor(None, every=1, rules=None), 1, groups, table_scorer({}))


def test_tool_calls_are_measured_as_reasoning_is(turn: Any, group: Any, scorer: Any, observe: Any) -> None:
    """The calls (10,) and (20,) follow a reasoning (90,) that is the same for both prompts and tells nothing: known answers as in `test_one_look`."""
    table = scorer(1 / 2, 1 / 8)
    table.table |= {((prompt,), (90,)): math.log(1 / 2) for prompt in (1, 2)}
    groups = [group(n, [[turn((1 + n,), (90, 10 * (1 + n), 91), (0, 1))]]) for n in range(2)]
    for each in groups:
        each.trajectories[0].turns[0].calls_span = (1, 2)
    monitor = Monitor(None, every=1, rules=None, scopes=("trajectory",))
    health = observe(monitor, 1, groups, table)
    assert list(health.metrics) == ["information", "information_trajectory", "information_calls", "information_calls_trajectory"]
    StepMetrics().put("information_calls", health.metrics["information_calls"])
    assert health.information[FIRST].mi == 0 and health.information[FIRST].retrieval_acc == 0.5
    assert health.calls[FIRST].mi == pytest.approx(math.log(8 / 5), abs=1e-15) and health.calls[FIRST].retrieval_acc == 1
    assert health.metrics["information_calls"]["h_conditional"] == pytest.approx(math.log(2))
    assert health.verdict is not None and health.verdict.regime is None, "the verdict is on the reasoning"
    again = Monitor(None, every=1, rules=None, scopes=("trajectory",))
    again.restore(json.loads(json.dumps(monitor.state())))
    assert again.state() == monitor.state() and set(monitor.state()["sigma_ema"]) >= {"first_turn", "calls_first_turn"}


def test_calls_stand_beside_reasonings() -> None:
    monitor = Monitor(None, rules=None)
    with pytest.raises(BadInput, match="calls stand beside reasonings, one for each row; got 1 prompts and 2 calls"):
        monitor.observe(1, prompts=[(1,)], reasonings=[(2,)], groups=[0], calls=[(3,), (4,)])
    with pytest.raises(BadInput, match="got responses"):
        monitor.observe(1, prompts=[(1,)], responses=[(2,)], groups=[0], calls=[(3,)])
