"""Rows of every public format, in every encoding they come in, and rows that are wrong."""

import base64
import hashlib
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import pytest

from tether.core.enums import Split
from tether.core.errors import BadInput
from tether.envs.dataset import Row, RowError
from tether.envs.deepcoder.dataset import load_pool, read_problem
from tether.envs.deepcoder.problem import Case, Passes, Prints, Problem, Returns, digest_of
from tether.envs.deepcoder.sandbox.jobs import CallTask, Report, ScriptTask, StdinTask

SUM_PAIRS = [{"input": "1 2\n", "output": "3\n", "testtype": "stdin_stdout"}, {"input": "4 5", "output": "9", "testtype": "stdin_stdout"}]
LEETCODE = "class Solution:\n    def add(self, a: int, b: int) -> int:\n        "
CALL_PAIRS = [{"input": "1\n2", "output": "3", "testtype": "functional"}, {"input": "4\n5\n", "output": "9", "testtype": "functional"}]
HUGE = "8" * 5000


def problem(**fields: Any) -> Problem:
    return read_problem(Row(fields, "row"))


def packed(tests: list[dict[str, str]]) -> str:
    """Private tests as LiveCodeBench publishes them."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def tasks(found: Problem) -> list[object]:
    return [case.task for case in found.cases]


@pytest.mark.parametrize(
    "tests", [SUM_PAIRS, json.dumps(SUM_PAIRS), repr(SUM_PAIRS), {"inputs": ["1 2\n", "4 5"], "outputs": ["3\n", "9"]}]
)
def test_deepcoder_rows_of_standard_input(tests: object) -> None:
    found = problem(problem="Add them.", tests=tests, solutions=["```python\nprint(sum(map(int, input().split())))\n```"])
    assert tasks(found) == [StdinTask("1 2\n"), StdinTask("4 5")]
    assert [case.check for case in found.cases] == [Prints("3\n"), Prints("9")]
    assert [case.public for case in found.cases] == [True, False]
    assert found.solution == "print(sum(map(int, input().split())))"
    assert (found.entry_point, found.reads_stdin, found.statement) == ("", True, "Add them.")


@pytest.mark.parametrize("metadata", [{"func_name": "add"}, '{"func_name": "add"}', {}, None])
def test_deepcoder_rows_of_function_calls(metadata: object) -> None:
    """Without a name in the metadata, the one method of the starter code is meant."""
    found = problem(problem="Add.", tests=json.dumps(CALL_PAIRS), starter_code=LEETCODE, metadata=metadata)
    assert tasks(found) == [CallTask("add", (1, 2)), CallTask("add", (4, 5))]
    assert [case.check for case in found.cases] == [Returns(3), Returns(9)]
    assert (found.entry_point, found.starter, found.reads_stdin) == ("add", LEETCODE, False)


def test_arguments_are_json_or_python_one_a_line() -> None:
    pairs = [
        {"input": '[1, null]\n"a b"\n{"k": true}', "output": "[[1, 2], false]", "testtype": "functional"},
        {"input": "(1, None)\n'x'\n{1, 2}", "output": "(1, 2)", "testtype": "functional"},
        {"input": f"{HUGE}\n1\n2", "output": HUGE, "testtype": "functional"},
        {"input": "", "output": "plain words", "testtype": "functional"},
        {"input": '[\n  1,\n  2\n]', "output": '"quoted"', "testtype": "functional"},
    ]  # fmt: skip
    found = problem(problem="p", tests=pairs, metadata={"func_name": "g"})
    huge = int(HUGE[:2500]) * 10**2500 + int(HUGE[2500:])
    expected_arguments = [([1, None], "a b", {"k": True}), ((1, None), "x", {1, 2}), (huge, 1, 2), (), ([1, 2],)]
    assert tasks(found) == [CallTask("g", arguments) for arguments in expected_arguments]
    assert [case.check for case in found.cases] == list(map(Returns, [[[1, 2], False], (1, 2), huge, "plain words", "quoted"]))


def test_apps_and_taco_rows() -> None:
    found = problem(
        question="Add.",
        input_output=json.dumps({"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7", "8"]]}),
        difficulty="interview",
        problem_id=12,
        solutions=json.dumps(["print(3)", "print(4)"]),
    )
    assert tasks(found) == [StdinTask("1 2\n"), StdinTask("3\n4")]
    assert [case.check for case in found.cases] == [Prints("3\n"), Prints("7\n8")]
    assert (found.difficulty, found.source, found.solution) == ("interview", "input_output 12", "print(3)")


def test_apps_calls_wrap_what_they_expect() -> None:
    tests = {"fn_name": "flip", "inputs": [["01", 2], [{"1": "a", "-2": "b"}, 0]], "outputs": [[[1, 0]], [7]]}
    found = problem(question="Flip.", input_output=json.dumps(tests))
    assert tasks(found) == [CallTask("flip", ("01", 2)), CallTask("flip", ({1: "a", -2: "b"}, 0))]
    first, second = found.cases
    assert [first.passed(Report("ok", value=value)) for value in ([1, 0], [[1, 0]], (1, 0), [0, 1], 1)] == [True, True, True, False, False]
    assert [second.passed(Report("ok", value=value)) for value in (7, [7], 8)] == [True, True, False]
    assert second.expected == "7"
    bare = problem(question="Flip.", input_output=json.dumps(tests | {"outputs": [[1, 0], 7]}))
    assert [bare.cases[0].passed(Report("ok", value=value)) for value in ([1, 0], 1)] == [True, False]


def test_integers_of_any_length_in_json() -> None:
    found = problem(question="q", input_output=f'{{"fn_name": "f", "inputs": [[{HUGE}]], "outputs": [[{HUGE}]]}}')
    assert found.cases[0].passed(Report("ok", value=int(HUGE[:2500]) * 10**2500 + int(HUGE[2500:])))
    assert not found.cases[0].passed(Report("ok", value=int(HUGE[:2500])))


def test_verification_info_rows() -> None:
    cases = [
        {"type": "stdin_stdout", "fn_name": None, "input": "1\n", "output": "2\n"},
        {"type": "function_call", "fn_name": "majority", "input": [[3, 2, 3]], "output": 3},
    ]
    found = problem(
        prompt="Do it.", verification_info=repr({"language": "python", "test_cases": cases}), gold_standard_solution="```\nx\n```"
    )
    assert tasks(found) == [StdinTask("1\n"), CallTask("majority", ([3, 2, 3],))]
    assert found.solution == "x"
    with pytest.raises(RowError, match="language 'c'; only python"):
        problem(prompt="p", verification_info={"language": "c", "test_cases": cases})
    with pytest.raises(RowError, match="without test_cases"):
        problem(prompt="p", verification_info={})


@pytest.mark.parametrize("private", [json.dumps(CALL_PAIRS), packed(CALL_PAIRS), CALL_PAIRS])
def test_livecodebench_rows(private: object) -> None:
    public = [{"input": "7\n8", "output": "15", "testtype": "functional"}] * 2
    found = problem(
        question_title="Sum",
        question_content="Add two numbers.",
        question_id="123",
        starter_code=LEETCODE,
        difficulty="easy",
        public_test_cases=json.dumps(public),
        private_test_cases=private,
        metadata='{"func_name": "add"}',
    )
    assert found.statement == "Sum\n\nAdd two numbers."
    assert tasks(found) == [CallTask("add", (7, 8)), CallTask("add", (7, 8)), CallTask("add", (1, 2)), CallTask("add", (4, 5))]
    assert [case.public for case in found.cases] == [True, True, False, False]
    assert (found.source, found.difficulty) == ("livecodebench 123", "easy")


@pytest.mark.parametrize("protocol", range(6))
def test_private_tests_in_every_protocol_of_pickle(protocol: int) -> None:
    tests = [{"input": "ü 1\n", "output": "2", "testtype": "stdin"}]
    private = base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests, ensure_ascii=False), protocol))).decode()
    found = problem(question_content="c", public_test_cases="[]", private_test_cases=private, metadata="{}")
    assert tasks(found) == [StdinTask("ü 1\n")]
    assert not found.cases[0].public


class Hostile:
    """Would call a function when unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (eval, ("1 + 1",))


