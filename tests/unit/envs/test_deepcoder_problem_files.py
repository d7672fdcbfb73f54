"""The files of the built-in problems are read strictly."""

from pathlib import Path

import pytest

from tether.core.errors import BadInput
from tether.envs.deepcoder.dataset import builtin_pool, read_problem_file, read_problem_files
from tether.envs.deepcoder.problem import Prints, Returns
from tether.envs.deepcoder.prompt import opening
from tether.envs.deepcoder.sandbox.jobs import CallTask, StdinTask

STDIN = '''
title = "Twice"
difficulty = 2
kind = "stdin"
statement = """
Print twice the number.
"""
solution = "print(2 * int(input()))"

[[tests]]
public = true
stdin = "1\\n"
stdout = "2\\n"

[[tests]]
stdin = "5"
stdout = "10"
'''
FUNCTION = '''
title = "Twice"
difficulty = 1
kind = "function"
statement = "Write `twice(x, y)`."
function = "twice"
starter = """
def twice(x, y):
    ...
"""
solution = "def twice(x, y):\\n    return [2 * x, y]"

[[tests]]
public = true
args = '[1, null]'
result = '[2, null]'

[[tests]]
args = '["a", {"b": true}]'
result = '["aa", {"b": true}]'
'''


def written(folder: Path, text: str, name: str = "1_warmup/twice.toml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def test_a_problem_of_standard_input(tmp_path: Path) -> None:
    problem = read_problem_file(written(tmp_path, STDIN))
    assert [case.task for case in problem.cases] == [StdinTask("1\n"), StdinTask("5")]
    assert [case.check for case in problem.cases] == [Prints("2\n"), Prints("10")]
    assert [case.public for case in problem.cases] == [True, False]
    assert (problem.source, problem.difficulty, problem.solution) == ("1_warmup/twice", "2", "print(2 * int(input()))")
    assert opening(problem) == (
        "Twice\n\nPrint twice the number.\n\nRead the input from standard input and print the output to standard output.\n\n"
        "Example:\nInput:\n1\nOutput:\n2"
    )


def test_a_problem_of_a_function(tmp_path: Path) -> None:
    problem = read_problem_file(written(tmp_path, FUNCTION))
    assert [case.task for case in problem.cases] == [CallTask("twice", (1, None)), CallTask("twice", ("a", {"b": True}))]
    assert [case.check for case in problem.cases] == [Returns([2, None]), Returns(["aa", {"b": True}])]
    assert opening(problem) == (
        "Twice\n\nWrite `twice(x, y)`.\n\nStarter code:\n```python\ndef twice(x, y):\n    ...\n```\n\n"
        "Write the function twice. Nothing is read or printed.\n\nExample:\ntwice(1, None) returns [2, None]"
    )


@pytest.mark.parametrize(
    ("text", "old", "new", "message"),
    [
        (STDIN, 'title = "Twice"', "", "key 'title' is missing"),
        (STDIN, "difficulty = 2", "difficulty = 6", "key 'difficulty': got 6"),
        (STDIN, 'kind = "stdin"', 'kind = "stdio"', "key 'kind': got 'stdio'"),
        (STDIN, "solution =", "solutoin =", "unknown problem file .* key 'solutoin': did you mean 'solution'"),
        (STDIN, 'kind = "stdin"', 'kind = "stdin"\nfunction = "f"', "name the function exactly where one is called"),
        (STDIN, 'stdout = "10"', "", "tests: number 2 must have stdin and stdout, and not args or result"),
        (STDIN, 'stdin = "5"', 'stdin = "5"\nargs = "[1]"', "tests: number 2 must have stdin and stdout"),
        (STDIN, "public = true", "", "some must be public and some not"),
        (STDIN, 'stdin = "5"', 'public = true\nstdin = "5"', "some must be public and some not"),
        (STDIN, 'stdin = "5"', "stdin = 5", "key 'tests.1.stdin': got 5"),
        (STDIN, 'stdin = "5"\nstdout = "10"', "", "tests"),
        (STDIN, 'title = "Twice"', 'title = "Twice', "cannot read the problem file"),
        (FUNCTION, 'function = "twice"', "", "name the function exactly where one is called"),
        (FUNCTION, 'function = "twice"', 'function = "two words"', "name the function exactly where one is called"),
        (FUNCTION, "'[1, null]'", "'1'", "args must be an array, got 1"),
        (FUNCTION, "'[2, null]'", "'[2, None]'", "args or result is not JSON"),
        (FUNCTION, "'[2, null]'", "''", "args or result is not JSON"),
        (FUNCTION, "'[1, null]'", f"'{'[' * 150}{']' * 150}'", "nested more than"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, text: str, old: str, new: str, message: str) -> None:
    assert old in text
    path = written(tmp_path, text.replace(old, new))
    with pytest.raises(BadInput, match=message) as caught:
        read_problem_file(path)
    assert str(path) in str(caught.value)


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("2_easy/a.toml", "1_warmup/b.toml", "1_warmup/a.toml"):
        written(tmp_path, STDIN, name)
    written(tmp_path, "not a problem", "1_warmup/notes.txt")
    assert [problem.source for problem in read_problem_files(tmp_path)] == ["1_warmup/a", "1_warmup/b", "2_easy/a"]


def test_builtin_problems_are_graded_and_apart() -> None:
    problems = read_problem_files()
    assert len(problems) >= 60
    assert {problem.difficulty for problem in problems} == {"1", "2", "3", "4", "5"}
    assert len({problem.fingerprint for problem in problems}) == len(problems)
    assert len(builtin_pool((1, 1), None)) == sum(problem.difficulty == "1" for problem in problems)
