"""measure_information on policies over finite alphabets, whose I(X;Z), H(Z|X) and H(Z) are known by hand.

Whole populations are listed: each prompt's letters in proportion to their probabilities. Over such a list the estimator is no estimate any
more, it equals the exact value, so the comparisons are at rounding and not at sampling error. A letter that a prompt never uses has
log-prob -1e5 instead of minus infinity, which vanishes in every mixture.
"""

import math
from decimal import Decimal, localcontext
from itertools import pairwise, product

import numpy as np
import pytest

from tether import Information, measure_information

LOG = math.log
NEVER = -1e5


def log_probs(policies: np.ndarray) -> np.ndarray:
    return np.where(policies > 0, np.log(np.where(policies > 0, policies, 1.0)), NEVER)


def of_population(counts: np.ndarray, lengths: int = 1) -> Information:
    """counts [P, K]: how often each prompt says each letter, the same total for every prompt."""
    total = counts.sum(axis=1)
    assert (total == total[0]).all()
    logs = log_probs(counts / total[0])
    source, letter = (np.repeat(index, counts.ravel()) for index in np.indices(counts.shape).reshape(2, -1))
    return measure_information(logs[:, letter].T, np.full(len(source), lengths), source)


def exact_information(policies: np.ndarray) -> float:
    """sum_x,z p(x) p(z|x) log(p(z|x) / p(z)), term by term."""
    marginal = policies.mean(axis=0)
    terms = [p * LOG(p / q) for policy in policies for p, q in zip(policy, marginal, strict=True) if p > 0]
    return math.fsum(terms) / len(policies)


# ------------------------------------------------------------------------------------------------------------- channels


@pytest.mark.parametrize("num", [2, 3, 8, 50])
def test_one_letter_for_each_prompt(num: int) -> None:
    """Deterministic and one to one: I = H(Z) = log P, H(Z|X) = 0."""
    info = of_population(np.eye(num, dtype=int))
    assert info.mi_seq == info.mi == pytest.approx(LOG(num), abs=1e-13)
    assert info.mi_token_mean == pytest.approx(LOG(num), abs=1e-13)
    assert (info.h_conditional, info.retrieval_acc) == (0, 1)
    assert info.h_marginal == pytest.approx(LOG(num), abs=1e-13)


@pytest.mark.parametrize("num", [2, 3, 8, 50])
def test_letters_that_ignore_the_prompt(num: int) -> None:
    """p(z|x) = (1/2, 1/4, 1/4) for every prompt: nothing is known, exactly; H = 3/2 log 2; every row ties, so retrieval is 1/P."""
    info = of_population(np.tile([2, 1, 1], (num, 1)))
    assert (info.mi_seq, info.mi, info.mi_token_mean, info.mi_zscore) == (0, 0, 0, 0)
    assert info.retrieval_acc == pytest.approx(1 / num, rel=1e-15)
    assert info.retrieval_acc == info.chance or num == 50  # a sum of 200 fiftieths rounds
    assert info.h_conditional == info.h_marginal == pytest.approx(1.5 * LOG(2), abs=1e-14)
    assert info.recall[2] == pytest.approx(2 / num, rel=1e-14)


def test_binary_symmetric_channel() -> None:
    """Flipped one time in four: I = log 2 - h(1/4) = 0.130812, H(Z|X) = 0.562335, H(Z) = log 2; three of four retrieved."""
    info = of_population(np.array([[3, 1], [1, 3]]))
    assert info.mi_seq == pytest.approx(0.13081203594113694, abs=1e-14)
    assert info.h_conditional_seq == pytest.approx(0.5623351446188083, abs=1e-14)
    assert info.h_marginal_seq == pytest.approx(0.6931471805599453, abs=1e-14)
    assert info.retrieval_acc == 0.75


def test_erasure_channel() -> None:
    """Of four letters three are the prompt's own and one is blank: I = 3/4 log 3. A blank is a tie of three: 3/4 + 1/4 * 1/3 = 5/6."""
    info = of_population(np.array([[3, 0, 0, 1], [0, 3, 0, 1], [0, 0, 3, 1]]))
    assert info.mi_seq == pytest.approx(0.8239592165010823, abs=1e-14)
    assert info.retrieval_acc == pytest.approx(5 / 6, rel=1e-15)
    assert info.recall[2] == pytest.approx(3 / 4 + 1 / 4 * 2 / 3, rel=1e-15)
    assert info.h_conditional == pytest.approx(0.5623351446188083, abs=1e-14)


