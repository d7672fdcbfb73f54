"""MetaMathQA: attempts and turns, what each pays, the options, and the rows of the public data sets."""

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput, ConfigError
from tether.envs.metamathqa.dataset import last_box
from tether.envs.metamathqa.env import HalvingReward, MetaMathQA, MetaMathQAOptions
from tether.envs.metamathqa.generator import Problem
from tether.envs.registry import make_env
from tether.envs.splits import split_of

SHARED = Path(__file__).parents[4] / "shared" / "data"
GSM8K = SHARED / "gsm8k" / "train_first2000.jsonl"
BACKWARD = SHARED / "metamath" / "GSM8K_Backward.jsonl"
FIVE = Problem("What is 2 + 3?", "5")


def metamathqa(problem: Problem = FIVE, **options: object) -> MetaMathQA:
    return MetaMathQA(MetaMathQAOptions.model_validate(options), generator=lambda seed, split: problem)


# --- attempts and turns ---


def test_a_right_answer() -> None:
    env = metamathqa()
    assert env.reset(0).text == "Turn 1 of 1.\nWhat is 2 + 3?"
    step = env.step("5")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.info == {"valid": True, "truncated": False, "attempts": 1, "correct": True}
    assert step.observation.text == "Solved.\nCorrect!"


def test_a_wrong_last_attempt_has_failed_and_was_not_cut_short() -> None:
    env = metamathqa()
    env.reset(0)
    step = env.step("6")
    assert (step.reward, step.done, step.success) == (0.0, True, False)
    assert step.info == {"valid": True, "truncated": False, "attempts": 1, "correct": False}
    assert step.observation.text == "Failed.\nIncorrect."


def test_the_reward_halves_with_every_attempt() -> None:
    env = metamathqa(attempts=4)
    assert env.max_turns == 4 and env.reward_range == (0.0, 1.0)
    for wrong, reward in enumerate([1.0, 0.5, 0.25, 0.125]):
        env.reset(0)
        for attempt in range(wrong):
            step = env.step("6")
            assert (step.reward, step.done, step.info["attempts"]) == (0.0, False, attempt + 1)
            assert step.observation.text == f"Turn {attempt + 2} of 4.\nIncorrect. Please think again."
        step = env.step("5")
        assert (step.reward, step.success, step.info["attempts"]) == (reward, True, wrong + 1)
    env.reset(0)
    assert [env.step("6").done for _ in range(4)] == [False, False, False, True]


def test_no_answer_uses_a_turn_but_no_attempt() -> None:
    env = metamathqa(attempts=2, max_turns=4)
    env.reset(0)
    step = env.step(" ")
    assert (step.reward, step.done, step.info) == (0.0, False, {"valid": False, "truncated": False, "attempts": 0, "correct": False})
    assert step.observation.text == "Turn 2 of 4.\nNo answer was given. Please answer the question."
    env.step("6")
    env.step("")
    assert env.step("5").reward == 0.5


def test_running_out_of_turns_is_not_failing() -> None:
    env = metamathqa(attempts=1, max_turns=2)
    env.reset(0)
    env.step("")
    step = env.step("")
    assert (step.done, step.success, step.info["truncated"], step.info["attempts"]) == (True, False, True, 0)
    assert step.observation.text.startswith("No turns left.")


def test_attempts_are_counted_anew_in_every_episode() -> None:
    env = metamathqa(attempts=2)
    for _ in range(2):
        env.reset(0)
        env.step("6")
        assert env.step("5").reward == 0.5


def test_strict_takes_the_label_letter_by_letter() -> None:
    env = metamathqa(Problem("?", "1,200"), match="strict", attempts=2)
    env.reset(0)
    assert env.step("1200").success is False
    assert env.step(" 1,200 ").success is True
    assert (env.work, metamathqa().work) == ("inline", "wait")


def test_the_task_tells_the_attempts() -> None:
    assert "attempt" not in metamathqa().instructions
    assert "You have 3 attempts; the reward halves with every one you use." in metamathqa(attempts=3).instructions


def test_the_reward_is_an_object() -> None:
    env = MetaMathQA(MetaMathQAOptions(attempts=2), generator=lambda seed, split: FIVE, reward=HalvingReward(first=3.0, factor=0.1))
    assert env.reward_range == (0.0, 3.0)
    env.reset(0)
    env.step("6")
    assert env.step("5").reward == pytest.approx(0.3)