@pytest.mark.parametrize(
    ("private", "message"),
    [
        (base64.b64encode(zlib.compress(pickle.dumps(Hostile()))).decode(), "does more than hold a text: STACK_GLOBAL"),
        (base64.b64encode(zlib.compress(pickle.dumps(["a"]))).decode(), "does more than hold a text"),
        (base64.b64encode(zlib.compress(pickle.dumps("no json"))).decode(), "do not hold a JSON text"),
        (base64.b64encode(zlib.compress(b"no pickle")).decode(), "do not hold a JSON text"),
        (base64.b64encode(zlib.compress(pickle.dumps("[]"))[:-3]).decode(), "cut short"),
        (base64.b64encode(b"no zlib").decode(), "neither JSON nor base64 of zlib"),
        ("ß", "neither JSON nor base64 of zlib"),
        (json.dumps({"a": 1}), "not lists"),
    ],
)
def test_private_tests_that_are_something_else(private: str, message: str) -> None:
    with pytest.raises(RowError, match=message):
        problem(question_content="c", public_test_cases="[]", private_test_cases=private)


def test_mbpp_rows() -> None:
    found = problem(
        text="Write a function to add.",
        code="def helper(a):\r\n    return a\r\ndef add(a, b):\r\n    return helper(a) + b",
        task_id=7,
        test_setup_code="",
        test_list=["assert add(1, 2) == 3", "assert add(-1, 0) == -1"],
        challenge_test_list=["assert add(5, 5) == 10"],
    )
    assert tasks(found) == [CallTask("add", (1, 2)), CallTask("add", (-1, 0)), CallTask("add", (5, 5))]
    assert [case.public for case in found.cases] == [True, False, False]
    assert (found.entry_point, found.source, found.show_examples) == ("add", "MBPP/7", True)


