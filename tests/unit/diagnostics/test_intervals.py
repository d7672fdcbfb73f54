"""Intervals over prompts: effects against measurements without each prompt, Student's t, and coverage over repeated sampling."""

import math
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest

from tether import Information, measure_information
from tether.core.intervals import student_t
from tether.core.seeding import generator
from tether.diagnostics.intervals import prompt_effects, studentised_intervals

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]


def number(info: Information, name: str) -> float:
    return info.recall[2] if name == "recall_2" else float(getattr(info, name))


@pytest.mark.parametrize(
    ("degrees", "table"),
    [(1, 12.7062), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (7, 2.36462), (15, 2.13145), (63, 1.99834), (1000, 1.96234)],
)
def test_student_t_against_the_table(degrees: int, table: float) -> None:
    assert student_t(degrees) == pytest.approx(table, rel=2e-3 if degrees == 3 else 5e-4)


# -------------------------------------------------------------------------------------------------------------- effects


def test_effects_of_rows_by_hand() -> None:
    """Values 1 3 | 5 9: without the first prompt the mean is 7, without the second 2. Their mean is 4.5."""
    assert prompt_effects(np.array([1.0, 3.0, 5.0, 9.0]), None, np.array([0, 0, 1, 1]), 2).tolist() == [-2.5, 2.5]


def test_effects_of_uneven_prompts_and_of_one_without_reasonings() -> None:
    """Values 1 | 4 4 | none: means without each 4, 1 and 3; their mean 8/3; times 2."""
    effects = prompt_effects(np.array([4.0, 1.0, 4.0]), None, np.array([1, 0, 1]), 3)
    assert effects == pytest.approx([2 * (8 / 3 - 4), 2 * (8 / 3 - 1), 2 * (8 / 3 - 3)])


def without(sample: Sample, prompt: int) -> Information:
    scores, lengths, source = sample
    rest = source != prompt
    kept = source[rest]
    return measure_information(np.delete(scores[rest], prompt, axis=1), lengths[rest], kept - (kept > prompt))


@pytest.mark.parametrize(
    "name", ["mi", "mi_seq", "mi_token_mean", "retrieval_acc", "recall_2", "h_conditional", "h_marginal", "h_marginal_seq"]
)
def test_the_error_is_that_of_measurements_without_each_prompt(name: str) -> None:
    """One reasoning per prompt, so no spread within prompts: a plain jackknife, done here by measuring P smaller matrices.

    A single draw's ratio is nearly always within Student's t, 2.02269 with 39 degrees; then the interval is the error times that.
    """
    sample = forty_prompts()
    smaller = np.array([number(without(sample, prompt), name) for prompt in range(40)])
    error = math.sqrt(39 / 40 * ((smaller - smaller.mean()) ** 2).sum())
    assert narrowest(sample, name) == pytest.approx(2 * 2.02269 * error, rel=1e-4)


@pytest.mark.parametrize("loud", [False, True])
def test_the_error_of_the_z_score(loud: bool) -> None:
    """Not a mean: its effects are those of a linear approximation, close to the measurements without each prompt.

    Loud: four columns that a third of the reasonings fit well, so that the columns decide the spread of the marginal.
    """
    sample = forty_prompts()
    if loud:
        scores = np.random.default_rng(0).normal(size=(40, 40)) - 30 + 2 * np.eye(40)
        scores[:12, 20:24] += 3
        sample = scores, np.ones(40), np.arange(40)
    smaller = np.array([without(sample, prompt).mi_zscore for prompt in range(40)])
    error = math.sqrt(39 / 40 * ((smaller - smaller.mean()) ** 2).sum())
    assert narrowest(sample, "mi_zscore") == pytest.approx(2 * 2.02269 * error, rel=0.05)


def narrowest(sample: Sample, name: str) -> float:
    """Of four intervals from one draw each."""
    ends = [measure_information(*sample, bootstrap=1, seed=seed).intervals[name] for seed in range(4)]
    return min(high - low for low, high in ends)


