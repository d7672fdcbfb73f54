"""Problems from the public data sets (the fields of a row determine its format) and the built-in problems.

Loading is done once per process and options, since a trainer builds hundreds of environments that share them.

A built-in problem is one TOML file with `title`, `difficulty` (1 to 5), `kind` ("stdin" or "function"), `statement`, `solution`, for functions
also `function` and optionally `starter`, and `[[tests]]`: `public`, and either `stdin` and `stdout`, or `args` (a JSON array) and `result`
(JSON). Files are read strictly: a missing, unknown or wrong field is an error that names the file.

The statement of a contest problem says whether letters may be in any case, and whether several answers are right (`JudgingRules`). The tests
of the public data sets list one answer each. Where the statement accepts any of several ("if there are multiple answers, print any of them"), the
contest had a checker program of its own, which no data set has. A right program fails the listed answer there, so such problems are left out and
counted. The phrases are those of Codeforces, AtCoder, CodeChef and LeetCode, and they are meant narrowly: a tie that the statement breaks itself
("print the smallest of them") needs no checker.
"""

import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, StringConstraints, model_validator

from tether.core.config import Settings, validate
from tether.core.errors import BadInput
from tether.envs.dataset import BadRows, Fields, Pool, Row, RowError, RowLeftOut, load_instances
from tether.envs.deepcoder.assertion_rows import humaneval, mbpp
from tether.envs.deepcoder.pair_rows import deepcoder, input_output, livecodebench, verification_info
from tether.envs.deepcoder.parsing import read_json
from tether.envs.deepcoder.problem import Case, Prints, Problem, Returns, check_arguments, digest_of
from tether.envs.deepcoder.sandbox.jobs import CallTask, StdinTask

SpecialJudge = Literal["skip", "keep"]

_MANY = r"(?:multiple|several|many|more than one|more than 1|various)"
_RESULTS = (
    r"(?:answers?|solutions?|ways?|outputs?|results?|strings?|words?|arrays?|sequences?|subsequences?|subsets?|permutations?|paths?|pairs?|options?"
    r"|variants?|possibilities|possible|optimal|correct|valid|suitable|such|of them|matrices|trees|graphs|plans?|assignments?|arrangements?)"
)
_GIVE = r"(?:print|output|return|display|write|report|produce|give|find|choose|provide)"
_SPECIAL_JUDGE = (
    re.compile(rf"\b{_MANY}\b (?:\w+ ){{0,4}}?{_RESULTS}\b[^.!]{{0,60}}[.,;:)]?[^.!]{{0,40}}\b(?:any|either|arbitrary)\b", re.IGNORECASE),
    re.compile(
        rf"(?<!not )(?<!n't )\b{_GIVE} (?:any|either|an arbitrary) (?:one )?"
        r"(?:of (?:them|these|those|the)|such|valid|correct|possible|suitable|optimal|appropriate|answer|solution|one\b)",
        re.IGNORECASE,
    ),
    re.compile(
        r"\bany (?:of them|of these|(?:valid |correct |possible |such )?(?:answer|solution|output)s?)\b[^.!]{0,20}"
        r"\b(?:accepted|allowed|acceptable|considered correct)\b",
        re.IGNORECASE,
    ),
    re.compile(rf"\b{_GIVE}\b[^.!]{{0,60}}\bin (?:any|an arbitrary|arbitrary) order\b", re.IGNORECASE),
    re.compile(r"\bspecial (?:judge|checker)\b", re.IGNORECASE),
)
_ANY_CASE = re.compile(
    r"\b(?:print|output|letter|letters|character|characters|word|string|answer|verdict)\b[^.!]{0,80}\bin (?:any|either|an arbitrary|arbitrary) "
    r"(?:case|register)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class JudgingRules:
    """How the tests of a data set are judged."""

    special_judge: SpecialJudge = "skip"
    """Problems with several right answers: leave them out, or judge them by the one that is listed."""
    ignore_case: bool | None = None
    """Printed text without regard to case; None: where the statement allows it."""

    def applied(self, problem: Problem) -> Problem:
        """The problem as it is judged; RowLeftOut if it cannot be."""
        listed = all(isinstance(case.check, Prints | Returns) for case in problem.cases)
        if listed and self.special_judge == "skip" and accepts_several_answers(problem.statement):
            raise RowLeftOut(
                "the statement accepts several answers, which takes a special judge; special_judge=keep takes the listed answer alone"
            )
        ignore_case = accepts_any_case(problem.statement) if self.ignore_case is None else self.ignore_case
        if not ignore_case:
            return problem
        cases = tuple(
            replace(case, check=replace(case.check, ignore_case=True)) if isinstance(case.check, Prints) else case for case in problem.cases
        )
        return replace(problem, cases=cases)


def accepts_several_answers(statement: str) -> bool:
    """Whether the statement says that any of several answers is right.

    >>> accepts_several_answers("If there are multiple answers, print any."), accepts_several_answers("If there are several, print the least.")
    (True, False)
    """
    text = " ".join(statement.split())
    return any(pattern.search(_ANY_CASE.sub(" ", text)) for pattern in _SPECIAL_JUDGE)


def accepts_any_case(statement: str) -> bool:
    """Whether the statement says that letters may be printed in any case.

    >>> accepts_any_case("You can print each letter in any case (upper or lower).")
    True
    """
    return _ANY_CASE.search(" ".join(statement.split())) is not None


DEFAULT = "the built-in problems"
DEFAULT_RULES = JudgingRules()

_FORMATS: tuple[tuple[tuple[str, ...], Callable[[Row], Problem]], ...] = (
    (("question_content", "public_test_cases"), livecodebench),
    (("prompt", "entry_point", "test"), humaneval),
    (("test_list",), mbpp),
    (("problem", "tests"), deepcoder),
    (("question", "input_output"), input_output),
    (("prompt", "verification_info"), verification_info),
)
"""The fields that identify a format; a row has the first format whose fields it has all."""


def read_problem(row: Row) -> Problem:
    """The problem of a row in any known format."""
    present = row.value if isinstance(row.value, dict) else row.fields("problem", "tests")
    for names, read in _FORMATS:
        if all(name in present for name in names):
            return read(row)
    known = "; ".join(", ".join(names) for names, _ in _FORMATS)
    raise RowError(
        f"is of no known format: it has the fields {', '.join(map(str, present)) or '(none)'}; a format is told by {known}; name other columns with fields={{NAME: COLUMN}}"
    )


def read_judged_problem(row: Row) -> Problem:
    """The problem of a row as the default rules judge it."""
    return DEFAULT_RULES.applied(read_problem(row))


@lru_cache(maxsize=8)
def load_pool(
    source: str, bad_rows: BadRows, max_tests: int | None, fields: Fields = (), rules: JudgingRules = DEFAULT_RULES
) -> Pool[Problem]:
    """The problems of a file or named data set, by split."""
    problems = load_instances(
        source,
        lambda row: rules.applied(read_problem(row)).limited_to(max_tests),
        env="deepcoder",
        default=DEFAULT,
        bad_rows=bad_rows,
        fields=fields,
    )
    return Pool(problems, env="deepcoder", source=source)


FOLDER = Path(__file__).parent / "data" / "problems"
LEVELS = (1, 5)

NonEmptyText = Annotated[str, StringConstraints(min_length=1, strict=True)]


class WrittenTest(Settings):
    """One test of a problem file."""

    public: bool = False
    stdin: str | None = None
    stdout: str | None = None
    args: str | None = None
    result: str | None = None


class ProblemFile(Settings):
    """A problem file as it is written."""

    title: NonEmptyText
    difficulty: int = Field(ge=LEVELS[0], le=LEVELS[1])
    kind: Literal["stdin", "function"]
    statement: NonEmptyText
    solution: NonEmptyText
    function: str = ""
    starter: str = ""
    tests: tuple[WrittenTest, ...] = Field(min_length=2)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.kind == "function") != self.function.isidentifier():
            raise ValueError(f"kind: got {self.kind} with function {self.function!r}; name the function exactly where one is called")
        wanted, other = (("stdin", "stdout"), ("args", "result"))[:: 1 if self.kind == "stdin" else -1]
        for number, test in enumerate(self.tests, 1):
            if any(getattr(test, name) is None for name in wanted) or any(getattr(test, name) is not None for name in other):
                raise ValueError(f"tests: number {number} must have {' and '.join(wanted)}, and not {' or '.join(other)}")
        if len({test.public for test in self.tests}) != 2:
            raise ValueError("tests: some must be public and some not")
        return self