def test_mbpp_rows_with_setup_and_imports() -> None:
    found = problem(
        text="t", code="class Node: ...\ndef depth(n): ...", test_setup_code="root = Node()", test_list=["assert depth(root) == 1"]
    )
    assert tasks(found) == [ScriptTask("root = Node()\nassert depth(root) == 1\n")]
    assert found.cases[0].check == Passes()
    sanitized = problem(
        prompt="p", test_imports=["import math", "import sys"], test_list=["assert math.isclose(area(1), 3.14)", "assert size() == sys.getsizeof(1) * area(1)"]
    )  # fmt: skip
    assert sanitized.entry_point == "area"
    assert sanitized.cases[0].task == CallTask("area", (1,))
    assert sanitized.cases[1].task == ScriptTask("import math\nimport sys\nassert size() == sys.getsizeof(1) * area(1)\n")


@pytest.mark.parametrize(
    ("tests", "code", "name"),
    [
        (["assert set(similar((1,))) == set((1,))"], "", "similar"),
        (["assert sum(3) == 1"], "def sum(x):\n    return 1", "sum"),  # the solution redefines a built-in
        (["assert outer(inner(1)) == 1", "assert outer(2) == 1"], "", "outer"),
    ],
)
def test_the_function_that_assertions_are_about(tests: list[str], code: str, name: str) -> None:
    assert problem(text="t", test_list=tests, code=code).entry_point == name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": "a", "question": "b"}, "no known format: it has the fields prompt, question"),
        ({}, r"no known format: it has the fields \(none\)"),
        ({"problem": "p", "tests": "[]"}, "has no tests"),
        ({"problem": "p", "tests": ""}, "has an empty tests"),
        ({"problem": "p", "tests": "[1"}, "field 'tests' that does not parse"),
        ({"problem": "p", "tests": 5}, "unknown layout"),
        ({"problem": "", "tests": SUM_PAIRS}, "empty statement"),
        ({"problem": "p", "tests": [{"input": "1"}]}, "test 1 has no input or no output"),
        ({"problem": "p", "tests": {"inputs": ["1"], "outputs": []}}, "not lists of the same length"),
        ({"problem": "p", "tests": [{"input": "1", "output": "2", "testtype": "functional"}]}, "does not name it"),
        ({"problem": "p", "tests": [{"input": "a b", "output": "2", "fn_name": "f"}]}, "input does not parse"),
        ({"problem": "p", "tests": [{"input": {"a": 1}, "output": "2", "fn_name": "f"}]}, "input is a dict"),
        ({"problem": "p", "tests": [{"input": {"a": 1}, "output": "2"}]}, "input is a dict; expected a text or its lines"),
        ({"problem": "p", "tests": [{"input": "[" * 150 + "]" * 150, "output": "2", "fn_name": "f"}]}, "cannot be handed to a program"),
        ({"question": "q", "input_output": ""}, "empty input_output"),
        ({"prompt": "p", "entry_point": "f", "test": "def check(c):\n    assert True"}, "asserts nothing"),
        ({"prompt": "p", "entry_point": "f", "test": "def check(c:"}, "field 'test' that is not Python"),
        ({"prompt": "", "entry_point": "f", "test": "x"}, "empty prompt"),
        ({"text": "t", "test_list": ["x = 1"]}, "without assertions"),
        ({"text": "t", "test_list": ["assert f(1)", "assert g(1)"]}, "do not all call one function"),
        ({"text": "t", "test_list": "assert f(1)"}, "not a list of texts"),
        ({"text": " ", "test_list": ["assert f(1)"]}, "neither text nor prompt"),
    ],
)
def test_rows_that_cannot_be_used(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        problem(**fields)


def test_files_are_reported_by_line_and_loaded_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"problem": f"Problem {number}.", "tests": SUM_PAIRS} for number in range(3)]
    path.write_text("\n".join(json.dumps(row) for row in [*rows[:2], {"problem": "x", "tests": []}, rows[2]]))
    with pytest.raises(BadInput, match=rf"{path}:3: has no tests; fix the row"):
        load_pool(str(path), "error", None)
    pool = load_pool(str(path), "skip", None)
    assert [pool(seed, Split.ALL).statement for seed in range(4)] == ["Problem 0.", "Problem 1.", "Problem 2.", "Problem 0."]
    assert load_pool(str(path), "skip", None) is pool
    assert len(load_pool(str(path), "skip", 1)(0, Split.ALL).cases) == 1
    path.write_text("[1, 2]\n")
    with pytest.raises(BadInput, match="is a list; expected an object"):
        load_pool(str(path), "error", 1)


