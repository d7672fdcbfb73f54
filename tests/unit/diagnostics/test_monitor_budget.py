"""The monitor's budget: what is scored costs no more than it may, down to a floor; who is scored is drawn fairly and by the seed.

Every prompt has 10 tokens and every reasoning 5, so P prompts and N reasonings cost 10 P + 5 P N tokens.
"""

import json
import math
import statistics
from collections import Counter
from typing import Any

import pytest

from tether import Group
from tether.core.enums import Scope
from tether.diagnostics.monitor import Monitor, _Part


class _Counting:
    """Scores that differ, and the tokens they cost: a prompt once, a reasoning once per prompt."""

    def __init__(self) -> None:
        self.tokens, self.reasonings = 0, set[int]()

    def score_many(self, prompt: list[int], reasonings: list[list[int]]) -> list[float]:
        self.tokens += len(prompt) + sum(map(len, reasonings))
        self.reasonings |= {reasoning[0] for reasoning in reasonings}
        return [score(prompt[0], reasoning[0]) for reasoning in reasonings]

    def score(self, prompt: list[int], reasoning: list[int]) -> float:
        return self.score_many(prompt, [reasoning])[0]


def score(prompt: int, reasoning: int) -> float:
    return -0.1 * ((prompt * 7 + reasoning * 13) % 50) - 1


@pytest.fixture
def rolled(turn: Any, group: Any) -> Any:
    """`rolled(prompts, members)`: reasoning r of prompt p begins with the number 1000 + p * members + r."""

    def make(prompts: int, members: int) -> list[Group]:
        return [
            group(p, [[turn((p + 1,) * 10, (1000 + p * members + member,) * 5, (0, 5))] for member in range(members)])
            for p in range(prompts)
        ]

    return make


@pytest.mark.parametrize(
    ("work", "scored"),
    [
        (math.inf, 32),
        (680, 32),  # 40 + 4 x 32 x 5
        (679, 31),  # (679 - 40) / 20 = 31.95
        (440, 20),
        (220, 9),
        (200, 8),
        (40, 8),  # two a prompt whatever it costs
        (0, 8),
    ],
)
def test_fewer_reasonings_for_less_work(work: float, scored: int, rolled: Any, observe: Any) -> None:
    """A budget of a half every other step is all of the work of one step."""
    counting = _Counting()
    health = observe(Monitor(None, every=2, budget=0.5, rules=None), 1, rolled(4, 8), counting, work)
    metrics = health.metrics["information"]
    assert (metrics["num_reasonings"], metrics["num_prompts"]) == (scored, 4)
    assert counting.tokens == 40 + 20 * scored and (counting.tokens <= work or scored == 8)
    gains = [_gain(reasoning, [1, 2, 3, 4], 8) for reasoning in counting.reasonings]
    assert metrics["mi_seq"] == pytest.approx(statistics.fmean(gains))
    error = math.sqrt((1 - scored / 32) * statistics.variance(gains) / scored)
    assert metrics["sampling_error"] == pytest.approx(error) and (error == 0) == (scored == 32)


def _gain(reasoning: int, prompts: list[int], members: int) -> float:
    own = (reasoning - 1000) // members + 1
    return score(own, reasoning) - math.log(sum(math.exp(score(prompt, reasoning)) for prompt in prompts) / len(prompts))


def test_the_budget_grows_with_the_cadence_and_the_share(rolled: Any, observe: Any) -> None:
    counts = [
        observe(Monitor(None, every=every, budget=budget, rules=None), 1, rolled(4, 8), _Counting(), 1000).metrics["information"][
            "num_reasonings"
        ]
        for every, budget in ((1, 0.3), (2, 0.3), (1, 0.6), (1, 1.0))
    ]
    assert counts == [13, 28, 28, 32]  # (300 - 40) / 20, (600 - 40) / 20, all


def test_lengths_that_differ_cost_the_budget_on_average(turn: Any, group: Any, rows: Any) -> None:
    """Reasonings of 1 to 9 tokens: which of them are drawn does not depend on their length, so the cost is the budget only on average."""
    groups = [group(p, [[turn((p + 1,) * 10, (1000 + 9 * p + n,) * (n + 1), (0, n + 1))] for n in range(9)]) for p in range(3)]
    monitor = Monitor(None, every=1, seed=3, rules=None)
    drawn = [monitor._affordable(_Part(Scope.FIRST_TURN), step, rows(groups), 30 + 3 * 5 * 12) for step in range(2000)]
    assert {len(pairs.reasonings) for pairs in drawn} == {12} and {pairs.population for pairs in drawn} == {27}
    assert statistics.fmean(pairs.cost for pairs in drawn) == pytest.approx(210, rel=0.02)
    counts = Counter(reasoning[0] for pairs in drawn for reasoning in pairs.reasonings)
    # Each with probability 12/27: 889 of 2000, standard deviation 22.
    assert len(counts) == 27 and all(abs(count - 889) < 5 * 22 for count in counts.values())
    assert all(3 <= pairs.source.count(column) <= 5 for pairs in drawn for column in range(3)), "each prompt keeps its share"