def forty_prompts() -> Sample:
    rng = np.random.default_rng(0)
    scores = np.round(2 * rng.normal(size=(40, 40)), 1) - 30 + rng.normal(size=(40, 1))  # rounded: some ties
    scores[np.arange(40), np.arange(40)] += np.round(rng.normal(4, 1.5, size=40), 1)
    return scores, rng.integers(1, 5, size=40), np.arange(40)


def test_prompts_without_reasonings_add_no_certainty() -> None:
    """Entropies 1 and 3 from two of forty prompts. Means without each 3, 1 and 38 times 2: effects -39, 39 and 0, error sqrt(2 * 39 / 40).

    One degree of freedom, not 39: 12.7062 * 1.39642 = 17.743. An entropy is at least 0, and so is the end of its interval.
    """
    scores = np.full((2, 40), -9.0)
    scores[0, 0], scores[1, 1] = -1.0, -3.0
    low, high = measure_information(scores, [1, 1], [0, 1], bootstrap=1).intervals["h_conditional"]
    assert (low, high) == pytest.approx((0.0, 2 + 17.743), abs=1e-2)


def test_effects_of_columns_are_exact_where_reasonings_are_single() -> None:
    """The effects themselves, not only their size: (P - 1) (mean of the estimates without each - estimate without i)."""
    rng = np.random.default_rng(1)
    scores = 2 * rng.normal(size=(6, 6)) - 20
    sample = scores, np.ones(6), np.arange(6)
    smaller = np.array([without(sample, prompt).mi_seq for prompt in range(6)])
    own = scores.diagonal()
    marginal = np.log(np.exp(scores).mean(axis=1))
    change = np.stack([marginal - np.log(np.exp(np.delete(scores, prompt, axis=1)).mean(axis=1)) for prompt in range(6)], axis=1)
    effects = prompt_effects(own - marginal, change, np.arange(6), 6)
    assert effects == pytest.approx(5 * (smaller.mean() - smaller), rel=1e-10)
    assert effects.sum() == pytest.approx(0, abs=1e-12)


def test_a_column_that_leaves_nothing_to_compare_with_has_no_effect_of_its_own() -> None:
    """Two prompts: without one of them information is 0 whatever it was, so only the rows count."""
    values, own = np.array([0.1, 0.2, 0.5, 0.6]), np.array([0, 0, 1, 1])
    assert prompt_effects(values, -np.repeat(values[:, None], 2, axis=1), own, 2).tolist() == prompt_effects(values, None, own, 2).tolist()


def columns_by_loops(change: np.ndarray, own: list[int], num: int) -> list[float]:
    """The effects of the columns with the luck of reasonings taken out, one cell at a time."""
    members = {prompt: [n for n, source in enumerate(own) if source == prompt] for prompt in range(num)}
    totals, env_seed = [0.0] * num, 0.0
    for column in range(num):
        for prompt in range(num):
            cells = [change[n, column] / (len(own) - len(members[column])) for n in members[prompt] if prompt != column]
            totals[column] += sum(cells)
            if len(cells) > 1:
                mean = sum(cells) / len(cells)
                env_seed += len(cells) * sum((cell - mean) ** 2 for cell in cells) / (len(cells) - 1)
    centre = sum(totals) / num
    effects = [(num - 1) * (centre - total) for total in totals]
    # A total with variance v puts (P - 1)^2 v (1 - 1/P) into the sum of squares of the centred effects.
    expected = env_seed * (num - 1) ** 2 * (1 - 1 / num)
    share = max(0.0, 1 - expected / sum(effect**2 for effect in effects))
    return [effect * math.sqrt(share) for effect in effects]


@pytest.mark.parametrize("real", [0.0, 0.5, 4.0])
def test_luck_of_reasonings_is_taken_out_of_the_columns(real: float) -> None:
    rng = np.random.default_rng(5)
    own = np.array([0, 2, 1, 2, 0, 1, 2, 3, 2, 0])  # uneven, unordered, one prompt with a single reasoning
    change = rng.normal(size=(10, 4)) + real * np.array([0, 1, 2, 4])
    rows = np.zeros(10)
    found = prompt_effects(rows, change, own, 4)
    expected = columns_by_loops(change, own.tolist(), 4)
    assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)
    if real == 4:
        assert max(abs(effect) for effect in expected) > 1, "a real difference stays"


