"""Countdown: judgement, reward, turns and options on known puzzles."""

import random
from fractions import Fraction

import pytest

from tether.core.errors import BadInput, ConfigError
from tether.envs.countdown.env import Countdown, CountdownOptions, TargetReward
from tether.envs.countdown.expression import check_answer
from tether.envs.countdown.generator import Puzzle
from tether.envs.registry import make_env

FOUR = Puzzle(4, (3, 5, 2))


def countdown(puzzle: Puzzle, **options: object) -> Countdown:
    return Countdown(CountdownOptions.model_validate(options), generator=lambda seed, split: puzzle)


def pay(answer: str, use: str = "at_most_once", puzzle: Puzzle = FOUR) -> float:
    env = countdown(puzzle, use=use)
    env.reset(0)
    return env.step(answer).reward


# --- judgement ---


# Upstream's measured payments for target 4 from [3, 5, 2], where our decisions agree, and under both settings.
AGREED = [("2 + 5 - 3", 1.0), ("2 + 5 - 3 = 4", 0.0), ("2 * 5 - 3", 0.1), ("5.0+2-3", 0.0)]
# Where they differ: at most once is the paper's rule; a power is no operator; gibberish is not paid.
OURS = [("5 - 2", 0.1, 0.0), ("3**2-5", 0.0, 0.0), ("foo 3 5 2", 0.0, 0.0)]


@pytest.mark.parametrize(("answer", "reward"), AGREED)
def test_upstreams_measured_payments(answer: str, reward: float) -> None:
    assert pay(answer) == reward
    assert pay(answer, "exactly_once") == reward


@pytest.mark.parametrize(("answer", "at_most_once", "exactly_once"), OURS)
def test_where_our_rules_differ_from_upstream(answer: str, at_most_once: float, exactly_once: float) -> None:
    assert pay(answer) == at_most_once
    assert pay(answer, "exactly_once") == exactly_once


def test_the_papers_own_example_uses_a_number_twice() -> None:
    puzzle = Puzzle(24, (1, 5, 6, 7))
    assert check_answer("6×(7-5+1)+6", puzzle, "at_most_once").reason == "6 is used twice but given once."
    assert pay("6*(5-1)", puzzle=puzzle) == 1.0
    assert pay("6*(5-1)", "exactly_once", puzzle) == 0.0


VERDICTS = [
    # answer, solved, legal, value, reason; target 10 from [2, 2, 5, 9]
    ("2*5", True, True, "10", ""),
    ("5*2", True, True, "10", ""),
    ("-(-5)*2", True, True, "10", ""),
    ("9 + 2/2", True, True, "10", ""),
    ("2*2*5", False, True, "20", "The expression is 20, not 10."),
    ("5/2", False, True, "5/2", "The expression is 5/2, not 10."),
    ("2-9", False, True, "-7", "The expression is -7, not 10."),
    ("5/(2-2)", False, True, None, "The expression divides by zero."),
    ("2*2*2+2", False, False, "10", "2 is used 4 times but given twice."),
    ("9+9-5", False, False, "13", "9 is used twice but given once."),
    ("10", False, False, "10", "10 is not among the numbers."),
    ("9+1", False, False, "10", "1 is not among the numbers."),
    ("25", False, False, "25", "25 is not among the numbers."),
    ("9+0+2/2", False, False, "10", "0 is not among the numbers."),
    ("", False, False, None, "There is no answer."),
    (" \n", False, False, None, "There is no answer."),
    ("2*5=10", False, False, None, "Not an expression: it holds '='; only whole numbers, + - * / and parentheses are allowed."),
    ("7" * 400, False, False, "7" * 400, "77777777777777777777... is not among the numbers."),
]


@pytest.mark.parametrize(("answer", "solved", "legal", "value", "reason"), VERDICTS)
def test_verdicts(answer: str, solved: bool, legal: bool, value: str | None, reason: str) -> None:
    result = check_answer(answer, Puzzle(10, (2, 2, 5, 9)), "at_most_once")
    shown = None if result.value is None else str(result.value)
    assert (result.solved, result.legal, shown, result.reason) == (solved, legal, value, reason)


def test_exactly_once_wants_every_number_as_often_as_it_is_given() -> None:
    puzzle = Puzzle(10, (2, 2, 5, 9))
    assert check_answer("2*5", puzzle, "exactly_once").reason == "2 is not used; every number must be used exactly once."
    assert check_answer("2*5+2", puzzle, "exactly_once").reason == "9 is not used; every number must be used exactly once."
    assert check_answer("9+5-2-2", puzzle, "exactly_once").solved


def test_a_value_near_the_target_is_not_the_target() -> None:
    puzzle = Puzzle(1, (333333, 999999, 1000000))
    result = check_answer("1000000/999999", puzzle, "at_most_once")  # within 1e-5, where upstream's check would have paid 1
    assert not result.solved
    assert result.value == Fraction(1000000, 999999)


