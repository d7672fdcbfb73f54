"""What words alone say, against answers worked out by hand."""

import math

import numpy as np
import pytest

from tether.diagnostics.audit.lexical import find_elsewhere, measure_lexical
from tether.diagnostics.audit.measure import unigram_nats

PROMPTS = [f"Find the {thing} in room {number}." for number, thing in enumerate(["key", "lamp", "rope", "coin", "book", "map"])]
SOURCE = [column for column in range(6) for _ in range(4)]


def test_one_text_for_all() -> None:
    found = measure_lexical(["I go on."] * 24, SOURCE, PROMPTS)
    assert (found.num_distinct, found.top_share, found.similarity) == (1, 1.0, pytest.approx(1.0))
    assert found.agreement.strength == 0.0
    assert (
        found.neighbours is not None and found.neighbours.accuracy == pytest.approx(1 / 6) == found.neighbours.chance
    )  # ties shared: exactly chance
    assert found.prompt_overlap.accuracy == pytest.approx(1 / 6) and found.prompt_overlap.p_value == 1.0
    assert found.neighbours.excess == pytest.approx(0.0, abs=1e-12)


def test_the_prompt_decides_the_text() -> None:
    texts = [f"word{column}" for column in SOURCE]
    found = measure_lexical(texts, SOURCE, PROMPTS, bootstrap=100)
    assert found.agreement.strength == pytest.approx(1.0) and found.agreement.p_value == 0.005
    assert (
        found.neighbours is not None
        and found.neighbours.accuracy == 1.0
        and found.neighbours.p_value == 2 / 500
        and found.neighbours.interval == (1.0, 1.0)
    )
    assert found.prompt_overlap.accuracy == pytest.approx(1 / 6)  # no word is shared with a prompt


def test_words_of_the_own_prompt_are_found_with_one_reasoning_each() -> None:
    things = ["key", "lamp", "rope", "coin", "book", "map"]
    found = measure_lexical([f"Where is the {thing}?" for thing in things], list(range(6)), PROMPTS)
    assert found.neighbours is None
    assert found.prompt_overlap.accuracy == 1.0 and found.prompt_overlap.excess == 1.0 and found.prompt_overlap.p_value <= 0.02
    shifted = measure_lexical([f"Where is the {thing}?" for thing in things[1:] + things[:1]], list(range(6)), PROMPTS)
    assert shifted.prompt_overlap.accuracy == 0.0 and shifted.prompt_overlap.p_value > 0.5


def test_words_of_all_prompts_and_of_most_reasonings_do_not_count() -> None:
    texts = [f"Find the room, {'yes' if n % 2 else 'no'}" for n in range(24)]
    found = measure_lexical(texts, SOURCE, PROMPTS)
    assert found.prompt_overlap.accuracy == pytest.approx(1 / 6)
    # Each prompt has two of either answer: a member's two unlike siblings and one like it, against two and two elsewhere.
    assert found.neighbours is not None and found.neighbours.accuracy == 0.0 and found.neighbours.p_value > 0.5
    assert found.top_share == 0.5 and found.num_distinct == 2


def test_a_prompt_that_shares_words_with_everything_is_no_sign() -> None:
    things = ["key", "lamp", "rope", "coin", "book", "map"]
    prompts = [f"{'look around again ' if n == 0 else ''}{thing}" for n, thing in enumerate(things)]
    found = measure_lexical([f"look around again {thing}" for thing in things], list(range(6)), prompts)
    assert found.prompt_overlap.accuracy == 1.0


def test_agreement_is_the_mean_cosine_within_prompts() -> None:
    # "a b" and "a c" share one of two words: cosine 1/2; the other prompt's two are equal: 1.
    found = measure_lexical(["a b", "a c", "d d", "d d"], [0, 0, 1, 1], PROMPTS[:2])
    assert found.similarity == pytest.approx(0.75)
    # One reasoning per prompt: over all pairs, here one pair of cosine 0.
    assert measure_lexical(["a b", "c d"], [0, 1], PROMPTS[:2]).similarity == pytest.approx(0.0)


def test_half_of_the_traces_tied_is_half_of_the_way() -> None:
    texts = [f"thing{column} again" if n % 2 else f"same talk {n % 3}" for n, column in enumerate(SOURCE)]
    found = measure_lexical(texts, SOURCE, PROMPTS)
    assert found.neighbours is not None and found.neighbours.p_value <= 0.02
    assert 0.3 <= found.neighbours.excess <= 0.7


def test_same_every_time_and_case_does_not_matter() -> None:
    texts = [f"Thing{column} {n % 3}" for n, column in enumerate(SOURCE)]
    assert measure_lexical(texts, SOURCE, PROMPTS) == measure_lexical([text.upper() for text in texts], SOURCE, PROMPTS)


def test_elsewhere_counts_what_fits_one_other_prompt_clearly() -> None:
    always = np.ones((4, 3), dtype=bool)
    own = np.array([0, 0, 1, 1])
    moved = np.array(
        [[0.0, 0.0, 9.0], [0.0, 1.0, 9.0], [9.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    )  # the last fits nothing, so the third has no company
    assert find_elsewhere(moved, own, lambda labels: always, 0).share == 0.5
    assert find_elsewhere(moved, own, lambda labels: ~always, 0).share == 0.0  # best, but not clearly
    assert find_elsewhere(moved, np.array([2, 2, 0, 0]), lambda labels: always, 0).share == 0.0  # at home
    single = find_elsewhere(moved[:3], np.array([0, 1, 2]), lambda labels: always[:3], 0)
    assert (single.share, single.p_value) == (0.0, 1.0)


def test_counts_of_tokens_as_a_reader() -> None:
    first = math.log(3 / 1.5)  # of the other reasoning: token 1 once, 2 once; half a count added to both
    second = (math.log(3 / 2.5) + math.log(3 / 0.5)) / 2
    assert unigram_nats([[1, 1], [1, 2]]) == pytest.approx((first + second) / 2)