def test_garbage_never_raises() -> None:
    rng = random.Random(4)
    env = make_env("metamathqa", attempts=40)
    env.reset(3)
    for _ in range(39):
        text = "".join(chr(rng.randrange(1, 0x2FF)) for _ in range(rng.randrange(1, 300)))
        assert env.step(text).reward == 0.0


def test_the_generators_own_answers_are_right_and_their_neighbours_wrong() -> None:
    env = MetaMathQA(MetaMathQAOptions(attempts=3))
    for seed in range(150):
        env.reset(seed)
        answer = Fraction(env.problem.label)
        assert not env.step(str(answer + 1)).success
        assert not env.step(str(-answer)).success
        assert env.step(f"${answer}$").success


# --- options ---


WRONG_OPTIONS = [
    ({"attempts": 0}, "'attempts': got 0"),
    ({"attempts": 3, "max_turns": 2}, "max_turns: got 2 for 3 attempts; give at least 3, or leave it out"),
    ({"match": "exact"}, "'match': got 'exact'"),
    ({"kinds": ["ages", "zzz"]}, "kinds: unknown kind 'zzz': known: ages"),
    ({"kinds": ["age"]}, "kinds: unknown kind 'age': did you mean 'ages'?"),
    ({"kinds": []}, "kinds: got an empty list"),
    ({"attempt": 2}, "did you mean 'attempts'?"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_OPTIONS)
def test_wrong_options_are_one_clear_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_env("metamathqa", **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_kinds_restrict_the_problems() -> None:
    env = MetaMathQA(MetaMathQAOptions(kinds=["coins"]))
    for seed in range(5):
        env.reset(seed)
        assert env.problem.kind == "coins"


# --- data ---


def rows_file(tmp_path: Path, *rows: object) -> str:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


ROWS = [
    ({"type": "GSM_Rephrased", "query": "Q", "original_question": "O", "response": "So 5.\n#### 7\nThe answer is: 7"}, "7"),
    ({"query": "Q", "response": "The answer is: 3, some say. But no. The answer is: \\frac{1}{2}"}, r"\frac{1}{2}"),
    ({"query": "Q", "response": "She has 9 * 2 = <<9*2=18>>18.\n#### 18"}, "18"),
    ({"question": "Q", "answer": "48/2 = <<48/2=24>>24.\n#### 1,072 "}, "1,072"),
    ({"question": "Q", "answer": "80000", "original_question": "O"}, "80000"),
    ({"question": "Q", "answer": 72}, "72"),
    ({"question": "Q", "answer": 0.5}, "0.5"),
    ({"question": "Q", "answer": "so the graph has $\\boxed{2}$ asymptotes."}, "2"),
    ({"problem": "Q", "level": "Level 3", "solution": "First $\\boxed{1}$, then $\\boxed{\\frac{\\sqrt{3}}{2}}$."}, r"\frac{\sqrt{3}}{2}"),
    ({"problem": "Q", "solution": "It is $\\boxed{[0,1)}$"}, "[0,1)"),
    ({"problem": "Q", "solution": "It is $\\boxed{\\{1, 2\\}}$"}, r"\{1, 2\}"),
    ({"problem": "Q", "solution": "Therefore \\boxed 5."}, "5"),
    ({"problem": "Q", "solution": "long \\boxed{3}", "answer": "3.0"}, "3.0"),
]


@pytest.mark.parametrize(("row", "label"), ROWS)
def test_labels_of_the_public_formats(tmp_path: Path, row: object, label: str) -> None:
    env = MetaMathQA(MetaMathQAOptions(data=rows_file(tmp_path, row), split=Split.ALL))
    assert env.reset(0).text == "Turn 1 of 1.\nQ"
    assert env.problem.label == label
    assert env.instance == f"Q\n{label}"


BAD_ROWS = [
    ({"query": "Q", "response": "no label here"}, "response has no label: no 'The answer is:', no '####' and no closed \\boxed{...}"),
    ({"query": "Q", "response": "The answer is: "}, "response has an empty label"),
    (
        {"query": "Q"},
        "has no answer: expected query and response, question and answer, problem and solution, problem and answer, or question, choices and answer, got ",
    ),
    ({"query": "Q", "response": 5}, "response is 5; expected text"),
    (
        {"question": "Q"},
        "has no answer: expected query and response, question and answer, problem and solution, problem and answer, or question, choices and answer, got ",
    ),
    ({"question": "Q", "answer": "first line\nsecond line"}, "answer has no label"),
    ({"question": "Q", "answer": True}, "answer is True; expected text"),
    ({"question": "Q", "answer": None}, "answer is None; expected text"),
    ({"question": " ", "answer": "5"}, "question is ' '; expected text"),
    ({"question": 7, "answer": "5"}, "question is 7; expected text"),
    ({"problem": "Q", "solution": "never \\boxed{closed"}, "solution has no label"),
    (
        {"problem": "Q", "level": 3},
        "has no answer: expected query and response, question and answer, problem and solution, problem and answer, or question, choices and answer, got ",
    ),
    ({"text": "Q"}, "has no question: expected query and response, "),
    (["Q", "5"], "is a list; expected an object with question, answer"),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS)
def test_a_row_without_question_or_label_is_named_with_file_and_line(tmp_path: Path, row: object, message: str) -> None:
    source = rows_file(tmp_path, {"question": "What is 2 + 3?", "answer": "5"}, row)
    with pytest.raises(BadInput) as caught:
        make_env("metamathqa", data=source)
    assert str(caught.value).startswith(f"{source}:2: {message}")
    assert "\n" not in str(caught.value)
    env = make_env("metamathqa", data=source, bad_rows="skip", split="all")
    assert env.reset(5).text.endswith("What is 2 + 3?")


def test_a_missing_file_names_the_option_and_the_default() -> None:
    with pytest.raises(BadInput, match=r"metamathqa: data='no/such\.jsonl' does not exist; .* leave it out for generated problems"):
        make_env("metamathqa", data="no/such.jsonl")


def test_the_last_box() -> None:
    assert last_box(r"\boxed{a{b}c} and \fbox{d}") == "d"
    assert last_box(r"\boxed{ \text{{x}} }") == r"\text{{x}}"
    assert last_box(r"\boxed{\{1} and more}") == r"\{1"
    assert last_box("none") is None
    assert last_box(r"\boxed{a} \boxed{b") is None


@pytest.mark.parametrize("path", [GSM8K, BACKWARD], ids=["gsm8k", "metamath_backward"])
def test_real_golds_accept_themselves_and_nothing_near(path: Path) -> None:
    if not path.is_file():
        pytest.skip("the public rows are not beside this checkout")
    env = MetaMathQA(MetaMathQAOptions(data=str(path), split=Split.ALL, attempts=4))
    lines = path.read_text(encoding="utf-8").splitlines()
    for seed, line in enumerate(lines):
        env.reset(seed)
        gold = env.problem.label
        assert gold == json.loads(line)["answer"].rpartition("####")[2].strip()
        value = Fraction(gold.replace(",", ""))
        assert not env.step(str(value + 1)).success
        assert not env.step(f"{float(value) + 0.01:.2f}").success
        assert not env.step(str(-value) if value else "1").success
        assert env.step(gold).success, gold
        env.reset(seed)
        assert env.step(rf"The answer is: \boxed{{{gold}}} dollars.").success, gold
    assert seed + 1 == len(lines) > 1000


@pytest.mark.skipif(not GSM8K.is_file(), reason="the public rows are not beside this checkout")
def test_real_golds_do_not_accept_other_rows_golds() -> None:
    env = MetaMathQA(MetaMathQAOptions(data=str(GSM8K), split=Split.ALL))
    golds = []
    for seed in range(2000):
        env.reset(seed)
        golds.append(env.problem.label)
    accepted = 0
    for seed, other in enumerate(golds[7:] + golds[:7]):
        env.reset(seed)
        same_number = re.sub(",", "", other) == re.sub(",", "", golds[seed])
        assert env.step(other).success == same_number, (golds[seed], other)
        accepted += same_number
    assert accepted < 100


@pytest.mark.skipif(not GSM8K.is_file(), reason="the public rows are not beside this checkout")
def test_splits_of_real_rows_are_disjoint() -> None:
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        env = MetaMathQA(MetaMathQAOptions(data=str(GSM8K), split=split))
        for seed in range(100):
            env.reset(seed)
            assert split_of(env.instance) is split


@pytest.mark.parametrize(
    ("answer", "label"),
    [
        ("2.5", "2.5"), ("72.0", "72"), ("0.30000000000000004", "0.3"), ("0.3333333333333333", "1/3"), ("0.6666666666666666", "2/3"), ("-0.1", "-0.1"),
        ("1e-07", "1e-07"), ("123.45000000000002", "123.45"), ("33.333333333333336", "100/3"), ("0.33", "0.33"), ("1e300", "1e+300"), ("5", "5"),
    ],
)  # fmt: skip
def test_json_numbers_are_read_at_their_own_precision(tmp_path: Path, answer: str, label: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(f'{{"question": "How much?", "answer": {answer}}}\n')
    env = MetaMathQA(MetaMathQAOptions(data=str(source), split=Split.ALL))
    env.reset(0)
    assert env.problem.label == label


def test_a_float_accepts_what_it_stands_for_and_nothing_beside_it(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(
        '{"question": "A third of 1?", "answer": 0.3333333333333333}\n{"question": "0.1 + 0.2?", "answer": 0.30000000000000004}\n'
    )
    env = make_env("metamathqa", data=str(source), split="all")
    for seed, answer, right in [
        (0, "1/3", True),
        (0, "0.33", False),
        (0, "0.3333333333333333", False),
        (1, "0.3", True),
        (1, "0.31", False),
    ]:
        env.reset(seed)
        assert env.step(answer).success is right, answer


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"question": "q", "answer": 1.4142135623730951}, "the float 1.4142135623730951, a rounded value that no exact answer equals"),
        ({"question": "q", "answer": float("nan")}, "answer is nan, which is no number"),
        ({"question": "q", "answer": True}, "answer is True; expected text"),
        ({"question": "q", "choices": ["a", "b"], "answer": 2}, "answer is 2, which is no choice; 2 choices are numbered from 0"),
        ({"question": "q", "choices": ["a", "b"], "answer": -1}, "answer is -1, which is no choice"),
        ({"question": "q", "choices": ["a", "b"], "answer": "C"}, "'C', which is no choice: expected a letter from A to B"),
        ({"question": "q", "choices": ["B", "A"], "answer": "A"}, "'A', which is more than one choice"),
        ({"question": "q", "choices": ["a"], "answer": 0}, r"choices is \['a'\]; expected a list of 2 to 10 texts"),
        ({"question": "q", "choices": "a, b", "answer": 0}, "choices is 'a, b'; expected a list"),
        ({"question": "q", "choices": {"text": ["a", "b"], "label": ["X", "Y"]}, "answerKey": "X"}, "choices has the labels"),
        ({"body": "q", "answer": 1}, "expected query and response, question and answer, problem and solution, problem and answer, or question, choices"),
    ],
)  # fmt: skip
def test_labels_that_cannot_be_met_are_refused(tmp_path: Path, row: dict[str, object], reason: str) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row))
    with pytest.raises(BadInput, match=reason):
        make_env("metamathqa", data=str(source))


