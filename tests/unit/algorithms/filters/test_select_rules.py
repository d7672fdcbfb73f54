"""select_groups, the rules: every strategy x order x score on one batch worked by hand, and each rule at its edges.

The batch has four groups of two, interleaved, first seen in the order b d a c. Two rewards that differ by d have variance d^2 / 2 (ddof 1):

    group   rewards   variance   sum   successes  outcome var   entropies  mean  var   lengths  mean
    b        1,  2      0.5       3      0, 1         0.5         1,  2     1.5   0.5   10, 20    15
    d        0,  4      8         4      0, 0         0          .5, .5     0.5   0      5,  5     5
    a        3,  3      0         6      1, 1         0           2,  4     3     2     30, 10    20
    c       -1,  1      2         0      0, 1         0.5         1,  1     1     0      8,  2     5
"""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tether import Selection, select_groups

GROUPS = list("bdabccda")
REWARDS = [1, 0, 3, 2, -1, 1, 4, 3]
COLUMNS: dict[str, Any] = {
    "successes": [0, 0, 1, 1, 0, 1, 0, 1],
    "entropies": [1, 0.5, 2, 2, 1, 1, 0.5, 4],
    "lengths": [10, 5, 30, 20, 8, 2, 5, 10],
}
SCORES = {
    "reward_variance": {"b": 0.5, "d": 8, "a": 0, "c": 2},
    "reward_std": {"b": 0.5**0.5, "d": 8**0.5, "a": 0, "c": 2**0.5},
    "outcome_variance": {"b": 0.5, "d": 0, "a": 0, "c": 0.5},
    "reward_sum": {"b": 3, "d": 4, "a": 6, "c": 0},
    "entropy": {"b": 1.5, "d": 0.5, "a": 3, "c": 1},
    "entropy_variance": {"b": 0.5, "d": 0, "a": 2, "c": 0},
    "length": {"b": 15, "d": 5, "a": 20, "c": 5},
}
# Kept groups, best first, at keep 0.5, eps 0 and band (0, 0.5), for order largest and order smallest. Equal scores stand as first seen.
# top_p: the ranking up to half the total. min_p: at least half the best, or at most twice the lowest (for std c is exactly half of d).
# band: the lower half of the scores, reversed the upper half.
KEPT = {
    #                      all             top_p            top_k        min_p         band
    "reward_variance": (("dcba", "abcd"), ("d", "abcd"), ("dc", "ab"), ("d", "a"), ("ba", "cd")),
    "reward_std": (("dcba", "abcd"), ("d", "abcd"), ("dc", "ab"), ("dc", "a"), ("ba", "cd")),
    "outcome_variance": (("bcda", "dabc"), ("b", "dab"), ("bc", "da"), ("bc", "da"), ("da", "bc")),
    "reward_sum": (("adbc", "cbda"), ("ad", "cbd"), ("ad", "cb"), ("adb", "c"), ("bc", "da")),
    "entropy": (("abcd", "dcba"), ("a", "dcb"), ("ab", "dc"), ("ab", "dc"), ("cd", "ba")),
    "entropy_variance": (("abdc", "dcba"), ("a", "dcba"), ("ab", "dc"), ("a", "dc"), ("dc", "ba")),
    "length": (("abdc", "dcba"), ("ab", "dcb"), ("ab", "dc"), ("ab", "dc"), ("dc", "ba")),
}
STRATEGIES = ("all", "top_p", "top_k", "min_p", "band")
CASES = [
    (score, strategy, order, kept)
    for score, by_strategy in KEPT.items()
    for strategy, both in zip(STRATEGIES, by_strategy, strict=True)
    for order, kept in zip(("largest", "smallest"), both, strict=True)
]


def pick(**options: Any) -> Selection:
    return select_groups(REWARDS, GROUPS, **{"keep": 0.5, "eps": 0, "band": (0, 0.5), **COLUMNS, **options})


