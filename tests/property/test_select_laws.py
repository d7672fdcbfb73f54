"""select_groups on random batches: laws that hold for every strategy, score and order, and the rules against brute force.

Rewards are small integers, so that sums and variances are exact on paper and no law hangs on a rounding.
"""

from fractions import Fraction
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tether import Selection, select_groups

laws = settings(derandomize=True, max_examples=100, deadline=None, database=None)

STRATEGIES = ("top_p", "top_k", "min_p", "band", "all")
SCORES = ("reward_variance", "reward_std", "outcome_variance", "reward_sum", "entropy", "entropy_variance", "length")
KEEPS = st.sampled_from([0.25, 0.5, 0.75, 1.0]) | st.integers(1, 100).map(lambda hundredths: hundredths / 100)  # halves meet sums exactly


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Rows of up to 6 groups, uneven, in any order, with every column."""
    group = st.sampled_from(["a", "b", 3, (4, 5), "é", -1])
    row = st.tuples(st.integers(-3, 3), group, st.booleans(), st.integers(0, 4), st.integers(1, 9))
    columns = zip(*draw(st.lists(row, min_size=1, max_size=16)), strict=True)
    return dict(zip(("rewards", "groups", "successes", "entropies", "lengths"), map(list, columns), strict=True))


@st.composite
def rules(draw: st.DrawFn) -> dict[str, Any]:
    low, high = sorted(draw(st.lists(st.integers(0, 8), min_size=2, max_size=2, unique=True)))
    return {
        "strategy": draw(st.sampled_from(STRATEGIES)),
        "score": draw(st.sampled_from(SCORES)),
        "order": draw(st.sampled_from(["largest", "smallest"])),
        "include_zero": draw(st.booleans()),
        "keep": draw(KEEPS),
        "eps": draw(st.sampled_from([0, 0.01, 1])),
        "band": (low / 8, high / 8),
    }


def exact_variance(rewards: list[int]) -> Fraction:
    if len(rewards) < 2:
        return Fraction(0)
    mean = Fraction(sum(rewards), len(rewards))
    return sum(((reward - mean) ** 2 for reward in rewards), Fraction(0)) / (len(rewards) - 1)


def by_group(batch: dict[str, Any]) -> dict[Any, list[int]]:
    members: dict[Any, list[int]] = {}
    for reward, group in zip(batch["rewards"], batch["groups"], strict=True):
        members.setdefault(group, []).append(reward)
    return members


def run(batch: dict[str, Any], rule: dict[str, Any]) -> Selection:
    return select_groups(**batch, **rule)


@laws
@given(batches(), rules())
def test_what_always_holds(batch: dict[str, Any], rule: dict[str, Any]) -> None:
    selection = run(batch, rule)
    kept, dropped = selection.kept, selection.dropped
    assert sorted([*kept, *dropped], key=repr) == sorted(set(batch["groups"]), key=repr), "kept and dropped are all groups, once"
    assert set(selection.scores) == set(batch["groups"])
    assert selection.mask.tolist() == [group in kept for group in batch["groups"]]
    assert selection.kept_ratio == len(kept) / len(selection.scores)
    sign = 1 if rule["order"] == "smallest" else -1
    for ranked in (kept, dropped):
        values = [sign * selection.scores[group] for group in ranked]
        assert values == sorted(values), "best first"
    variances = [exact_variance(rewards) for rewards in by_group(batch).values()]
    assert selection.zero_variance == variances.count(Fraction(0))
    assert np.isclose(selection.rv_mean, float(sum(variances) / len(variances)), rtol=1e-12)


@laws
@given(batches(), rules())
def test_kept_has_the_best_scores(batch: dict[str, Any], rule: dict[str, Any]) -> None:
    """All strategies but band keep a prefix of the ranking: nothing dropped is better than anything kept."""
    selection = run(batch, {**rule, "include_zero": True})
    if rule["strategy"] == "band" or not selection.kept or not selection.dropped:
        return
    kept, dropped = ([selection.scores[group] for group in part] for part in (selection.kept, selection.dropped))
    assert max(kept) <= min(dropped) if rule["order"] == "smallest" else min(kept) >= max(dropped)


@laws
@given(batches(), rules(), st.randoms(use_true_random=False))
def test_permuting_rows_permutes_the_mask(batch: dict[str, Any], rule: dict[str, Any], random: Any) -> None:
    """Rows are shuffled so that groups still appear in the same order (that order breaks ties)."""
    num = len(batch["rewards"])
    first = {group: batch["groups"].index(group) for group in set(batch["groups"])}
    order = sorted(first.values()) + random.sample([row for row in range(num) if row not in first.values()], num - len(first))
    shuffled = {name: [values[row] for row in order] for name, values in batch.items()}
    before, after = run(batch, rule), run(shuffled, rule)
    assert after.mask.tolist() == before.mask[order].tolist()
    assert (after.kept, after.dropped) == (before.kept, before.dropped)


@laws
@given(batches(), rules(), st.randoms(use_true_random=False))
def test_any_permutation_keeps_the_same_scores(batch: dict[str, Any], rule: dict[str, Any], random: Any) -> None:
    """With ties another group of the same score may be kept, but no other score."""
    order = random.sample(range(len(batch["rewards"])), len(batch["rewards"]))
    shuffled = {name: [values[row] for row in order] for name, values in batch.items()}
    before, after = run(batch, rule), run(shuffled, rule)
    assert np.allclose([before.scores[g] for g in before.kept], [after.scores[g] for g in after.kept], rtol=1e-12, atol=0)
    distinct = len({round(value, 9) for value in before.scores.values()}) == len(before.scores)
    if distinct:
        assert after.mask.tolist() == before.mask[order].tolist()


@laws
@given(
    batches(), KEEPS, st.sampled_from([0.25, 0.3, 3, 7, 128]), st.sampled_from(["largest", "smallest"]), st.sampled_from(["top_p", "min_p"])
)
def test_the_unit_of_the_reward_does_not_matter(batch: dict[str, Any], keep: float, unit: float, order: str, strategy: str) -> None:
    rule = {"strategy": strategy, "eps": 0, "keep": keep, "order": order}
    scaled = [reward * unit for reward in batch["rewards"]]
    base, other = select_groups(batch["rewards"], batch["groups"], **rule), select_groups(scaled, batch["groups"], **rule)
    values = sorted(exact_variance(rewards) for rewards in by_group(batch).values())
    if len(set(values)) == len(values):  # rounding may order equal variances otherwise
        assert other.kept == base.kept
    assert len(other.kept) == len(base.kept)
    assert np.isclose(other.rv_ratio, base.rv_ratio, rtol=1e-9)


@laws
@given(batches(), KEEPS, st.integers(-5, 5))
def test_shifting_all_rewards_changes_nothing(batch: dict[str, Any], keep: float, shift: int) -> None:
    base = select_groups(batch["rewards"], batch["groups"], keep=keep)
    other = select_groups([reward + shift for reward in batch["rewards"]], batch["groups"], keep=keep)
    assert np.allclose([base.scores[g] for g in base.kept], [other.scores[g] for g in other.kept], rtol=1e-9)


@laws
@given(batches(), rules(), KEEPS)
def test_a_larger_share_keeps_at_least_the_same(batch: dict[str, Any], rule: dict[str, Any], other: float) -> None:
    """For top_p and top_k; min_p runs the other way, a higher bar keeps less."""
    for strategy in ("top_p", "top_k", "min_p"):
        if strategy == "min_p" and rule["score"] == "reward_sum":
            continue  # a share of a negative best lies above it
        low, high = sorted([rule["keep"], other])
        less, more = (run(batch, {**rule, "strategy": strategy, "keep": keep}).kept for keep in (low, high))
        if strategy == "min_p":
            less, more = more, less
        assert more[: len(less)] == less


@laws
@given(batches(), KEEPS, st.sampled_from(["largest", "smallest"]))
def test_top_p_against_brute_force(batch: dict[str, Any], keep: float, order: str) -> None:
    """In fractions: the shortest prefix whose sum reaches keep * total, and at least one group with signal."""
    variances = sorted((exact_variance(rewards) for rewards in by_group(batch).values()), reverse=order == "largest")
    share = Fraction(round(keep * 100), 100)
    expected = 0
    if sum(variances) > 0:
        expected = next(k for k in range(1, len(variances) + 1) if sum(variances[:k]) >= share * sum(variances))
    assert len(select_groups(batch["rewards"], batch["groups"], keep=keep, eps=0, order=order).kept) == expected


@laws
@given(batches(), KEEPS)
def test_min_p_and_top_k_against_brute_force(batch: dict[str, Any], keep: float) -> None:
    variances = [exact_variance(rewards) for rewards in by_group(batch).values()]
    share, signal = Fraction(round(keep * 100), 100), max(variances) > 0
    for order, passes in (
        ("largest", [v for v in variances if v >= share * max(variances)]),
        ("smallest", [v for v in variances if v * share <= min(variances)]),
    ):
        selection = select_groups(batch["rewards"], batch["groups"], strategy="min_p", keep=keep, order=order)
        assert len(selection.kept) == (len(passes) if signal else 0)
        selection = select_groups(batch["rewards"], batch["groups"], strategy="top_k", keep=keep, order=order)
        assert len(selection.kept) == (share * len(variances) // 1 if signal else 0)


@laws
@given(batches(), rules())
def test_include_zero_never_keeps_a_flat_group(batch: dict[str, Any], rule: dict[str, Any]) -> None:
    selection = run(batch, {**rule, "include_zero": False})
    flat = {group for group, rewards in by_group(batch).items() if exact_variance(rewards) == 0}
    assert not flat & set(selection.kept)