@pytest.mark.parametrize(
    "row",
    [
        {"question": "What is 2 + 3?", "choices": ["4", "6", "5", "7"], "answer": 2, "subject": "arithmetic"},
        {"question": "What is 2 + 3?", "choices": ["4", "6", "5", "7"], "answer": "C"},
        {"question": "What is 2 + 3?", "choices": ["4", "6", "5", "7"], "answer": "(c)"},
        {"question": "What is 2 + 3?", "choices": [4, 6, 5, 7], "answer": "5"},
        {"question": "What is 2 + 3?", "options": ["4", "6", "5", "7"], "answer": "C", "answer_index": 2},
        {"question": "What is 2 + 3?", "options": ["A)4", "B)6", "C)5", "D) 7"], "answer": "C"},
        {"question": "What is 2 + 3?", "choices": {"text": ["4", "6", "5", "7"], "label": ["A", "B", "C", "D"]}, "answerKey": "C"},
        {"question": "What is 2 + 3?", "choices": {"text": ["4", "6", "5", "7"], "label": ["1", "2", "3", "4"]}, "answerKey": "3"},
    ],
)
def test_multiple_choice_is_answered_by_letter(tmp_path: Path, row: dict[str, object]) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps(row))
    env = make_env("metamathqa", data=str(source), split="all")
    shown = "What is 2 + 3?\nA. 4\nB. 6\nC. 5\nD. 7\nAnswer with the letter of the right choice."
    for answer, right in [
        ("C", True),
        ("(C)", True),
        ("c.", True),
        ("B", False),
        ("2", False),
        ("5", False),
        ("C or D", False),
        ("AC", False),
    ]:
        assert env.reset(0).text.endswith(shown)
        assert env.step(answer).success is right, answer


def test_thousands_with_a_space_in_gsm8ks_mark(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"question": "q", "answer": "so\\n#### 58, 500"}\n{"question": "r", "answer": "58, 500"}\n')
    env = make_env("metamathqa", data=str(source), split="all")
    for seed, answer, right in [(0, "58500", True), (0, "58", False), (0, "58, 501", False), (1, "58500", False), (1, "500, 58", True)]:
        env.reset(seed)
        assert env.step(answer).success is right, (seed, answer)