def pairs(**variances: float) -> tuple[list[float], list[str]]:
    """Two rewards per group, sqrt(2 v) apart: their variance is v."""
    return [reward for v in variances.values() for reward in (0.0, (2 * v) ** 0.5)], [group for group in variances for _ in range(2)]


@pytest.mark.parametrize(("score", "strategy", "order", "kept"), CASES, ids=["-".join(case[:3]) for case in CASES])
def test_by_hand(score: str, strategy: str, order: str, kept: str) -> None:
    selection = pick(score=score, strategy=strategy, order=order)
    assert selection.kept == list(kept)
    assert selection.scores == pytest.approx(SCORES[score], rel=1e-15)
    assert selection.mask.dtype == bool
    assert selection.mask.tolist() == [group in kept for group in GROUPS]
    ranking = KEPT[score][0][order == "smallest"]
    assert selection.dropped == [group for group in ranking if group not in kept], "the others, best first"
    assert selection.kept_ratio == len(kept) / 4


@pytest.mark.parametrize("score", KEPT)
def test_reward_variance_is_reported_whatever_the_score(score: str) -> None:
    """Variances 0.5, 8, 0, 2: mean 10.5 / 4, mean of squares 68.25 / 4, so the population variance is 17.0625 - 6.890625."""
    selection = pick(score=score, order="smallest")
    assert (selection.zero_variance, selection.rv_mean) == (1, 2.625)
    assert selection.rv_std == pytest.approx(10.171875**0.5, rel=1e-15)
    assert selection.rv_std == pytest.approx(3.1893377, abs=1e-7)
    assert selection.rv_ratio == pytest.approx(1.2149858, abs=1e-7)


def test_defaults_are_the_papers() -> None:
    """Variances 8, 2, 0.5, 0 sum to 10.5; 0.9 of it less 0.01 is 9.44: 8 + 2 reaches it, 8 does not."""
    assert select_groups(REWARDS, GROUPS).kept == ["d", "c"]
    # 0.9 of 10.505 is 9.4545; 9.45 falls short of it by less than the slack.
    rewards, groups = pairs(a=9.45, b=1.055)
    assert select_groups(rewards, groups).kept == ["a"]
    assert select_groups(rewards, groups, eps=0).kept == ["a", "b"]


def test_uneven_interleaved_groups_of_mixed_ids() -> None:
    """(0, 1): rewards 0 0 3 -> mean 1, squares 1 + 1 + 4 = 6, over 2 = 3. "x": 1 1 2 2 -> 4 * 0.25 / 3 = 1/3. 7: one member, variance 0."""
    ids = [(0, 1), "x", 7, "x", (0, 1), "x", (0, 1), "x"]
    selection = select_groups([0, 1, 5, 1, 0, 2, 3, 2], ids, strategy="top_k", keep=0.7)
    assert selection.scores == pytest.approx({(0, 1): 3, "x": 1 / 3, 7: 0})
    assert selection.kept == [(0, 1), "x"]
    assert selection.dropped == [7]
    assert selection.mask.tolist() == [True, True, False, True, True, True, True, True]
    assert selection.zero_variance == 1
    assert selection.rv_mean == pytest.approx(10 / 9)
    assert selection.kept_ratio == 2 / 3, "of groups, not of trajectories"


@pytest.mark.parametrize("order", ["largest", "smallest"])
@pytest.mark.parametrize("strategy", ["top_p", "top_k", "min_p", "band"])
def test_ties_keep_the_order_of_first_appearance(strategy: str, order: str) -> None:
    groups = ["q", "m", "z", "a", "z", "a", "q", "m"]
    selection = select_groups([0, 0, 0, 0, 1, 1, 1, 1], groups, strategy=strategy, order=order, keep=1, eps=0, band=(0, 1))
    assert selection.kept == ["q", "m", "z", "a"]
    assert select_groups([0, 0, 0, 0, 1, 1, 1, 1], groups, strategy="top_p", order=order, keep=0.5, eps=0).kept == ["q", "m"]


