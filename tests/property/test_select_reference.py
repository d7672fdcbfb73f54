"""select_groups against a second implementation, written from the text of the design in exact arithmetic, over thousands of batches.

The reference knows nothing of arrays: rewards are fractions, scores are fractions (a root to fifty digits), ties are ties, and a rule is a
plain loop. Batches are small and made of few different rewards, so that ties, flat groups, groups of one and negative rewards are common.
"""

import itertools
import random
from decimal import Decimal, getcontext
from fractions import Fraction
from typing import Any

import pytest

from tether import select_groups

STRATEGIES = ("top_p", "top_k", "min_p", "band", "all")
SCORES = ("reward_variance", "reward_std", "outcome_variance", "reward_sum", "entropy", "entropy_variance", "length")
SPREADS = ("reward_variance", "reward_std", "outcome_variance", "entropy_variance")
ROOT_ERROR = Fraction(1, 10**40)
Column = list[Fraction]


def mean(values: Column) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def variance(values: Column) -> Fraction:
    if len(values) == 1:
        return Fraction(0)
    centre = mean(values)
    return sum(((value - centre) ** 2 for value in values), Fraction(0)) / (len(values) - 1)


def root(value: Fraction) -> Fraction:
    getcontext().prec = 60
    return Fraction((Decimal(value.numerator) / Decimal(value.denominator)).sqrt())


def score_of(score: str, member: dict[str, Column]) -> Fraction:
    match score:
        case "reward_variance":
            return variance(member["rewards"])
        case "reward_std":
            return root(variance(member["rewards"]))
        case "outcome_variance":
            return variance(member["successes"])
        case "reward_sum":
            return sum(member["rewards"], Fraction(0))
        case "entropy":
            return mean(member["entropies"])
        case "entropy_variance":
            return variance(member["entropies"])
        case _:
            return mean(member["lengths"])


def prefix_by_mass(ranked: Column, keep: Fraction, eps: Fraction) -> int:
    """Smallest prefix whose sum reaches keep * total - eps and that holds something; negative scores have no mass."""
    total = sum((max(value, Fraction(0)) for value in ranked), Fraction(0))
    reached = Fraction(0)
    for count, value in enumerate(ranked, start=1):
        reached += max(value, Fraction(0))
        if reached > 0 and reached >= keep * total - eps - ROOT_ERROR:
            return count
    return 0


def reference(batch: dict[str, list[Fraction]], ids: list[Any], rule: dict[str, Any]) -> list[Any]:
    """The kept groups, best first."""
    order_of_appearance = list(dict.fromkeys(ids))
    scores: dict[Any, Fraction] = {}
    flat: dict[Any, bool] = {}
    for group in order_of_appearance:
        member = {name: [value for value, owner in zip(column, ids, strict=True) if owner == group] for name, column in batch.items()}
        scores[group] = score_of(rule["score"], member)
        flat[group] = variance(member["rewards"]) == 0 or (rule["score"] in SPREADS and scores[group] == 0)
    if rule["strategy"] != "all" and all(value == 0 for value in scores.values()):
        return []
    smallest = rule["order"] == "smallest"
    ranking: list[Any] = []
    for group in order_of_appearance:  # insertion: behind everything that is at least as good
        place = sum(1 for other in ranking if (scores[other] <= scores[group] if smallest else scores[other] >= scores[group]))
        ranking.insert(place, group)
    if not rule["include_zero"]:
        ranking = [group for group in ranking if not flat[group]]
    ranked = [scores[group] for group in ranking]
    keep, eps, num = Fraction(str(rule["keep"])), Fraction(str(rule["eps"])), len(ranking)
    if not ranking or rule["strategy"] == "all":
        return ranking
    if rule["strategy"] == "top_p":
        return ranking[: prefix_by_mass(ranked, keep, eps)]
    if rule["strategy"] == "top_k":
        return ranking[: int(keep * len(order_of_appearance))]
    if rule["strategy"] == "min_p":
        if smallest:
            return [group for group in ranking if scores[group] * keep <= ranked[0] + ROOT_ERROR]
        return [group for group in ranking if scores[group] >= ranked[0] * keep - ROOT_ERROR]
    low, high = (int(Fraction(str(share)) * num) for share in rule["band"])
    counted = ranking[::-1]  # from the lowest score; in reverse, where the ranking ascends, from the highest
    inside = set(counted[low:high])
    return [group for group in ranking if group in inside]