def many(count: int, public: int) -> Problem:
    cases = tuple(Case(StdinTask(str(number)), Prints("x"), public=number in range(public)) for number in range(count))
    return Problem("s", cases, digest_of(cases))


@pytest.mark.parametrize(
    ("count", "public", "most", "kept"),
    [
        (10, 2, 4, ["0", "2", "4", "7"]),  # the first public one, then every other third of the eight hidden
        (10, 2, 1, ["0"]),
        (10, 0, 3, ["0", "1", "5"]),
        (4, 3, 3, ["0", "1", "3"]),  # too few hidden ones: public ones fill up
        (3, 1, 5, ["0", "1", "2"]),
        (3, 1, None, ["0", "1", "2"]),
    ],
)
def test_fewer_tests(count: int, public: int, most: int | None, kept: list[str]) -> None:
    whole = many(count, public)
    limited = whole.limited_to(most)
    assert [case.given for case in limited.cases] == kept
    assert limited.fingerprint == whole.fingerprint


def test_the_fingerprint_holds_the_prompt() -> None:
    test = "def check(candidate):\n    assert candidate(1) == 1"
    prompts = ['def f(x):\n    """Square."""\n', 'def f(x):\n    """Cube."""\n']
    assert len({problem(prompt=prompt, entry_point="f", test=test).fingerprint for prompt in prompts}) == 2


def test_which_tests_the_prompt_shows() -> None:
    prompt = 'def f(x, y):\n    """\n    >>> f( 1,"a" )\n    1\n    >>> print(f(2, \'b\'))\n    >>> broken(\n    """\n'
    test = "def check(c):\n    assert c(1, 'a') == 1\n    assert c(2, 'b') == 2\n    assert c(3, 'c') == 3"
    assert [case.public for case in problem(prompt=prompt, entry_point="f", test=test).cases] == [True, False, False]


def test_the_fingerprint_holds_every_test() -> None:
    first = problem(problem="p", tests=SUM_PAIRS)
    assert first.fingerprint == problem(problem="p", tests=json.dumps(SUM_PAIRS)).fingerprint
    assert first.fingerprint != problem(problem="p", tests=SUM_PAIRS[:1]).fingerprint
    assert first.fingerprint != problem(problem="p", tests=[SUM_PAIRS[0], SUM_PAIRS[1] | {"output": "10"}]).fingerprint
    shifted = [{"input": "1", "output": "23"}], [{"input": "12", "output": "3"}]
    assert problem(problem="p", tests=shifted[0]).fingerprint != problem(problem="p", tests=shifted[1]).fingerprint
    assert first.digest == hashlib.blake2b(b"4:1 2\n2:3\n3:4 51:9", digest_size=16).hexdigest()