@pytest.mark.parametrize("include_zero", [True, False])
@pytest.mark.parametrize("order", ["largest", "smallest"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("score", ["reward_variance", "reward_std", "outcome_variance", "entropy_variance"])
def test_equal_rewards_keep_nothing(score: str, strategy: str, order: str, include_zero: bool) -> None:
    same = [2.5] * 6
    selection = select_groups(
        same,
        list("xyxyxy"),
        score=score,
        strategy=strategy,
        order=order,
        include_zero=include_zero,
        keep=1,
        band=(0, 1),
        successes=[1] * 6,
        entropies=same,
    )
    kept = ["x", "y"] if strategy == "all" and include_zero else []
    assert selection.kept == kept
    assert selection.mask.tolist() == [bool(kept)] * 6
    assert selection.kept_ratio == len(kept) / 2
    assert (selection.zero_variance, selection.rv_mean, selection.rv_std, selection.rv_ratio) == (2, 0, 0, 0)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_group(strategy: str) -> None:
    selection = select_groups([0, 1, 2], ["only"] * 3, strategy=strategy, keep=1, band=(0, 1))
    assert (selection.kept, selection.dropped, selection.kept_ratio) == (["only"], [], 1)
    assert (selection.scores, selection.rv_mean, selection.rv_std, selection.rv_ratio) == ({"only": 1}, 1, 0, 0)
    assert select_groups([0, 1, 2], [9] * 3, keep=0.01).kept == [9], "top_p keeps the best group however small the share"


def test_a_group_of_one_has_variance_zero() -> None:
    alone = select_groups([7], ["one"])
    assert (alone.kept, alone.scores, alone.zero_variance) == ([], {"one": 0}, 1)
    beside = select_groups([7, 0, 2], ["one", "two", "two"], strategy="top_k", keep=1, include_zero=False)
    assert (beside.kept, beside.dropped, beside.zero_variance) == (["two"], ["one"], 1)


def test_rounding_noise_is_no_variance() -> None:
    """0.1 + 0.2 is not 0.3; their variance is about 1.5e-33."""
    rewards = [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2]
    for strategy in STRATEGIES[1:]:
        assert select_groups(rewards, [0, 0, 1, 1], strategy=strategy, keep=1, band=(0, 1)).kept == []
    assert select_groups(rewards, [0, 0, 1, 1], strategy="all", include_zero=False).kept == []
    assert select_groups(rewards, [0, 0, 1, 1]).zero_variance == 2
    assert select_groups([*rewards[:2], 1, 1], [0, 0, 1, 1]).rv_ratio == 0, "the spread of noise over its mean means nothing"


@pytest.mark.parametrize(("apart", "zero"), [(1.4e-6, True), (1.5e-6, False)])
def test_zero_is_at_most_1e_12(apart: float, zero: bool) -> None:
    """Variances 0.98e-12 and 1.125e-12: one bound for the scores, for include_zero and for the count."""
    rewards = [0, apart, 0, apart]
    for strategy in STRATEGIES[1:]:
        assert bool(select_groups(rewards, [0, 0, 1, 1], strategy=strategy, keep=1, band=(0, 1)).kept) is not zero
    assert select_groups(rewards, [0, 0, 1, 1], strategy="all", include_zero=False).kept == ([] if zero else [0, 1])
    assert select_groups(rewards, [0, 0, 1, 1]).zero_variance == (2 if zero else 0)
    assert select_groups(rewards, [0, 0, 1, 1]).rv_ratio == 0


def test_reward_std_has_the_same_zeros_as_reward_variance() -> None:
    """Rewards equal but for float32 rounding: variance 1.8e-15, which is zero, and std 4.2e-8, which is the same fact."""
    rewards, groups = [0.7, 0.7 + 6e-8, 0.7, 0.7 + 6e-8], [0, 0, 1, 1]
    assert select_groups(rewards, groups, score="reward_variance").kept == []
    assert select_groups(rewards, groups, score="reward_std").kept == []


def test_a_score_that_is_zero_on_paper_is_zero() -> None:
    """0.1 + 0.2 - 0.3 is 5.6e-17 in floats; the lowest sum is then above 0.3 of itself, and the group with sum 0 would not be kept."""
    rewards, groups = [-0.3, 0.1, 0.2, 1, 1], [0, 0, 0, 1, 1]
    selection = select_groups(rewards, groups, score="reward_sum", strategy="min_p", order="smallest", keep=0.3)
    assert (selection.scores, selection.kept) == ({0: 0, 1: 2}, [0])
    flipped = select_groups(
        [-reward for reward in rewards[:3]] + rewards[3:], groups, score="reward_sum", strategy="min_p", order="smallest"
    )
    assert (flipped.scores, flipped.kept) == ({0: 0, 1: 2}, [0])


def test_groups_whose_scores_differ_by_rounding_are_ties() -> None:
    """The same rewards in another order; np.var tells them apart in the last digit. As near as 1e-8 they are different."""
    rewards = [0.7, 0.1, 0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.1]
    selection = select_groups(rewards, list("bbbaaaccc"), strategy="top_k", keep=0.34)
    assert selection.kept == ["b"]
    assert selection.dropped == ["a", "c"]
    near, groups = pairs(a=1, b=1 + 1e-8)
    assert select_groups(near, groups, strategy="all").kept == ["b", "a"]


@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_many_ties_stand_as_first_seen(order: str) -> None:
    """More of them than a sort that is not stable leaves in place."""
    rewards, groups = pairs(**{f"g{n}": 2 if n % 3 else 1 for n in range(100)})
    twos, ones = ([f"g{n}" for n in range(100) if bool(n % 3) is two] for two in (True, False))
    assert select_groups(rewards, groups, strategy="all", order=order).kept == ([*twos, *ones] if order == "largest" else [*ones, *twos])


def test_equal_rewards_have_no_variance_however_large() -> None:
    assert select_groups([1e10 + 0.1] * 10 + [1e11 + 0.1] * 3, [0] * 10 + [1] * 3).zero_variance == 2


# ---------------------------------------------------------------------------------------------------------------- top_p


@pytest.mark.parametrize(
    ("variances", "keep", "eps", "kept"),
    [
        # The last group is worth less than the slack: 8 >= 8.005 - 0.01.
        ({"a": 8, "b": 0.005}, 1, 0.01, "a"),
        ({"a": 8, "b": 0.005}, 1, 0, "ab"),
        ({"a": 8, "b": 0.02}, 1, 0.01, "ab"),
        # Reaching the threshold exactly is enough: 2 >= 2.5 - 0.5, 6 >= 0.75 * 8.
        ({"a": 2, "b": 0.5}, 1, 0.5, "a"),
        ({"a": 6, "b": 2}, 0.75, 0, "a"),
        ({"a": 6, "b": 2}, 0.76, 0, "ab"),
        # Exactly on paper, not in floats: 0.1 + 0.2 + 0.3 against 0.6 of 1.
        ({"a": 0.3, "b": 0.2, "c": 0.1, "d": 0.1, "e": 0.1, "f": 0.1, "g": 0.1}, 0.6, 0, "abc"),
        # A total below the slack still keeps the best group, and only that one.
        ({"a": 0.001, "b": 0.005}, 0.9, 0.01, "b"),
        ({"a": 0.001, "b": 0.005}, 0.9, 0, "ba"),
        # Everything equal: a share of the groups.
        ({"a": 1, "b": 1, "c": 1, "d": 1}, 0.5, 0, "ab"),
        ({"a": 1, "b": 1, "c": 1, "d": 1}, 0.51, 0, "abc"),
    ],
)
def test_top_p(variances: dict[str, float], keep: float, eps: float, kept: str) -> None:
    rewards, groups = pairs(**variances)
    assert select_groups(rewards, groups, keep=keep, eps=eps).kept == list(kept)


def test_reverse_top_p_takes_the_lowest_up_to_the_share() -> None:
    """Ascending 0, 1, 2, 5 of total 8: 0 + 1 + 2 reaches 3; zeros come along, but never alone."""
    rewards, groups = pairs(a=5, b=1, c=0, d=2)
    assert select_groups(rewards, groups, order="smallest", keep=0.375, eps=0).kept == ["c", "b", "d"]
    assert select_groups(rewards, groups, order="smallest", keep=0.12, eps=0).kept == ["c", "b"]
    assert select_groups(rewards, groups, order="smallest", keep=0.001).kept == ["c", "b"]
    assert select_groups(rewards, groups, order="smallest", keep=0.001, include_zero=False).kept == ["b"]


def test_top_p_gives_negative_sums_no_mass() -> None:
    """Sums 5, -4, 3: the positive mass is 8. 5 reaches 0.6 of it (4.8), 0.7 (5.6) needs 3 as well; -4 is never reached."""
    rewards, groups = [2, 3, -1, -3, 1, 2], [0, 0, 1, 1, 2, 2]
    assert select_groups(rewards, groups, score="reward_sum", keep=0.6, eps=0).kept == [0]
    assert select_groups(rewards, groups, score="reward_sum", keep=0.7, eps=0).kept == [0, 2]
    assert select_groups(rewards, groups, score="reward_sum", keep=1, eps=0).kept == [0, 2]
    assert select_groups(rewards, groups, score="reward_sum", strategy="top_k", keep=1).kept == [0, 2, 1]
    assert select_groups([-1, -2, -3, -3], [0, 0, 1, 1], score="reward_sum").kept == []
    assert select_groups([-1, -2, -3, -3], [0, 0, 1, 1], score="reward_sum").scores == {0: -3, 1: -6}
    assert select_groups([-1, -2, -3, -3], [0, 0, 1, 1], score="reward_sum", strategy="top_k", keep=0.5).kept == [0]


# ---------------------------------------------------------------------------------------------------------------- top_k


@pytest.mark.parametrize(
    ("num_groups", "keep", "num_kept"),
    [(100, 0.29, 29), (10, 0.7, 7), (10, 0.3, 3), (3, 0.34, 1), (3, 0.33, 0), (3, 0.99, 2), (1, 0.5, 0), (7, 1, 7), (10, 0.69, 6)],
)
def test_top_k_is_the_floor(num_groups: int, keep: float, num_kept: int) -> None:
    """0.29 * 100 is 28.999999999999996 in floats."""
    rewards = [reward for group in range(num_groups) for reward in (0, group + 1)]
    kept = select_groups(rewards, np.repeat(np.arange(num_groups), 2), strategy="top_k", keep=keep).kept
    assert kept == list(range(num_groups))[::-1][:num_kept]


@pytest.mark.parametrize("num_groups", [10, 25])
def test_top_k_at_every_hundredth(num_groups: int) -> None:
    rewards, groups = [0, 1] * num_groups, np.repeat(np.arange(num_groups), 2)
    for hundredths in range(1, 101):
        expected = Fraction(hundredths, 100) * num_groups // 1
        assert len(select_groups(rewards, groups, strategy="top_k", keep=hundredths / 100).kept) == expected, hundredths


def test_top_k_counts_the_share_of_all_groups() -> None:
    """Of 4 groups one is flat: the share stays a share of 4, cut to the 3 that are left."""
    assert pick(strategy="top_k", keep=0.75, include_zero=False).kept == ["d", "c", "b"]
    assert pick(strategy="top_k", keep=0.5, include_zero=False).kept == ["d", "c"]
    assert pick(strategy="top_k", keep=1, include_zero=False).kept == ["d", "c", "b"]
    assert pick(strategy="top_k", keep=1).kept == ["d", "c", "b", "a"], "a flat group is kept where the count asks for it"


# ---------------------------------------------------------------------------------------------------------------- min_p


@pytest.mark.parametrize(
    ("keep", "order", "kept"),
    [
        (0.25, "largest", "dc"),  # 2 is a quarter of 8
        (0.26, "largest", "d"),
        (0.0625, "largest", "dcb"),  # 0.5 is a sixteenth
        (1, "largest", "d"),
        (0.25, "smallest", "bc"),  # flat groups aside the lowest is 0.5; up to 4 times that
        (0.26, "smallest", "b"),
        (0.0625, "smallest", "bcd"),
        (1, "smallest", "b"),
    ],
)
def test_min_p(keep: float, order: str, kept: str) -> None:
    assert pick(strategy="min_p", keep=keep, order=order, include_zero=False).kept == list(kept)


def test_min_p_forgives_rounding() -> None:
    """0.1 is a third of 0.3 and 0.3 is 0.1 / (1/3), on paper."""
    rewards, groups = pairs(a=0.3, b=0.1)
    assert select_groups(rewards, groups, strategy="min_p", keep=0.1 / 0.3).kept == ["a", "b"]
    assert select_groups(rewards, groups, strategy="min_p", keep=0.1 / 0.3, order="smallest").kept == ["b", "a"]


# ----------------------------------------------------------------------------------------------------------------- band


@pytest.mark.parametrize("parts", [2, 3, 4, 10])
@pytest.mark.parametrize("order", ["largest", "smallest"])
def test_bands_partition_the_ranking(parts: int, order: str) -> None:
    for num_groups in range(1, 22):
        rewards, groups = pairs(**{f"g{n}": n + 1 for n in range(num_groups)})
        bands = [(part / parts, (part + 1) / parts) for part in range(parts)]
        kept = [select_groups(rewards, groups, strategy="band", band=band, order=order).kept for band in bands]
        ascending = [f"g{n}" for n in range(num_groups)]
        joined = [group for band in kept for group in reversed(band)]  # each band is best first
        assert joined == (ascending if order == "largest" else ascending[::-1]), "quantiles count from the other end in reverse"
        assert {len(band) for band in kept} <= {num_groups // parts, num_groups // parts + 1}


def test_quartiles() -> None:
    rewards, groups = pairs(a=1, b=2, c=3, d=4, e=5, f=6, g=7, h=8)
    bands = ((0, 0.25), (0.25, 0.5), (0.5, 0.75), (0.75, 1), (0.25, 0.75), (0, 1))
    kept = ["".join(select_groups(rewards, groups, strategy="band", band=band).kept) for band in bands]
    assert kept == ["ba", "dc", "fe", "hg", "fedc", "hgfedcba"]
    # Five groups: floor(0.25 * 5) = 1, floor(0.5 * 5) = 2, floor(0.75 * 5) = 3.
    rewards, groups = pairs(a=1, b=2, c=3, d=4, e=5)
    kept = ["".join(select_groups(rewards, groups, strategy="band", band=band).kept) for band in bands]
    assert kept == ["a", "b", "c", "ed", "cb", "edcba"]


# --------------------------------------------------------------------------------------------------------- include_zero


def test_include_zero_drops_flat_groups_first() -> None:
    """a is flat in reward; d and a are flat in outcome, d and c in entropy."""
    assert pick(strategy="all", include_zero=False).kept == ["d", "c", "b"]
    assert pick(strategy="all", include_zero=False).dropped == ["a"]
    assert pick(strategy="all", include_zero=False, score="outcome_variance").kept == ["b", "c"]
    assert pick(strategy="all", include_zero=False, score="outcome_variance").dropped == ["d", "a"]
    assert pick(strategy="all", include_zero=False, score="entropy_variance").kept == ["b"]
    assert pick(strategy="all", include_zero=False, score="length").kept == ["b", "d", "c"], "a length is no spread: only flat rewards go"
    assert pick(strategy="all", include_zero=False, score="reward_sum").kept == ["d", "b", "c"], "c sums to zero and still varies"
    assert pick(strategy="top_p", order="smallest", keep=0.2, include_zero=False).kept == ["b", "c"]


def test_include_zero_may_leave_nothing() -> None:
    for strategy in STRATEGIES:
        selection = select_groups(
            [3, 3, 4, 4], [0, 0, 1, 1], strategy=strategy, score="length", lengths=[1, 2, 3, 4], include_zero=False, band=(0, 1)
        )
        assert (selection.kept, selection.dropped, selection.kept_ratio) == ([], [1, 0], 0)