def test_the_input_is_left_as_it_was() -> None:
    change = np.ones((4, 4))
    prompt_effects(np.arange(4.0), change, np.arange(4), 4)
    assert (change == 1).all()


# ------------------------------------------------------------------------------------------------------------ intervals


def intervals(
    effects: list[float], estimate: float = 0.0, limits: tuple[float, float] | None = None, resamples: int = 500
) -> tuple[float, float]:
    found = studentised_intervals(
        {"it": estimate},
        {"it": np.array(effects)},
        {"it": limits} if limits else {},
        degrees=len(effects) - 1,
        resamples=resamples,
        rng=np.random.default_rng(0),
    )
    return found["it"]


def test_one_draw_is_student_t() -> None:
    """Effects -1 0 1: error sqrt(2 / 6) = 0.57735, times 4.30265. One draw's ratio is far within."""
    assert intervals([-1.0, 0.0, 1.0], 10.0, resamples=1) == pytest.approx((10 - 2.48414, 10 + 2.48414), abs=1e-4)


def test_a_skewed_effect_reaches_to_its_own_side() -> None:
    """One prompt far above, the rest a little below: samples without such a prompt are too low and too sure, so the upper end goes far."""
    low, high = intervals([*[-1.0] * 15, 15.0], resamples=2000)
    error = math.sqrt((15 + 225) / (16 * 15))
    assert low == pytest.approx(-2.1314 * error, rel=1e-3)
    assert high > 3 * error


def test_by_hand_with_every_resample() -> None:
    """Effects -1, 1: half of all draws have mean 0, a quarter each -1 and 1 with no spread, so a fifth of the error 1 divides: T* = -5, 0, 5.

    Student's t with one degree, 12.7, is wider; with 30 degrees, 2.04, it is not.
    """
    named = {"it": 0.0}, {"it": np.array([-1.0, 1.0])}, {}
    wide, narrow = (
        studentised_intervals(*named, degrees=degrees, resamples=400, rng=np.random.default_rng(0))["it"] for degrees in (1, 30)
    )
    assert wide == pytest.approx((-12.7062, 12.7062), abs=1e-3)
    assert narrow == pytest.approx((-5, 5), rel=1e-12)


def test_against_every_resample() -> None:
    """Effects -4 -1 1 1 3: all 3,125 draws listed, each with its textbook t ratio (no draw of one value over and over among the quantiles)."""
    effects = np.array([-4.0, -1.0, 1.0, 1.0, 3.0])
    draws = effects[np.array(list(product(range(5), repeat=5)))]
    error = math.sqrt((effects**2).sum() / 20)
    ratios = draws.mean(axis=1) / np.maximum(draws.std(axis=1, ddof=1) / math.sqrt(5), 0.2 * error)
    lower, upper = np.quantile(ratios, (0.025, 0.975))
    found = studentised_intervals({"it": 0.0}, {"it": effects}, {}, degrees=1000, resamples=40000, rng=np.random.default_rng(0))["it"]
    assert found == pytest.approx((-upper * error, -lower * error), rel=0.03)
    assert upper > 3, "wider than Student's t, so that it is seen"


def test_limits_cut_the_ends_and_no_more() -> None:
    free = intervals([-1.0, 0.0, 1.0], 0.9)
    assert free[0] < 0 and free[1] > 1
    assert intervals([-1.0, 0.0, 1.0], 0.9, (0.0, 1.0)) == (0.0, 1.0)
    assert intervals([-1.0, 0.0, 1.0], 0.9, (-9.0, 9.0)) == free
    assert intervals([-1.0, 0.0, 1.0], 1 + 1e-15, (0.0, 1.0))[1] > 1, "an estimate past its limit by rounding stays inside"


def test_rounding_is_no_spread() -> None:
    assert intervals([1e-16, -1e-16, 0.0], 0.25) == (0.25, 0.25)
    assert intervals([1e-11, -1e-11, 0.0], 0.25) != (0.25, 0.25)
    assert intervals([1e-9, -1e-9, 0.0], 1e5) == (1e5, 1e5)