UNITS = {"whole": Fraction(1), "tenths": Fraction(1, 10), "large": Fraction(1000), "small": Fraction(1, 1000)}


def random_batch(draw: random.Random) -> tuple[dict[str, list[Fraction]], list[Any]]:
    names = draw.sample(["a", "b", 3, (4, 5), "é", -1, "g", 8.5], draw.randint(1, 8))
    ids = [draw.choice(names) for _ in range(draw.randint(1, 24))]
    unit = UNITS[draw.choice(list(UNITS))]
    shift = draw.choice([0, 0, 0, 7, -13])
    values = draw.choice([[0, 1], [-1, 0, 1], [-10, -1, 108], list(range(-3, 4)), [5]])
    batch = {
        "rewards": [(draw.choice(values) + shift) * unit for _ in ids],
        "successes": [Fraction(draw.choice([0, 1])) for _ in ids],
        "entropies": [Fraction(draw.randint(0, 5), 5) for _ in ids],
        "lengths": [Fraction(draw.randint(1, 4)) for _ in ids],
    }
    return batch, ids


def random_rule(draw: random.Random) -> dict[str, Any]:
    low, high = sorted(draw.sample(range(21), 2))
    return {
        "keep": draw.choice([0.05, 0.1, 0.25, 0.3, 0.5, 0.6, 0.75, 0.9, 0.95, 1.0]),
        "eps": draw.choice([0, 0.01, 0.01, 0.5]),
        "band": (low / 20, high / 20),
    }


@pytest.mark.parametrize(("strategy", "order"), list(itertools.product(STRATEGIES, ("largest", "smallest"))))
def test_thousands_of_random_batches(strategy: str, order: str) -> None:
    """420 batches for each strategy and order, through every score, with and without flat groups: 4,200 in all."""
    draw = random.Random(f"{strategy} {order}")
    seen_kept = seen_dropped = 0
    for score, include_zero, _ in itertools.product(SCORES, (True, False), range(30)):
        batch, ids = random_batch(draw)
        rule: dict[str, Any] = {"strategy": strategy, "order": order, "score": score, "include_zero": include_zero, **random_rule(draw)}
        columns: dict[str, Any] = {name: [float(value) for value in column] for name, column in batch.items()}
        selection = select_groups(groups=ids, **columns, **rule)
        assert selection.kept == reference(batch, ids, rule), (batch, ids, rule)
        seen_kept += len(selection.kept)
        seen_dropped += len(selection.dropped)
    assert seen_kept > 100
    assert seen_dropped > 100 or strategy == "all"


@pytest.mark.parametrize("score", ["reward_variance", "reward_std"])
@pytest.mark.parametrize("size", [3, 4, 5, 7, 16])
def test_the_order_of_members_ranks_no_group(size: int, score: str) -> None:
    """Groups with the same rewards in another order are ties, though sums of floats differ in the last digit."""
    draw = random.Random(size)
    for _ in range(40):
        rewards = [draw.choice([10.8, -1.0, -0.1, 0.7]) for _ in range(size)]
        columns = [draw.sample(rewards, size) for _ in range(6)]
        flat = [reward for column in columns for reward in column]
        selection = select_groups(flat, [group for group in range(6) for _ in range(size)], strategy="all", score=score)
        assert selection.kept == list(range(6))
        assert len(set(selection.scores.values())) == 1