def read_problem_file(path: Path) -> Problem:
    """The problem of a file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadInput(f"cannot read the problem file '{path}': {' '.join(str(error).split())}") from error
    file = validate(ProblemFile, data, what=f"problem file '{path}'")
    try:
        cases = [_case(file, test) for test in file.tests]
    except ValueError as error:
        raise BadInput(f"problem file '{path}': args or result is not JSON that can be handed to a program: {error}") from error
    return Problem(
        statement=f"{file.title}\n\n{file.statement.strip()}",
        cases=tuple(cases),
        digest=digest_of(cases),
        starter=file.starter,
        entry_point=file.function,
        solution=file.solution,
        source=f"{path.parent.name}/{path.stem}",
        difficulty=str(file.difficulty),
        show_examples=True,
    )


@lru_cache(maxsize=1)
def read_problem_files(folder: Path = FOLDER) -> list[Problem]:
    """Every problem of a folder and the folders in it, in the order of their paths; read once per process."""
    return [read_problem_file(path) for path in sorted(folder.rglob("*.toml"), key=lambda path: path.relative_to(folder).as_posix())]


@lru_cache(maxsize=8)
def builtin_pool(difficulty: tuple[int, int] | None, max_tests: int | None) -> Pool[Problem]:
    """The built-in problems of these levels, by split."""
    least, most = difficulty or LEVELS
    problems = [problem for problem in read_problem_files() if least <= int(problem.difficulty) <= most]
    if not problems:
        raise BadInput(f"deepcoder: no built-in problem has a difficulty from {least} to {most}; widen difficulty, or leave it out")
    return Pool([problem.limited_to(max_tests) for problem in problems], env="deepcoder", source="built-in")


def _case(file: ProblemFile, test: WrittenTest) -> Case:
    if test.stdin is not None and test.stdout is not None:
        return Case(StdinTask(test.stdin), Prints(test.stdout), test.public)
    arguments = read_json(test.args or "")
    if not isinstance(arguments, list):
        raise ValueError(f"args must be an array, got {test.args}")
    check_arguments(arguments)
    return Case(CallTask(file.function, tuple(arguments)), Returns(read_json(test.result or "")), test.public)
