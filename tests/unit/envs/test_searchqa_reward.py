"""Grading against hand-worked answers, and what a grade pays after so many searches."""

import pytest

from tether.envs.searchqa.reward import AnswerReward, ExactMatchReward, Grade, exact_match, grade, normalise, token_f1


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("  The Platt-Family, of New  York. ", "plattfamily of new york"),
        ("An apple a day", "apple day"),
        ("the", ""),
        ("Athens", "athens"),  # no article inside a word
        ("12,400", "12400"),
        ("U.S.", "us"),
    ],
)
def test_normalise(text: str, normal: str) -> None:
    assert normalise(text) == normal


@pytest.mark.parametrize(
    ("answer", "gold", "f1"),
    [
        ("Henry Platt Jr", "Henry Platt", 0.8),  # 2 shared of 3 and 2
        ("the Platt family of New York", "Henry Platt", 2 / 7),  # 1 shared of 5 and 2
        ("Henry Platt", "Henry Platt", 1.0),
        ("Platt Platt", "Henry Platt", 0.5),  # the second Platt has no partner
        ("nobody", "Henry Platt", 0.0),
        ("yes", "yes", 1.0),
        ("yes indeed", "yes", 0.0),
        ("no", "no one", 0.0),
        ("noanswer", "no answer at all", 0.0),
        ("", "Henry", 0.0),
    ],
)
def test_token_f1(answer: str, gold: str, f1: float) -> None:
    assert token_f1(answer, gold) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("the beatles!", "Beatles", True),
        ("beatle", "Beatles", False),
        ("the", "A", False),
        ("a", "A", True),
        ("!", "+", False),
        ("", "A", False),
    ],
)
def test_exact_match(answer: str, gold: str, equal: bool) -> None:
    assert exact_match(answer, gold) is equal


def test_grade_takes_the_best_gold() -> None:
    near = grade("Henry Platt Jr", ["New York", "Henry Platt"])
    assert not near.em and near.f1 == pytest.approx(0.8)
    assert grade("henry platt", ["New York", "Henry Platt"]) == Grade(em=True, f1=1.0)
    assert grade("x", []) == Grade(em=False, f1=0.0)


@pytest.mark.parametrize(
    ("em", "f1", "searches", "paid"),
    [
        (True, 1.0, 0, 1.0),
        (True, 1.0, 1, 1.0),
        (True, 1.0, 2, 0.98),
        (True, 1.0, 4, 0.94),
        (False, 0.8, 1, 0.8),
        (False, 0.8, 3, 0.76),
        (False, 0.3, 1, 0.3),  # the threshold itself pays
        (False, 2 / 7, 1, 0.0),
        (False, 2 / 7, 3, 0.0),  # never below nothing
    ],
)
def test_answer_reward(em: bool, f1: float, searches: int, paid: float) -> None:
    assert AnswerReward()(Grade(em, f1), searches) == pytest.approx(paid)


def test_cost_never_takes_more_than_there_is() -> None:
    assert AnswerReward(search_cost=0.5)(Grade(True, 1.0), 9) == 0.0


def test_threshold_and_cost_are_settings() -> None:
    assert AnswerReward(f1_threshold=0.9, search_cost=0.0)(Grade(False, 0.8), 4) == 0.0
    assert AnswerReward(f1_threshold=0.0, search_cost=0.0)(Grade(False, 0.1), 4) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("answer", "by_f1", "by_exact_match"),
    [
        ("Henry Platt", 1.0, 1.0),
        ("the Henry Platt.", 1.0, 1.0),
        ("not Henry Platt", 0.8, 0.0),
        ("Henry Platt or John Doe", 4 / 7, 0.0),
        ("Platt", 2 / 3, 0.0),
        ("John Doe", 0.0, 0.0),
    ],
)
def test_exact_match_pays_nothing_for_shared_words(answer: str, by_f1: float, by_exact_match: float) -> None:
    result = grade(answer, ["Henry Platt"])
    assert AnswerReward()(result, 1) == pytest.approx(by_f1)
    assert ExactMatchReward()(result, 1) == by_exact_match


def test_exact_match_pays_for_fewer_searches() -> None:
    pay = ExactMatchReward(search_cost=0.4)
    assert [pay(Grade(True, 1.0), searches) for searches in (0, 1, 2, 3, 9)] == pytest.approx([1.0, 1.0, 0.6, 0.2, 0.0])
    assert pay(Grade(False, 0.9), 0) == 0.0
