"""The batch of a step: rounds of sampling until the batch is full, within bounds, the best of what the filter keeps, and the accounting of tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from tether import select_groups
from tether.algorithms.filters.group_filter import GroupFilter
from tether.core.enums import FinishReason, StopReason
from tether.core.types import Group, Trajectory, Turn
from tether.training.batch import SampledBatch, sample_batch, select
from tether.training.settings import RunSettings

DYNAMIC: dict[str, Any] = {"strategy": "all", "include_zero": False}
"""As DAPO does: groups without variance are left out."""


def _group(index: int, rewards: Sequence[float], tokens: int = 3, nlls: Sequence[float] | None = None, env: str = "") -> Group:
    trajectories = []
    for member, reward in enumerate(rewards):
        nll = nlls[member] if nlls else 0.5
        turn = Turn((1,), (2,) * tokens, (-nll,) * tokens, FinishReason.STOP_TEXT, "", None, reward)
        trajectories.append(Trajectory(index, member, 100 + index, [turn], StopReason.SUCCESS, reward >= 1, env=env))
    return Group(index, 100 + index, trajectories, env=env)


class _Script:
    """Plays groups from a list of pairs of rewards, in order, and remembers what it was asked for."""

    def __init__(self, *pairs: tuple[float, float]) -> None:
        self._pairs = pairs
        self.asked: list[tuple[int, int]] = []

    def __call__(self, num_groups: int, first: int) -> list[Group]:
        self.asked.append((num_groups, first))
        return [_group(index, self._pairs[index], tokens=index + 1) for index in range(first, first + num_groups)]


FLAT, VARIED = (1.0, 1.0), (0.0, 1.0)


def _sampled(script: _Script, num_groups: int = 4, **rules: Any) -> SampledBatch:
    return sample_batch(script, num_groups, GroupFilter(**rules))


def test_one_round_without_refill() -> None:
    script = _Script(FLAT, VARIED, FLAT, VARIED)
    sampled = _sampled(script, **DYNAMIC)
    assert script.asked == [(4, 0)]
    assert [group.index for group in sampled.kept] == [1, 3]
    assert (sampled.num_rounds, sampled.fill_ratio, sampled.kept_ids) == (1, 0.5, {1, 3})
    assert sampled.groups == sampled.first_round


def test_a_full_batch_is_not_refilled() -> None:
    script = _Script(*[VARIED] * 4)
    sampled = _sampled(script, **DYNAMIC, refill=3)
    assert script.asked == [(4, 0)] and sampled.fill_ratio == 1


def test_refill_continues_counting_until_the_batch_is_full() -> None:
    """Half are kept: two are missing, so 2 * 4 / 2 = 4 more are tried; three of them vary, and the fifth kept group is one too many."""
    script = _Script(FLAT, VARIED, FLAT, VARIED, VARIED, VARIED, FLAT, VARIED)
    sampled = _sampled(script, **DYNAMIC, refill=3)
    assert script.asked == [(4, 0), (4, 4)]
    assert [group.index for group in sampled.groups] == list(range(8))
    assert [group.index for group in sampled.first_round] == [0, 1, 2, 3]
    assert [group.index for group in sampled.kept] == [1, 3, 4, 5]
    assert (sampled.num_rounds, sampled.num_wanted, sampled.fill_ratio) == (2, 4, 1)


def test_a_few_missing_take_a_small_round() -> None:
    """Three of four are kept: one is missing, and 1 * 4 / 3 rounded up is 2."""
    script = _Script(VARIED, VARIED, FLAT, VARIED, FLAT, VARIED)
    sampled = _sampled(script, **DYNAMIC, refill=1)
    assert script.asked == [(4, 0), (2, 4)]
    assert [group.index for group in sampled.kept] == [0, 1, 3, 5]


@pytest.mark.parametrize("refill", [0, 1, 3])
def test_rounds_are_bounded(refill: int) -> None:
    script = _Script(*[FLAT] * 16)
    sampled = _sampled(script, **DYNAMIC, refill=refill)
    assert script.asked == [(4, 4 * number) for number in range(refill + 1)]
    assert (sampled.num_rounds, sampled.kept, sampled.fill_ratio) == (refill + 1, [], 0)
    assert sampled.metrics(tokens_batched=0)["kept_ratio"] == 0


def test_a_batch_that_stays_short() -> None:
    script = _Script(FLAT, VARIED, FLAT, FLAT, *[FLAT] * 4)
    sampled = _sampled(script, **DYNAMIC, refill=1)
    assert [group.index for group in sampled.kept] == [1] and sampled.fill_ratio == 0.25


def test_the_best_of_too_many_in_the_order_of_sampling() -> None:
    """All rounds are ranked together: 0.5 and 0.72 of the second round beat 0.02 of the first."""
    script = _Script(FLAT, (0.0, 0.2), (0.0, 0.9), (0.0, 1.0), (0.0, 1.2))
    sampled = _sampled(script, num_groups=3, strategy="top_k", keep=1.0, include_zero=False, refill=1)
    assert script.asked == [(3, 0), (2, 3)]
    assert [group.index for group in sampled.kept] == [2, 3, 4]
    assert sampled.selection.kept == [4, 3, 2, 1]


def test_dapo_takes_the_first_of_too_many() -> None:
    """Dynamic sampling fills the batch with mixed groups as they come (arXiv 2503.14476, algorithm 1): a group with 1 of 4 solved, of variance
    1/4, is not replaced by one with 2 of 4, of variance 1/3, that was sampled later."""
    hard, even, solved = (0.0, 0.0, 0.0, 1.0), (0.0, 0.0, 1.0, 1.0), (1.0, 1.0, 1.0, 1.0)
    dapo = RunSettings(env={"name": "frozen_lake"}, algorithm={"name": "dapo"}).filter  # type: ignore[arg-type]
    played = [solved, hard, hard, even, even, hard]
    sampled = sample_batch(lambda count, first: [_group(n, played[n]) for n in range(first, first + count)], 3, dapo)
    assert [group.index for group in sampled.groups] == [0, 1, 2, 3, 4]  # two of three were mixed: ceil(1 * 3 / 2) = 2 more
    assert [group.index for group in sampled.kept] == sampled.selection.kept[:3] == [1, 2, 3]
    assert sampled.selection.dropped == [0]


def test_the_accounting_of_groups_and_tokens() -> None:
    """Group i has two trajectories of i + 1 tokens: 2 * (1 + ... + 8) = 72 were sampled, and 2 * (2 + 4 + 5 + 6) = 34 are trained on."""
    script = _Script(FLAT, VARIED, FLAT, VARIED, VARIED, VARIED, FLAT, VARIED)
    sampled = _sampled(script, **DYNAMIC, refill=3)
    metrics = sampled.metrics(tokens_batched=34)
    assert (metrics["sampled"], metrics["kept"], metrics["kept_ratio"], metrics["rounds"]) == (8, 4, 0.5, 2)
    assert metrics["tokens_discarded"] == 72 - 34
    trained = sum(t.num_sampled for group in sampled.kept for t in group.trajectories)
    assert trained == 34
    assert metrics["zero_variance"] == 3 and metrics["mixed"] == 5 / 8 and metrics["all_succeed"] == 3 / 8
    assert metrics["rv_mean"] == pytest.approx(5 * 0.5 / 8)


def test_a_share_of_all_rounds_is_kept() -> None:
    """top_k keeps half of whatever was sampled: 2 of 4, then floor(0.5 * 8) = 4 of 8."""
    script = _Script(*[(0.0, 1 + index / 10) for index in range(8)])
    sampled = _sampled(script, strategy="top_k", keep=0.5, refill=1)
    assert script.asked == [(4, 0), (4, 4)]
    assert [group.index for group in sampled.kept] == [4, 5, 6, 7] and sampled.fill_ratio == 1


# What the filter is told of the groups.


@pytest.mark.parametrize(
    ("score", "best"),
    [("reward_variance", 0), ("reward_sum", 1), ("outcome_variance", 2), ("entropy", 3), ("entropy_variance", 4), ("length", 5)],
)
def test_each_score_reads_its_own_numbers(score: str, best: int) -> None:
    groups = [
        _group(0, (-9.0, 0.9)),
        _group(1, (9.0, 9.0)),
        _group(2, (0.99, 1.0)),
        _group(3, (0.0, 0.0), nlls=(2.0, 2.0)),
        _group(4, (0.0, 0.0), nlls=(0.1, 1.5)),
        _group(5, (0.0, 0.0), tokens=9),
    ]
    assert select(groups, GroupFilter(strategy="top_k", keep=0.2, score=score)).kept == [best]


def test_order_and_bands_are_handed_on() -> None:
    groups = [_group(index, (0.0, 1.0 + index)) for index in range(4)]
    assert select(groups, GroupFilter(strategy="top_k", keep=0.25, order="smallest")).kept == [0]
    assert select(groups, GroupFilter(strategy="min_p", keep=0.5)).kept == [3, 2]
    assert sorted(select(groups, GroupFilter(strategy="band", band=(0.5, 1.0))).kept, key=str) == [2, 3]
    flat = [*groups, _group(4, FLAT)]
    assert len(select(flat, GroupFilter(strategy="all")).kept) == 5
    assert len(select(flat, GroupFilter(**DYNAMIC)).kept) == 4


@pytest.mark.parametrize(
    ("earlier", "kept"),
    # Variances 0.5 and 0.005: their spread over their mean is 0.98 (ddof 0). Enough alone, too little with two steps of 0.5 before it.
    [((), [0]), ((0.5, 0.5), [0, 1]), ((2.0, 0.1), [0])],
)
def test_auto_looks_at_earlier_steps_too(earlier: tuple[float, ...], kept: list[int]) -> None:
    groups = [_group(0, (0.0, 1.0)), _group(1, (0.0, 0.1))]
    rules = GroupFilter(strategy="auto", auto_ratio=0.75)
    assert select(groups, rules).rv_ratio == pytest.approx(0.980198, abs=1e-6)
    assert sorted(select(groups, rules, earlier).kept, key=str) == kept
    assert [group.index for group in sample_batch(lambda count, first: groups, 2, rules, earlier).kept] == kept


# Several environments in one run.

SMALL_SCALE = [(0.0, 0.5), (0.0, 0.8), (0.0, 0.9), (0.0, 1.0)]
"""Rewards of four groups of an environment that pays at most 1; their variances are 0.125, 0.32, 0.405 and 0.5."""
LARGE_SCALE = [(0.0, 10 * reward) for _, reward in SMALL_SCALE]


def _mixture(order: Sequence[int] = range(8)) -> list[Group]:
    """Groups 0 to 3 of an environment with rewards of scale 10, groups 4 to 7 of one with rewards of scale 1."""
    groups = [_group(index, rewards, env="large") for index, rewards in enumerate(LARGE_SCALE)]
    groups += [_group(index, rewards, env="small") for index, rewards in enumerate(SMALL_SCALE, start=4)]
    return [groups[number] for number in order]


def test_environments_of_different_reward_scale_both_keep_groups() -> None:
    """Ranked by raw variance, 0.9 of the sum is in the groups of the first alone: 12.5, 32, 40.5 and 50 against 1.35 in all."""
    rules = GroupFilter(strategy="top_p", keep=0.9)
    found = select(_mixture(), rules)
    assert set(found.kept) == {1, 2, 3, 5, 6, 7}
    assert set(select([_group(index, rewards) for index, rewards in enumerate([*LARGE_SCALE, *SMALL_SCALE])], rules).kept) == {0, 1, 2, 3}
    assert found.scores == pytest.approx({0: 12.5, 1: 32, 2: 40.5, 3: 50, 4: 0.125, 5: 0.32, 6: 0.405, 7: 0.5})
    assert set(select(_mixture([4, 0, 5, 1, 6, 2, 7, 3]), rules).kept) == set(found.kept)


@pytest.mark.parametrize("strategy", ["top_p", "top_k", "min_p", "all"])
def test_an_environment_keeps_in_a_mixture_what_it_keeps_alone(strategy: str) -> None:
    rules = GroupFilter(strategy=strategy, keep=0.5)
    mixture = _mixture()
    alone = [select([group for group in mixture if group.env == env], rules) for env in ("large", "small")]
    found = select(mixture, rules)
    assert sorted(found.kept, key=str) == sorted([*alone[0].kept, *alone[1].kept], key=str)
    assert found.kept_ratio == len(found.kept) / 8


@pytest.mark.parametrize("strategy", ["top_p", "top_k", "min_p", "all"])
def test_with_one_environment_the_ranking_is_that_of_the_groups(strategy: str) -> None:
    rules = GroupFilter(strategy=strategy, keep=0.9)
    named = select([_group(index, rewards, env="large") for index, rewards in enumerate(LARGE_SCALE)], rules)
    expected = select_groups([r for pair in LARGE_SCALE for r in pair], [0, 0, 1, 1, 2, 2, 3, 3], strategy=strategy, keep=0.9)
    ranking = sorted(expected.kept) if strategy == "all" else expected.kept  # `all` ranks nothing: groups stay in the order of sampling
    assert (named.kept, named.dropped, named.scores) == (ranking, expected.dropped, expected.scores)
    assert named.mask.tolist() == expected.mask.tolist() and (named.rv_mean, named.rv_ratio) == (expected.rv_mean, expected.rv_ratio)


def test_a_batch_of_two_environments_takes_the_best_of_both() -> None:
    mixture = _mixture([0, 4, 1, 5, 2, 6, 3, 7])
    kept = sample_batch(lambda count, first: mixture, 8, GroupFilter(strategy="top_k", keep=0.5)).kept
    assert [group.index for group in kept] == [2, 6, 3, 7]