def test_z_channel() -> None:
    """Prompt 0 always says a, prompt 1 says a or b: I = 0.215762. p(a) = 3/4. Half of prompt 1's letters are taken for prompt 0's."""
    info = of_population(np.array([[2, 0], [1, 1]]))
    assert info.mi_seq == pytest.approx((LOG(4 / 3) + 0.5 * LOG(2 / 3) + 0.5 * LOG(2)) / 2, abs=1e-14)
    assert info.mi_seq == pytest.approx(0.21576155433883565, abs=1e-14)
    assert info.retrieval_acc == 0.75


def test_two_thirds_of_the_prompts_share_a_policy() -> None:
    """Prompts 0 and 1 are alike, prompt 2 is apart: I = log 3 - 2/3 log 2 = H(1/3); retrieval (1/2 + 1/2 + 1) / 3."""
    info = of_population(np.array([[1, 1, 0], [1, 1, 0], [0, 0, 2]]))
    assert info.mi_seq == pytest.approx(0.6365141682948128, abs=1e-14)
    assert info.retrieval_acc == pytest.approx(2 / 3, rel=1e-15)


def test_independent_letters_add_up() -> None:
    """Prompts are pairs of bits, words pairs of flipped bits: twice the information of one, over two tokens."""
    flip = np.array([[3, 1], [1, 3]])
    words = np.array([[flip[a, c] * flip[b, d] for c, d in product((0, 1), repeat=2)] for a, b in product((0, 1), repeat=2)])
    info = of_population(words, lengths=2)
    assert info.mi_seq == pytest.approx(2 * 0.13081203594113694, abs=1e-14)
    assert info.mi == pytest.approx(0.13081203594113694, abs=1e-14)
    assert info.h_conditional == pytest.approx(0.5623351446188083, abs=1e-14)
    assert info.h_marginal == pytest.approx(LOG(2), abs=1e-14)
    assert info.retrieval_acc == pytest.approx(9 / 16, rel=1e-15)


def test_random_channels() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        num, letters, total = rng.integers(2, 9), rng.integers(2, 12), int(rng.integers(1, 30))
        counts = rng.multinomial(total, rng.dirichlet(np.full(letters, 0.5)), size=num)
        info, policies = of_population(counts), counts / total
        assert info.mi_seq == pytest.approx(exact_information(policies), abs=1e-12)
        assert -1e-12 <= info.mi_seq <= LOG(num) + 1e-12
        assert info.retrieval_acc == pytest.approx(policies.max(axis=0).sum() / num, rel=1e-12), "the best guess is right so often"


# ------------------------------------------------------------------------------------------- the template-mixing lemma


def mixed(counts: np.ndarray, template: np.ndarray, parts: int, of: int) -> np.ndarray:
    """(1 - a) q + a r in whole counts, for a = parts / of; both sum to the same total."""
    return (of - parts) * counts + parts * template


def test_mixing_in_a_template_contracts_the_information() -> None:
    """Lemma I.1 of the paper: I(q_a) <= (1 - a) I(q), for every shared r."""
    rng = np.random.default_rng(1)
    strict = 0
    for _ in range(60):
        num, letters, total = int(rng.integers(2, 7)), int(rng.integers(2, 8)), int(rng.integers(4, 20))
        counts = rng.multinomial(total, rng.dirichlet(np.full(letters, 0.4)), size=num)
        template = rng.multinomial(total, rng.dirichlet(np.full(letters, 0.4)))
        parts, of = int(rng.integers(1, 6)), 6
        before, after = of_population(counts).mi_seq, of_population(mixed(counts, template, parts, of)).mi_seq
        assert after <= (1 - parts / of) * before + 1e-12
        strict += after < (1 - parts / of) * before - 1e-6
    assert strict > 30, "a template among the prompts' own letters costs more than its share"


@pytest.mark.parametrize("parts", [0, 1, 2, 3, 4])
def test_a_template_in_letters_of_its_own_costs_exactly_its_share(parts: int) -> None:
    """Then it can be told apart and the rest is as it was: I(q_a) = (1 - a) I(q), here (1 - a) 0.130812; at a = 1 nothing is left."""
    counts = mixed(np.array([[3, 1, 0, 0], [1, 3, 0, 0]]), np.array([0, 0, 2, 2]), parts, 4)
    info = of_population(counts)
    assert info.mi_seq == pytest.approx((1 - parts / 4) * 0.13081203594113694, abs=1e-14)
    assert info.retrieval_acc == pytest.approx((1 - parts / 4) * 0.75 + parts / 4 * 0.5, rel=1e-14)


