"""A programming problem: what it asks, and its tests, each a run of the program and a check of the report.

The check is made outside the sandbox on what the sandbox reports, so a program never sees what was expected of it; only a test that
had to stay a script (`Passes`) is graded by its own assertions. The fingerprint is the statement and a digest of every test of the
row, also of those that `max_tests` leaves out: the split of a problem does not depend on the options.

`grade` hands the tests to the sandbox in waves. Once the tests of an answer have taken `total_limit` seconds, added up, or none of the first
`HOPELESS` has ended in time, no further one is started, and those count as failed by time. What is added up is the time the tests themselves ran: how long they waited for their turn on a
busy machine does not change the results.
"""

import ast
import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tether.core import codec
from tether.envs.deepcoder.compare import same_output, same_value
from tether.envs.deepcoder.expressions import RESULT, holds
from tether.envs.deepcoder.parsing import NotPython, parse, show
from tether.envs.deepcoder.sandbox.jobs import CallTask, ProgramRunner, Report, ScriptTask, StdinTask, Task

_MAX_ARGUMENTS = 2**26
"""Characters, as the sandbox writes them."""

TRUTH_OF = "_truth_of_"
"""A function added to every program that is called: whether what a function returns is true. A test that asks no more than that must
not depend on the value being one that can leave the sandbox, such as a match object."""


@dataclass(frozen=True, slots=True)
class Prints:
    """The program prints this."""

    expected: str
    ignore_case: bool = False

    def holds(self, report: Report) -> bool:
        return same_output(report.stdout, self.expected, ignore_case=self.ignore_case)


@dataclass(frozen=True, slots=True)
class Returns:
    """The function returns this, as JSON would have it."""

    expected: Any
    wrapped: bool = False
    """The expected value stands in a list of its own, as APPS and TACO write it; with or without it will do."""

    def holds(self, report: Report) -> bool:
        return same_value(report.value, self.expected) or (self.wrapped and same_value(report.value, self.expected[0]))


@dataclass(frozen=True, slots=True)
class Satisfies:
    """What the function returns makes the expression true, in which the name RESULT stands for it. Equality is Python's own."""

    expression: ast.expr

    def holds(self, report: Report) -> bool:
        return holds(self.expression, report.value)

    def worded(self, call: str) -> str:
        """The assertion with the call written out."""
        return f"assert {ast.unparse(self.expression).replace(RESULT, call)}"


@dataclass(frozen=True, slots=True)
class Near:
    """The function returns this, or numbers near these item by item: |got - expected| <= absolute + relative * |expected|."""

    expected: Any
    absolute: float
    relative: float

    def holds(self, report: Report) -> bool:
        try:
            return bool(report.value == self.expected) or self._near(report.value, self.expected)
        except (RecursionError, OverflowError):  # nested too deep; an integer beyond every float
            return False

    def _near(self, got: Any, expected: Any) -> bool:
        if isinstance(expected, list | tuple):
            return isinstance(got, list | tuple) and len(got) == len(expected) and all(map(self._near, got, expected))
        numbers = isinstance(got, int | float) and isinstance(expected, int | float)
        return numbers and abs(got - expected) <= self.absolute + self.relative * abs(expected)


@dataclass(frozen=True, slots=True)
class Passes:
    """The script ran to its end: its own assertions are the check."""

    def holds(self, report: Report) -> bool:
        return True


Check = Prints | Returns | Satisfies | Near | Passes


@dataclass(frozen=True, slots=True)
class Case:
    """One test."""

    task: Task
    check: Check
    public: bool = False
    """An agent may be shown it."""

    def passed(self, report: Report) -> bool:
        return report.ending == "ok" and self.check.holds(report)

    @property
    def given(self) -> str:
        """The input: what stands on standard input, the call, or the script."""
        match self.task:
            case StdinTask(stdin=text):
                return text
            case CallTask(function=function, args=args):
                name, given = args if function == TRUTH_OF else (function, args)
                return f"{name}({', '.join(map(show, given))})"
            case ScriptTask(script=script):
                return script

    @property
    def expected(self) -> str:
        """The right answer in words; empty where the script says it all."""
        match self.check:
            case Prints(expected=text):
                return text
            case Returns(expected=value, wrapped=wrapped):
                return show(value[0] if wrapped else value)
            case Near(expected=value):
                return show(value)
            case Satisfies():
                return self.check.worded(self.given)
            case Passes():
                return ""


