"""measure_agreement: does what fills a slot follow the prompt? Strengths worked out by hand, and how often noise is taken for a tie."""

import random
import statistics

import numpy as np
import pytest

from tether.diagnostics.templates import SlotKind
from tether.diagnostics.templates.slots import measure_agreement


@pytest.mark.parametrize(
    ("first", "second", "strength"),
    [
        (["a", "a"], ["b", "b"], 1.0),  # W 1, B 0
        (["a", "a"], ["b", "c"], 0.5),  # W 1/2, B 0
        (["a", "a"], ["a", "b"], 0.0),  # W 1/2, B 1/2
        (["a", "b"], ["a", "b"], -1.0),  # W 0, B 1/2
        (["x y", "x z"], ["q", "q"], 0.75),  # cosine 1/2 of the first pair: W 3/4, B 0
        (["x x", "x"], ["", ""], 1.0),  # the same direction; nothing agrees with nothing
        (["x", ""], ["", "x"], -1.0),  # nothing disagrees with something
        (["a", "a"], ["a", "a"], 0.0),  # B 1: nothing varies
    ],
)
def test_strength_by_hand(first: list[str], second: list[str], strength: float) -> None:
    tie = measure_agreement([tuple(filler.split()) for filler in first + second], np.array([0, 0, 1, 1]))
    assert tie.strength == pytest.approx(strength, abs=1e-12)
    assert tie.kind is SlotKind.UNKNOWN


def test_p_value_against_the_exact_one() -> None:
    """Two prompts of four, each with its own filler: 2 of the 70 ways to deal the prompts agree as well, so nothing can be significant."""
    tie = measure_agreement([("a",)] * 4 + [("b",)] * 4, np.repeat([0, 1], 4))
    assert tie.p_value == pytest.approx(2 / 70, abs=0.03)
    assert tie.kind is SlotKind.UNKNOWN
    assert measure_agreement([("a",)] * 4 + [("b",)] * 4 + [("c",)] * 4, np.repeat([0, 1, 2], 4)).kind is SlotKind.TIED


def test_fillers_that_never_repeat_are_noise() -> None:
    """Were they tied, reasonings of one prompt would agree; with three pairs there is not enough to say so."""
    nonces = [(f"n{n}",) for n in range(60)]
    assert measure_agreement(nonces, np.arange(60) // 6).kind is SlotKind.NOISE
    assert measure_agreement(nonces[:6], np.arange(6) // 2).kind is SlotKind.UNKNOWN


def test_a_rare_filler_cannot_be_judged() -> None:
    """One odd trace of 40: no arrangement of prompts would show a tie."""
    assert measure_agreement([("odd",)] + [("same",)] * 39, np.arange(40) // 4).kind is SlotKind.UNKNOWN


def test_noise_is_rarely_called_tied_and_its_tie_is_unbiased() -> None:
    """100 noise slots at level 1%, of a few values and of mostly unseen ones; a plug-in mutual information would be far above 0 there."""
    for num_values in (3, 100):
        rng = random.Random(num_values)
        ties = [measure_agreement([(f"v{rng.randrange(num_values)}",) for _ in range(48)], np.arange(48) // 4) for _ in range(100)]
        assert sum(tie.kind is SlotKind.TIED for tie in ties) <= 4
        strengths = [tie.strength for tie in ties]
        assert abs(statistics.mean(strengths)) < 3 * statistics.stdev(strengths) / 10


@pytest.mark.parametrize("sizes", [(2, 3000), (1500, 4)])
def test_ties_of_many_traces_come_from_whole_prompts(sizes: tuple[int, int]) -> None:
    """Few large prompts or many small ones: a tie of one half is found from the sample."""
    num_prompts, members = sizes
    rng = random.Random(0)
    prompts = np.repeat(np.arange(num_prompts), members)
    fillers = [(f"own{prompt}",) if rng.random() < 0.5**0.5 else (f"odd{rng.random()}",) for prompt in prompts.tolist()]
    tie = measure_agreement(fillers, prompts)
    assert tie.kind is SlotKind.TIED and tie.strength == pytest.approx(0.5, abs=0.1)