def test_more_template_never_tells_more() -> None:
    """Entropy rises with a uniform template while information falls: template collapse, which entropy alone does not show."""
    counts, template = 8 * np.eye(4, 8, dtype=int), np.ones(8, dtype=int)
    found = [of_population(mixed(counts, template, parts, 10)) for parts in range(11)]
    assert all(late.mi_seq < early.mi_seq for early, late in pairwise(found))
    assert all(late.h_conditional > early.h_conditional for early, late in pairwise(found))
    assert found[0].mi_seq == pytest.approx(LOG(4), abs=1e-13)
    assert (found[-1].mi_seq, found[-1].retrieval_acc) == (0, 0.25)


# ------------------------------------------------------------------------------------------------------------ precision


def by_decimals(scores: np.ndarray, lengths: np.ndarray, source: np.ndarray) -> dict[str, float]:
    """The definitions in 60 decimal digits, without taking any peak out."""
    num, num_prompts = scores.shape
    sums = dict.fromkeys(("mi", "mi_seq", "mi_token_mean", "h_conditional", "h_marginal_seq"), Decimal(0))
    with localcontext(prec=60):
        for row, length, own in zip(scores.tolist(), lengths.tolist(), source.tolist(), strict=True):
            values, tokens = [Decimal(value) for value in row], Decimal(length)
            mixture = (sum((value.exp() for value in values), Decimal(0)) / num_prompts).ln()
            mixture_of_means = (sum(((value / tokens).exp() for value in values), Decimal(0)) / num_prompts).ln()
            sums["mi"] += (values[own] - mixture) / tokens
            sums["mi_seq"] += values[own] - mixture
            sums["mi_token_mean"] += values[own] / tokens - mixture_of_means
            sums["h_conditional"] -= values[own] / tokens
            sums["h_marginal_seq"] -= mixture
        return {name: float(total / num) for name, total in sums.items()}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 1e3, 1e5])
def test_against_sixty_digits(scale: float) -> None:
    """From differences too small for exp to show well to log-probs of -1e5, where exp underflows."""
    rng = np.random.default_rng(2)
    scores, lengths, source = -scale * rng.random((9, 5)), rng.integers(1, 300, size=9), rng.integers(5, size=9)
    info = measure_information(scores, lengths, source, bootstrap=20, permutations=20)
    for name, value in by_decimals(scores, lengths, source).items():
        assert getattr(info, name) == pytest.approx(value, rel=1e-13, abs=1e-15 * (1 + scale)), name
    assert all(math.isfinite(end) for ends in info.intervals.values() for end in ends)
    assert info.h_marginal - info.h_conditional == pytest.approx(info.mi, abs=1e-14 * (1 + scale))


# ----------------------------------------------------------------------------------------------------------------- ties


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        # scores of one text under four prompts, own prompt first: right with probability, within the best 2, within the best 4
        ([-1, -1, -1, -1], (1 / 4, 1 / 2, 1)),
        ([-1, -1, -2, -2], (1 / 2, 1, 1)),
        ([-2, -2, -1, -1], (0, 0, 1)),
        ([-2, -2, -2, -1], (0, 1 / 3, 1)),
        ([-1, -2, -2, -2], (1, 1, 1)),
        ([-2, -1, -1, -1], (0, 0, 1)),
    ],
)
def test_ties_of_every_form(columns: list[float], expected: tuple[float, ...]) -> None:
    info = measure_information([columns], [1], [0])
    assert (info.retrieval_acc, info.recall[2], info.recall[4]) == pytest.approx(expected, rel=1e-15)


def test_one_prompt_has_nothing_to_tell_apart() -> None:
    """Legal: no information, chance 1. There is no other prompt to lose it against."""
    info = measure_information([[-3.0], [-5.0]], [1, 2], [0, 0], bootstrap=20, permutations=20)
    assert (info.mi, info.mi_seq, info.mi_token_mean, info.chance, info.retrieval_acc) == (0, 0, 0, 1, 1)
    assert (info.retrieval_p_value, info.mi_p_value, info.mi_interval) == (1, 1, (0, 0))


def test_one_reasoning_for_each_prompt() -> None:
    """Legal: what the spread within prompts would say is not known, and the interval is the wider for it."""
    rng = np.random.default_rng(3)
    scores = rng.normal(size=(8, 8)) - 20 + 2 * np.eye(8)
    info = measure_information(scores, np.ones(8), np.arange(8), bootstrap=200, permutations=200)
    assert info.mi_interval is not None and info.mi_interval[0] < info.mi < info.mi_interval[1]
    assert info.mi_p_value is not None and info.mi_p_value < 0.1