@dataclass(frozen=True, slots=True)
class Problem:
    """One instance of the environment."""

    statement: str
    cases: tuple[Case, ...]
    digest: str
    """Of all tests of the problem, whatever `limited_to` leaves of them."""
    starter: str = ""
    """Code that the answer completes or follows: a prompt that opens a function, a class with a method to fill in."""
    entry_point: str = ""
    """The function that is called; empty for programs that read standard input."""
    solution: str = ""
    """A program that passes, where the source has one."""
    source: str = ""
    """Where it comes from: the name of a format and, where the row has one, its id."""
    difficulty: str = ""
    show_examples: bool = False
    """The statement holds no examples, so the public tests are shown beneath it."""

    @property
    def fingerprint(self) -> str:
        return f"{self.statement}\n{self.starter}\n{self.digest}"

    @property
    def summary(self) -> str:
        """In a line, for people."""
        form = "standard input" if self.reads_stdin else f"calls of {self.entry_point}"
        return f"{' '.join((self.statement + ' ' + self.starter).split()):.90}... ({len(self.cases)} tests, {form})"

    @property
    def reads_stdin(self) -> bool:
        return isinstance(self.cases[0].task, StdinTask)

    def limited_to(self, max_tests: int | None) -> "Problem":
        """The problem with at most so many tests: the first public one, then evenly spaced ones of the hidden."""
        if max_tests is None or len(self.cases) <= max_tests:
            return self
        first = next((case for case in self.cases if case.public), self.cases[0])
        hidden = [case for case in self.cases if case is not first and not case.public]
        shown = [case for case in self.cases if case is not first and case.public]
        wanted = max_tests - 1
        spaced = [hidden[at * len(hidden) // wanted] for at in range(wanted)] if len(hidden) >= wanted else hidden
        chosen = {id(case) for case in (first, *spaced, *shown[: wanted - len(spaced)])}
        return replace(self, cases=tuple(case for case in self.cases if id(case) in chosen))


def check_arguments(arguments: Sequence[Any]) -> None:
    """Raise ValueError for arguments that cannot be handed to a program: nested too deep, too large."""
    codec.encode(list(arguments), _MAX_ARGUMENTS)


def digest_of(cases: Sequence[Case]) -> str:
    """A hash of every test, the same in every process."""
    state = hashlib.blake2b(digest_size=16)
    for case in cases:
        for text in (case.given, case.expected):
            data = text.encode("utf-8", "surrogatepass")
            state.update(f"{len(data)}:".encode())
            state.update(data)
    return state.hexdigest()


HOPELESS = 2
"""Tests that are run first. A program that runs out of time in each of them (the first is the sample of the statement, as a rule) is not run
again: it would take the time of every other test as well."""
_ARITHMETIC = (ast.Module, ast.Expr, ast.BinOp, ast.UnaryOp, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Pow, ast.LShift)

WRONG = "wrong"
"""The ending of a test that ran to its end and gave the wrong answer; the others are the sandbox's own words."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed."""

    number: int
    """Place among the tests, from 1."""
    case: Case
    report: Report

    @property
    def ending(self) -> str:
        return WRONG if self.report.ending == "ok" else self.report.ending


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The result of running an answer against the tests of its problem."""

    total: int
    failures: tuple[Failure, ...]

    @property
    def passed(self) -> int:
        return self.total - len(self.failures)

    @property
    def solved(self) -> bool:
        return not self.failures

    @property
    def endings(self) -> dict[str, int]:
        """Number of failures by ending, in a fixed order."""
        return dict(sorted(Counter(failure.ending for failure in self.failures).items()))


def grade(program: str, cases: Sequence[Case], runner: ProgramRunner, *, wave: int, total_limit: float) -> SuiteResult:
    """Run a program through all tests, `wave` at a time."""
    reports = runner.run(program, [case.task for case in cases[:HOPELESS]])
    why = f"the tests before it took {total_limit:g} s"
    if all(report.ending == "timeout" for report in reports):
        why, total_limit = "the tests before it did not end in time", 0.0
    while len(reports) < len(cases) and sum(report.seconds for report in reports) < total_limit:
        reports += runner.run(program, [case.task for case in cases[len(reports) : len(reports) + wave]])
    reports += [Report("timeout", detail=f"not started: {why}")] * (len(cases) - len(reports))
    return _results(cases, reports)


def is_arithmetic(code: str) -> bool:
    """Whether code is nothing but arithmetic with numbers: it prints nothing and defines nothing, and 9**9**9 takes the time of every test."""
    try:
        nodes = list(ast.walk(parse(code)))
    except NotPython:  # it completes the starter
        return False
    return all(isinstance(node.value, int | float) if isinstance(node, ast.Constant) else isinstance(node, _ARITHMETIC) for node in nodes)


def idle(problem: Problem, program: str) -> SuiteResult:
    """The results of a program that does arithmetic and nothing else, known without running it. Where it completes the starter, the function
    returns nothing."""
    defines = any(isinstance(node, ast.FunctionDef) and node.name == problem.entry_point for node in ast.walk(parse(program)))
    missing = Report("error", detail=f"NameError: the program defines no function {problem.entry_point!r}")
    return _results(problem.cases, [Report("ok") if problem.reads_stdin or defines else missing] * len(problem.cases))


def reject(cases: Sequence[Case], reason: str) -> SuiteResult:
    """The results of a program that cannot run at all: every test fails."""
    return _results(cases, [Report("error", detail=reason)] * len(cases))


def _results(cases: Sequence[Case], reports: Sequence[Report]) -> SuiteResult:
    pairs = enumerate(zip(cases, reports, strict=True), 1)
    return SuiteResult(len(cases), tuple(Failure(number, case, report) for number, (case, report) in pairs if not case.passed(report)))


Reward = Callable[[SuiteResult], float]
"""From the results of an attempt to its reward."""


@dataclass(frozen=True, slots=True)
class FractionPassed:
    """Passed tests over all tests."""

    def __call__(self, results: SuiteResult) -> float:
        return results.passed / results.total
