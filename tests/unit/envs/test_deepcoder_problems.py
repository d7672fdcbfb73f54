"""The built-in programming problems: every file is well formed, every reference solution passes all of its tests, no empty answer does.

The expected answers were worked out by two programs of different design and the tests were tried on wrong solutions when the problems
were written; here the files themselves are held to their form. Solutions are our own code, so they run in a plain child process of
the interpreter, without site packages: all tests of a problem in one process.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[3] / "src" / "tether" / "envs" / "deepcoder" / "data" / "problems"
PATHS = sorted(FOLDER.rglob("*.toml"))
FOLDERS = {1: "1_warmup", 2: "2_easy", 3: "3_medium", 4: "4_hard", 5: "5_challenge"}
FIELDS = {"title", "difficulty", "kind", "statement", "solution", "tests"}
KINDS = {"stdin": (set(), {"stdin", "stdout"}), "function": ({"function", "starter"}, {"args", "result"})}
"""For each kind of problem: the fields it has besides the common ones, and those of its tests."""

every_problem = pytest.mark.parametrize("path", PATHS, ids=[path.stem for path in PATHS])

RUNNER = """
import contextlib, io, json, sys

job = json.load(sys.stdin)
code = compile(job["source"], "solution", "exec")
answers = []
if job["function"]:
    names = {"__name__": "solution"}
    exec(code, names)
    answers = [names[job["function"]](*json.loads(test["args"])) for test in job["tests"]]
else:
    for test in job["tests"]:
        sys.stdin = io.StringIO(test["stdin"])
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, {"__name__": "__main__"})
        answers.append(printed.getvalue())
json.dump(answers, sys.__stdout__)
"""


def _problem(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _answers(problem: dict[str, Any], source: str) -> list[Any]:
    """What a program answers to each test of a problem."""
    job = {"source": source, "function": problem.get("function"), "tests": problem["tests"]}
    command = [sys.executable, "-I", "-S", "-c", RUNNER]
    done = subprocess.run(command, input=json.dumps(job), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout)
    return answers


def _expected(problem: dict[str, Any]) -> list[Any]:
    return [json.loads(test["result"]) if problem["kind"] == "function" else test["stdout"] for test in problem["tests"]]


def test_there_are_enough_problems_of_every_level_and_kind() -> None:
    problems = [_problem(path) for path in PATHS]
    levels = Counter(problem["difficulty"] for problem in problems)
    assert len(problems) >= 60
    assert set(levels) == set(FOLDERS) and min(levels.values()) >= 10
    for level in FOLDERS:
        kinds = Counter(problem["kind"] for problem in problems if problem["difficulty"] == level)
        assert set(kinds) == set(KINDS) and min(kinds.values()) >= levels[level] / 3


def test_titles_and_names_are_unique() -> None:
    titles = Counter(_problem(path)["title"] for path in PATHS)
    assert [title for title, count in titles.items() if count > 1] == []
    names = Counter(path.stem for path in PATHS)
    assert [name for name, count in names.items() if count > 1] == []


def _form(path: Path) -> None:
    problem = _problem(path)
    extra, _ = KINDS[problem["kind"]]
    assert set(problem) == FIELDS | extra
    assert FOLDERS[problem["difficulty"]] == path.parent.name
    assert re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", path.stem)
    assert problem["title"].strip() == problem["title"] != ""
    for name in ("statement", "solution"):
        assert problem[name].strip() and problem[name].isascii() and "\t" not in problem[name]
    assert "Example: " in problem["statement"]
    assert problem["kind"] != "stdin" or ("Input: " in problem["statement"] and "Output: " in problem["statement"])
    assert path.stat().st_size <= 30_000


def _form_of_the_tests(path: Path) -> None:
    problem = _problem(path)
    _, fields = KINDS[problem["kind"]]
    public = [test for test in problem["tests"] if test.get("public", False)]
    hidden = [test for test in problem["tests"] if not test.get("public", False)]
    assert 1 <= len(public) <= 3 and len(hidden) >= 6
    for test in problem["tests"]:
        assert set(test) - {"public"} == fields
        assert isinstance(test.get("public", False), bool)
        if problem["kind"] == "stdin":
            assert test["stdin"].endswith("\n")
            assert test["stdout"].endswith("\n") and not test["stdout"].endswith("\n\n") and test["stdout"].strip()
        else:
            assert isinstance(json.loads(test["args"]), list)
            json.loads(test["result"])
    inputs = [test["stdin"] if problem["kind"] == "stdin" else test["args"] for test in problem["tests"]]
    assert len(set(inputs)) == len(inputs), "two tests have the same input"


def _no_constant_answer_passes_most_hidden_tests(path: Path) -> None:
    problem = _problem(path)
    answers = Counter(test.get("stdout", test.get("result")) for test in problem["tests"] if not test.get("public", False))
    assert answers.most_common(1)[0][1] <= 0.6 * answers.total()


@pytest.mark.parametrize("check", [_form, _form_of_the_tests, _no_constant_answer_passes_most_hidden_tests])
def test_every_problem_is_well_formed(check: Callable[[Path], None], check_each: Any) -> None:
    check_each(PATHS, check)


@every_problem
def test_reference_solution_passes(path: Path) -> None:
    problem = _problem(path)
    assert "setrecursionlimit" not in problem["solution"]
    # As JSON text, so that True is not 1 and a list is not a tuple that happens to be equal.
    assert [json.dumps(answer) for answer in _answers(problem, problem["solution"])] == [json.dumps(value) for value in _expected(problem)]


@pytest.mark.parametrize("path", [path for path in PATHS if _problem(path)["kind"] == "function"], ids=lambda path: path.stem)
def test_starter_fits_the_solution_and_fails_alone(path: Path) -> None:
    problem = _problem(path)
    signature = problem["starter"].splitlines()[0]
    assert signature.startswith(f"def {problem['function']}(") and signature in problem["solution"]
    assert _answers(problem, problem["starter"]) != _expected(problem)