# ------------------------------------------------------------------------------------------------------------- coverage

NOISE = 0.3


def spoken(policies: np.ndarray, counts: np.ndarray, lengths: int, rng: np.random.Generator) -> Sample:
    """Reasonings of `lengths` letters from each prompt's policy, with their exact log-probs under every policy."""
    source = np.repeat(np.arange(len(policies)), counts)
    letters = (np.cumsum(policies, axis=1)[source][:, None, :] < rng.random((len(source), lengths, 1))).sum(axis=2)
    scores = np.log(policies).T[letters.clip(0, policies.shape[1] - 1)].sum(axis=1)
    return scores, np.full(len(source), lengths), source


def symmetric_channel(rng: np.random.Generator) -> Sample:
    """Eight prompts, fixed; the own letter with probability 0.7, else one of the other seven."""
    return spoken(np.where(np.eye(8, dtype=bool), 1 - NOISE, NOISE / 7), np.full(8, 8), 1, rng)


def unlike_prompts(rng: np.random.Generator) -> Sample:
    """Ten new prompts each time, from sharp to flat, with 2 to 13 reasonings of three letters."""
    sharpness = np.exp(rng.normal(-1.0, 1.2, size=10))
    policies = np.stack([rng.dirichlet(np.full(24, value)) for value in sharpness]) + 1e-9
    return spoken(policies / policies.sum(axis=1, keepdims=True), rng.integers(2, 14, size=10), 3, rng)


def collapsing_prompts(rng: np.random.Generator) -> Sample:
    """Ten new prompts each time that share 95% of their policy."""
    return spoken(0.05 * rng.dirichlet(np.full(24, 0.3), size=10) + 0.95 / 24, np.full(10, 8), 3, rng)


def held(sampler: Callable[[np.random.Generator], Sample], truth: dict[str, float], samples: int) -> dict[str, float]:
    rng, counts = generator("test", "samples"), dict.fromkeys(truth, 0)
    for seed in range(samples):
        found = measure_information(*sampler(rng), bootstrap=200, seed=seed).intervals
        for name, value in truth.items():
            counts[name] += found[name][0] <= value <= found[name][1]
    return {name: count / samples for name, count in counts.items()}


def test_the_intervals_hold_the_information_of_a_channel() -> None:
    """I(X;Z) = log 8 - H(0.3) - 0.3 log 7 = 0.8848; H(Z|X) = 1.1946; the own letter is right 7 times in 10."""
    mi = math.log(8) + 0.7 * math.log(0.7) + 0.3 * math.log(0.3 / 7)
    assert mi == pytest.approx(0.88480, abs=1e-5)
    shares = held(symmetric_channel, {"mi": mi, "mi_seq": mi, "h_conditional": math.log(8) - mi, "retrieval_acc": 0.7}, 300)
    assert all(0.90 <= share <= 0.99 for share in shares.values()), shares


@pytest.mark.parametrize("sampler", [unlike_prompts, collapsing_prompts])
def test_the_intervals_hold_what_other_prompts_give_on_average(sampler: Callable[[np.random.Generator], Sample]) -> None:
    rng = generator("test", "truth")
    many = [measure_information(*sampler(rng)) for _ in range(1000)]
    names = ("mi", "mi_seq", "mi_token_mean", "retrieval_acc", "h_conditional", "h_marginal")
    shares = held(sampler, {name: float(np.mean([number(info, name) for info in many])) for name in names}, 250)
    assert all(0.90 <= share <= 0.99 for share in shares.values()), shares


def test_reasonings_taken_for_independent_would_not() -> None:
    """The same samples, an interval of 1.96 standard errors over reasonings: the simulation above can tell."""
    rng, truth_rng = generator("test", "samples"), generator("test", "truth")
    truth = np.mean([measure_information(*unlike_prompts(truth_rng)).h_conditional for _ in range(1000)])
    inside = 0
    for _ in range(200):
        scores, lengths, source = unlike_prompts(rng)
        own = -scores[np.arange(len(source)), source] / lengths
        inside += abs(own.mean() - truth) <= 1.96 * own.std() / math.sqrt(len(own))
    assert inside / 200 < 0.6