def test_the_amounts_are_the_reward_objects() -> None:
    env = Countdown(generator=lambda seed, split: FOUR, reward=TargetReward(solved=5.0, missed=2.0, refused=-1.0))
    assert env.reward_range == (-1.0, 5.0)
    for answer, amount in [("2+5-3", 5.0), ("5-2", 2.0), ("6", -1.0)]:
        env.reset(0)
        assert env.step(answer).reward == amount
    assert Countdown().reward_range == (0.0, 1.0)


# --- turns ---


def test_an_episode_of_one_turn() -> None:
    env = countdown(Puzzle(24, (1, 5, 6, 7)))
    assert env.reset(0).text == "Turn 1 of 1.\nTarget: 24, nums: [1, 5, 6, 7]"
    step = env.step("6 * (5 - 1)")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.info == {"valid": True, "truncated": False, "value": "24", "reason": ""}
    assert step.observation.text == "Solved.\nThe expression is 24."


def test_a_wrong_last_answer_has_failed_and_was_not_cut_short() -> None:
    env = countdown(FOUR)
    env.reset(0)
    step = env.step("2 * 5 - 3")
    assert (step.reward, step.done, step.success) == (0.1, True, False)
    assert step.info == {"valid": True, "truncated": False, "value": "7", "reason": "The expression is 7, not 4."}
    assert step.observation.text == "Failed.\nThe expression is 7, not 4."
    env.reset(0)
    step = env.step("two plus two")
    assert (step.reward, step.done, step.info["valid"], step.info["truncated"], step.info["value"]) == (0.0, True, False, False, None)


def test_no_answer_at_all_runs_out_of_turns() -> None:
    env = countdown(FOUR)
    env.reset(0)
    step = env.step("")
    assert (step.reward, step.done, step.success) == (0.0, True, False)
    assert (step.info["valid"], step.info["truncated"]) == (False, True)
    assert step.observation.text == "No turns left.\nThere is no answer."


def test_with_turns_left_the_reply_says_what_was_wrong_and_play_goes_on() -> None:
    env = countdown(FOUR, max_turns=4)
    env.reset(0)
    replies = []
    for answer in ("2 * 5 - 3", "2 +", "", "2 + 5 - 3"):
        step = env.step(answer)
        replies.append((step.observation.text, step.reward, step.done))
    puzzle = "Target: 4, nums: [3, 5, 2]"
    assert replies == [
        (f"Turn 2 of 4.\nThe expression is 7, not 4. Try again.\n{puzzle}", 0.0, False),
        (f"Turn 3 of 4.\nNot an expression: it ends without a number. Try again.\n{puzzle}", 0.0, False),
        (f"Turn 4 of 4.\nThere is no answer. Try again.\n{puzzle}", 0.0, False),
        ("Solved.\nThe expression is 4.", 1.0, True),
    ]


def test_failing_first_never_pays_more_than_solving_at_once() -> None:
    env = countdown(FOUR, max_turns=3)
    totals = []
    for answers in (["2+5-3"], ["5-2", "2+5-3"], ["5-2", "5-3", "2+5-3"], ["5-2", "5-3", "3-2"], ["5-2", "5-3", "junk"]):
        env.reset(0)
        totals.append(sum(env.step(answer).reward for answer in answers))
    assert totals == [1.0, 1.0, 1.0, 0.1, 0.0]


def test_the_rules_say_how_often_a_number_may_be_used() -> None:
    assert "Use each number at most once; you need not use them all." in Countdown().instructions
    assert "Use every number exactly once." in Countdown(CountdownOptions(use="exactly_once")).instructions


def test_garbage_never_raises() -> None:
    rng = random.Random(3)
    env = make_env("countdown", max_turns=50)
    env.reset(1)
    for _ in range(50):
        step = env.step("".join(chr(rng.randrange(0x3000)) for _ in range(rng.randrange(2000))))
        assert step.info["valid"] is False
    assert step.done


# --- options ---


WRONG_OPTIONS = [
    ({"numbers": (1, 4)}, "numbers: got 1, 4; give the fewest and the most, from 2 to 6, such as 3, 4"),
    ({"numbers": (4, 3)}, "numbers: got 4, 3"),
    ({"numbers": (3, 7)}, "numbers: got 3, 7"),
    ({"target": (0, 10)}, "target: got 0, 10; give the least and the largest, from 1 to 1000000, such as 10, 100"),
    ({"target": (50, 40)}, "target: got 50, 40"),
    ({"target": (1, 2_000_000)}, "target: got 1, 2000000"),
    ({"numbers": (2, 2), "max_number": 3}, "target: got 10 at least, but 2 numbers up to 3 make 9 at most; lower it"),
    ({"max_number": 0}, "'max_number': got 0"),
    ({"use": "twice"}, "'use': got 'twice'"),
    ({"number": (3, 4)}, "did you mean 'numbers'?"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("countdown", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_range_that_no_puzzle_meets_says_so() -> None:
    with pytest.raises(BadInput, match="none of 10000 draws gave a train instance"):
        Countdown(CountdownOptions(numbers=(2, 2), max_number=10, target=(97, 97))).reset(0)  # 97 is prime, and above 20
