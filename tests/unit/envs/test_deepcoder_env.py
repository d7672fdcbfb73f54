"""The environment end to end, with programs run in the real sandbox."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tether import make_env
from tether.core.enums import Split
from tether.core.errors import BadInput, ConfigError
from tether.core.types import Step
from tether.envs.dataset import Row
from tether.envs.deepcoder.dataset import read_problem
from tether.envs.deepcoder.env import DeepCoder, DeepCoderOptions
from tether.envs.deepcoder.problem import Problem, SuiteResult
from tether.envs.deepcoder.sandbox.sandbox import describe_isolation

ISOLATION = describe_isolation().name or "process"

LEETCODE = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
SUM = {
    "problem": "Print the sum of the two numbers.",
    "tests": [{"input": "1 2\n", "output": "3\n"}, {"input": "4 5", "output": "9"}, {"input": "10 -3", "output": "7"}],
}
ADD = {
    "question_content": "Add the two numbers.",
    "starter_code": LEETCODE,
    "public_test_cases": json.dumps([{"input": "1\n2", "output": "3", "testtype": "functional"}]),
    "private_test_cases": json.dumps([{"input": f"{n}\n5", "output": str(n + 5), "testtype": "functional"} for n in (4, 40)]),
    "metadata": '{"func_name": "add"}',
}


def environment(row: dict[str, Any], **options: Any) -> DeepCoder:
    problem = read_problem(Row(row, "row"))
    return DeepCoder(DeepCoderOptions(isolation=ISOLATION, **options), generator=lambda seed, split: problem)


def answered(row: dict[str, Any], code: str, **options: Any) -> Step:
    env = environment(row, **options)
    env.reset(0)
    return env.step(f"Here it is:\n```python\n{code}\n```")


def test_a_problem_and_its_solution() -> None:
    env = environment(SUM)
    assert env.reset(0).text == (
        "Turn 1 of 1.\nPrint the sum of the two numbers.\n\nRead the input from standard input and print the output to standard output."
    )
    assert env.instructions.startswith("Solve the programming problem in Python 3")
    assert "answer again" not in env.instructions
    step = env.step("```python\nprint(sum(map(int, input().split())))\n```")
    assert (step.reward, step.done, step.success) == (1.0, True, True)
    assert step.observation.text == "Solved.\nPassed 3 of 3 tests."
    assert step.info == {"valid": True, "truncated": False, "passed": 3, "total": 3, "failures": {}}
    assert (env.reward_range, env.work) == ((0.0, 1.0), "wait")
    assert env.instance == env.problem.fingerprint


def test_the_reward_is_the_fraction_of_tests_passed() -> None:
    step = answered(SUM, "a, b = map(int, input().split())\nprint(a + abs(b))")
    assert step.reward == pytest.approx(2 / 3)
    assert (step.done, step.success, step.info["truncated"]) == (True, False, False)
    assert step.observation.text == "Failed.\nPassed 2 of 3 tests.\nHidden tests that failed: 1 gave a wrong answer."
    assert (step.info["passed"], step.info["total"], step.info["failures"]) == (2, 3, {"wrong": 1})
    assert step.info["first_failure"] == "test 3 (hidden) gave a wrong answer: 13"


def test_endings_are_counted_apart() -> None:
    code = "a, b = map(int, input().split())\nif a == 1:\n    raise KeyError('x')\nwhile a == 4:\n    pass\nprint(a + b)"
    step = answered(SUM, code, time_limit=0.5)
    assert step.info["failures"] == {"error": 1, "timeout": 1}
    assert step.info["first_failure"] == "test 1 (public) ended with an error: KeyError: 'x' (solution.py, line 3)"
    assert step.reward == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "code",
    [
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        "def add(a, b):\n    return a + b",
        "        return a + b",
        "class Solution:\n    def add(self, a: Optional[int], b) -> int:\n        return reduce(operator.add, [a, b])",
    ],
)
def test_functions(code: str) -> None:
    assert answered(ADD, code).success


def test_a_function_that_only_says_what_was_shown_is_found_out() -> None:
    step = answered(ADD, "def add(a, b):\n    return 3")
    assert step.reward == pytest.approx(1 / 3)
    assert not step.success


def test_tuples_are_lists_and_json_is_not_text() -> None:
    row = {"problem": "p", "tests": [{"input": "1", "output": "[[1, 2], true]", "fn_name": "g", "testtype": "functional"}]}
    assert answered(row, "def g(x):\n    return ((1, 2), True)").success
    assert not answered(row, "def g(x):\n    return '[[1, 2], true]'").success


def test_more_turns_give_feedback_and_pay_once() -> None:
    env = environment(SUM, max_turns=3)
    env.reset(0)
    assert "you may answer again" in env.instructions
    first = env.step("```python\nprint(input())\n```")
    assert (first.reward, first.done, first.info["valid"]) == (0.0, False, True)
    assert first.observation.text == (
        "Turn 2 of 3.\nPassed 0 of 3 tests.\nThe first public test that failed gave a wrong answer.\n"
        "Input:\n1 2\nOutput:\n3\nGot:\n1 2"
    )  # fmt: skip
    second = env.step("```python\nprint(1 +\n```")
    assert (second.reward, second.done, second.info["valid"]) == (0.0, False, True)
    assert "Error: SyntaxError: '(' was never closed (line 1)" in second.observation.text
    third = env.step("```python\nprint(9)\n```")
    assert third.reward == pytest.approx(1 / 3)
    assert (third.done, third.success) == (True, False)
    assert third.info["truncated"] is False


def test_a_failed_attempt_pays_nothing_while_turns_are_left() -> None:
    env = environment(SUM, max_turns=2)
    env.reset(0)
    step = env.step("```python\nprint(9)\n```")
    assert (step.info["passed"], step.reward, step.done) == (1, 0.0, False)
    step = env.step("```python\nprint(sum(map(int, input().split())))\n```")
    assert (step.reward, step.success) == (1.0, True)


def test_feedback_on_a_call_shows_the_call_and_what_came_back() -> None:
    env = environment(ADD, max_turns=2)
    env.reset(0)
    text = env.step("```python\ndef add(a, b):\n    return [a, b]\n```").observation.text
    assert text.endswith("gave a wrong answer.\nadd(1, 2) returns 3\nGot: [1, 2]")
    env.reset(0)
    text = env.step("```python\ndef subtract(a, b):\n    return 1\n```").observation.text
    assert "add(1, 2) returns 3\nError: " in text
    env.reset(0)
    text = env.step("```python\ndef add(a, b):\n    raise ValueError(object())\n```").observation.text
    assert "Error: ValueError: <object object at 0x...> (solution.py, line 2)" in text


def test_feedback_never_shows_a_hidden_test() -> None:
    env = environment(ADD, max_turns=2)
    env.reset(0)
    text = env.step("```python\ndef add(a, b):\n    return 3 if a == 1 else 0\n```").observation.text
    assert text == "Turn 2 of 2.\nPassed 1 of 3 tests.\nHidden tests that failed: 2 gave a wrong answer."


@pytest.mark.parametrize("answer", ["", "   ", "```\n```", "I would sort the numbers.", "```python\n   \n```", "\0", "\ud800"])
def test_an_answer_without_a_program_is_invalid_and_uses_its_turn(answer: str) -> None:
    env = environment(SUM, max_turns=2)
    env.reset(0)
    step = env.step(answer)
    assert (step.reward, step.done, step.info["valid"]) == (0.0, False, False)
    assert step.observation.text == f"Turn 2 of 2.\n{'No program was found in the answer; put one into a ```python code fence.'}"
    last = env.step(answer)
    assert (last.done, last.success, last.info["truncated"]) == (True, False, True)


def test_a_program_without_a_fence_is_taken_whole() -> None:
    env = environment(SUM)
    env.reset(0)
    assert env.step("print(sum(map(int, input().split())))").success


def test_a_program_that_does_not_compile_is_a_wrong_answer() -> None:
    step = answered(SUM, "print(")
    assert (step.reward, step.done, step.info["valid"], step.info["truncated"]) == (0.0, True, True, False)
    assert step.info["failures"] == {"error": 3}


def test_no_test_is_started_once_the_total_is_used_up() -> None:
    row = SUM | {"tests": [{"input": str(n), "output": "x"} for n in range(40)]}
    step = answered(row, "import time\ntime.sleep(0.3)\nprint('x')", total_limit=0.5, concurrency=2)
    assert 2 <= step.info["passed"] <= 4
    assert step.info["failures"] == {"timeout": 40 - step.info["passed"]}
    assert step.info["first_failure"].endswith("not started: the tests before it took 0.5 s")


def test_a_larger_machine_begins_no_more_tests_of_an_answer() -> None:
    """Or it would grade a slow program better: what was begun before the total was used up counts."""
    row = SUM | {"tests": [{"input": str(n), "output": "x"} for n in range(40)]}
    step = answered(row, "import time\ntime.sleep(0.3)\nprint('x')", total_limit=0.5, concurrency=16)
    assert step.info["passed"] == 2


def test_environments_of_the_same_limits_share_a_sandbox() -> None:
    """Whether the machine offers one is found out once, not by each of a hundred environments."""
    first, second, other = (environment(SUM, memory_mib=mib) for mib in (128, 128, 256))
    assert first._runner is second._runner is not other._runner


def test_memory_is_limited() -> None:
    step = answered(SUM, "x = bytearray(200 * 2**20)\nprint(sum(map(int, input().split())))", memory_mib=128)
    assert step.info["failures"] == {"memory": 3}


def test_rewards_can_be_replaced() -> None:
    def all_or_nothing(results: SuiteResult) -> float:
        return float(results.solved)

    problem = read_problem(Row(SUM, "row"))
    env = DeepCoder(DeepCoderOptions(isolation=ISOLATION), generator=lambda seed, split: problem, reward=all_or_nothing)
    env.reset(0)
    assert env.step("print(3)").reward == 0.0
    assert env.reward_range[0] == float("-inf")


def test_options_are_checked() -> None:
    assert DeepCoderOptions(difficulty=(1, 2)).difficulty == (1, 2)
    for wrong, message in (
        ({"difficulty": [3, 2]}, "difficulty: got 3, 2"),
        ({"difficulty": [0, 2]}, "difficulty: got 0, 2"),
        ({"difficulty": [1, 2], "data": "x.jsonl"}, "leave it out with data"),
        ({"max_tests": 0}, "max_tests"),
        ({"isolation": "none"}, "isolation"),
        ({"time_limit": 0}, "time_limit"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_env("deepcoder", **wrong)
    with pytest.raises(BadInput, match=r"data='missing.jsonl' does not exist; .* the built-in problems"):
        make_env("deepcoder", data="missing.jsonl")


def test_data_by_path(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(SUM)}\n{json.dumps(ADD)}\n")
    env = make_env("deepcoder", data=str(path), split="all", max_tests=2, isolation=ISOLATION)
    assert "Print the sum" in env.reset(0).text
    assert "Write the class Solution with its method add." in env.reset(1).text
    assert "class Solution:" in env.reset(3).text


def test_builtin_problems_by_seed_and_split() -> None:
    env = make_env("deepcoder", max_tests=1, isolation=ISOLATION)
    first = env.reset(5).text
    assert make_env("deepcoder", max_tests=3, isolation=ISOLATION).reset(5).text == first
    assert "\n\nExample:\n" in first
    seen: dict[Split, set[str]] = {}
    for split in (Split.TRAIN, Split.VALIDATION, Split.TEST):
        env = DeepCoder(DeepCoderOptions(split=split, isolation=ISOLATION))
        seen[split] = set()
        for seed in range(100):
            env.reset(seed)
            seen[split].add(env.instance)
    sizes = {split: len(instances) for split, instances in seen.items()}
    assert len(set().union(*seen.values())) == sum(sizes.values())
    assert all(sizes.values())


def test_difficulty_of_builtin_problems() -> None:
    env = DeepCoder(DeepCoderOptions(split=Split.ALL, difficulty=(2, 3), isolation=ISOLATION))
    levels = set()
    for seed in range(100):
        env.reset(seed)
        levels.add(env.problem.difficulty)
    assert levels == {"2", "3"}


def test_every_builtin_problem_is_solved_by_its_solution_and_by_nothing() -> None:
    env = DeepCoder(DeepCoderOptions(split=Split.ALL, max_tests=2, isolation=ISOLATION))
    names: list[str] = []
    while True:
        env.reset(len(names))
        problem: Problem = env.problem
        if problem.source in names:
            break
        names.append(problem.source)
        assert env.step(f"```python\n{problem.solution}\n```").success, problem.source
        blank = "pass" if problem.reads_stdin else f"def {problem.entry_point}(*args):\n    pass"
        env.reset(len(names) - 1)
        assert not env.step(f"```python\n{blank}\n```").success, problem.source
    assert len(names) >= 60


@pytest.mark.parametrize("make", [lambda: environment(SUM), lambda: environment(ADD)])
def test_episodes_repeat_exactly(make: Callable[[], DeepCoder]) -> None:
    """The same answers get the same replies, error texts with addresses and the order of sets included."""
    answers = ["```python\nprint({'a', 'b', 'c'}, object())\n```", "```python\ndef add(a, b):\n    return {'x', 'y'}\n```"]
    seen = []
    for _ in range(2):
        env = make()
        replies = []
        for answer in answers:
            env.reset(1)
            step = env.step(answer)
            replies.append((step.observation.text, step.reward, step.info))
        seen.append(replies)
    assert seen[0] == seen[1]


@pytest.mark.parametrize("answer", ["9**9**9", "```python\n2**(10**9)*3\n```", "10**10**10\n7"])
def test_arithmetic_alone_is_judged_without_being_computed(answer: str) -> None:
    begun = time.monotonic()
    assert answered(SUM, answer).info["failures"] == {"wrong": 3}
    assert time.monotonic() - begun < 5


def test_a_program_that_runs_out_of_time_in_its_first_tests_is_not_run_with_the_others() -> None:
    row = SUM | {"tests": [{"input": str(n), "output": "x"} for n in range(40)]}
    step = answered(row, "print(9**9**9)", time_limit=0.3, concurrency=4)
    assert step.info["failures"] == {"timeout": 40}
    assert "more than 0.3 s of processor time" in step.info["first_failure"]