@pytest.mark.parametrize(
    ("work", "contexts"),
    [
        (2880, 16),  # 1440 for the first turn, 16 x 10 + 16^2 x 5 = 1440 for the contexts
        (2879, 15),
        (2000, 9),  # 560 left: 9 x 10 + 81 x 5 = 495, ten would cost 600
        (1440, 8),
        (0, 8),
    ],
)
@pytest.mark.parametrize("scope", [Scope.TRAJECTORY, Scope.TURN])
def test_fewer_contexts_for_less_work_and_never_more_again(scope: Scope, work: float, contexts: int, rolled: Any, observe: Any) -> None:
    """Sixteen prompts with one reasoning each: at the floor of two a prompt all of the first turn is scored."""
    monitor, counting = Monitor(None, every=1, scopes=[scope], contexts=16, rules=None), _Counting()
    health = observe(monitor, 1, rolled(16, 1), counting, work)
    section = f"information_{scope}"
    assert health.metrics["information"]["num_reasonings"] == 16
    assert health.metrics[section]["num_prompts"] == health.metrics[section]["num_reasonings"] == contexts
    assert counting.tokens == 1440 + 10 * contexts + 5 * contexts**2
    assert counting.tokens <= work or contexts == 8
    assert monitor.state()["contexts"] == {"first_turn": 16, str(scope): contexts}
    assert observe(monitor, 2, rolled(16, 1), _Counting()).metrics[section]["num_prompts"] == contexts


def test_scopes_share_what_is_left(rolled: Any, observe: Any) -> None:
    """4000: a third for the first turn, which costs 1440 at its floor; half of the 2560 left is too little for 16 contexts, takes 15;
    then 1285 are left."""
    monitor, counting = Monitor(None, every=1, scopes=[Scope.TRAJECTORY, Scope.TURN], contexts=16, rules=None), _Counting()
    observe(monitor, 1, rolled(16, 1), counting, 4000)
    assert monitor.state()["contexts"] == {"first_turn": 16, "trajectory": 15, "turn": 15}
    assert counting.tokens == 1440 + 2 * (150 + 1125) <= 4000


def test_contexts_of_a_checkpoint_do_not_grow_either(rolled: Any, observe: Any) -> None:
    monitor = Monitor(None, every=1, scopes=[Scope.TURN], contexts=16, rules=None)
    monitor.restore({"sigma_ema": {}, "start": None, "contexts": {"first_turn": 12, "turn": 12}})
    assert observe(monitor, 1, rolled(16, 1), _Counting()).metrics["information_turn"]["num_prompts"] == 12
    fewer = Monitor(None, every=1, scopes=[Scope.TURN, Scope.TRAJECTORY], contexts=10, rules=None)
    fewer.restore({"sigma_ema": {}, "start": None, "contexts": {"first_turn": 12, "turn": 12}})
    assert fewer.state()["contexts"] == {"first_turn": 10, "turn": 10, "trajectory": 10}


def test_fewer_contexts_than_the_floor_stay_as_few(rolled: Any, observe: Any) -> None:
    monitor = Monitor(None, every=1, scopes=[Scope.TURN], contexts=4, rules=None)
    assert observe(monitor, 1, rolled(16, 1), _Counting(), 0).metrics["information_turn"]["num_prompts"] == 4
    assert monitor.state()["contexts"]["turn"] == 4


def test_every_step_and_scope_is_resampled_anew(rolled: Any, observe: Any) -> None:
    """The same scores: the numbers are the same, the shares of shuffles that reach them are not quite."""
    monitor, groups = Monitor(None, every=1, scopes=[Scope.TURN], contexts=32, rules=None), rolled(4, 8)
    looks = [look for step in (1, 2) for look in observe(monitor, step, groups, _Counting()).metrics.values()]
    assert len({look["mi_seq"] for look in looks}) == 1
    assert len({(look["mi_p_value"], look["retrieval_p_value"]) for look in looks}) == 4


def _observed(observe: Any, seed: int, groups: list[Group], steps: range, monitor: Monitor | None = None) -> tuple[Monitor, list[Any]]:
    monitor = monitor or Monitor(None, every=1, scopes=[Scope.TRAJECTORY, Scope.TURN], budget=0.5, contexts=16, seed=seed, rules=None)
    return monitor, [observe(monitor, step, groups, _Counting(), 9000 - 1000 * step) for step in steps]


def test_the_seed_decides_and_a_checkpoint_changes_nothing(rolled: Any, observe: Any) -> None:
    """The budget falls from step to step; the state goes through JSON in the middle."""
    groups = rolled(6, 8)
    whole, looks = _observed(observe, 1, groups, range(1, 5))
    first, before = _observed(observe, 1, groups, range(1, 3))
    resumed = Monitor(None, every=1, scopes=[Scope.TRAJECTORY, Scope.TURN], budget=0.5, contexts=16, seed=1, rules=None)
    resumed.restore(json.loads(json.dumps(first.state())))
    _, after = _observed(observe, 1, groups, range(3, 5), resumed)
    assert before + after == looks and resumed.state() == whole.state()
    assert all(look.metrics["information"]["sampling_error"] > 0 for look in looks)
    other = _observed(observe, 2, groups, range(1, 5))[1]
    assert all(here.metrics[name] != there.metrics[name] for here, there in zip(looks, other, strict=True) for name in here.metrics)
