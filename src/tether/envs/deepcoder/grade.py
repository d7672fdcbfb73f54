"""Grades a program: the tests run in the sandbox, and their output is compared here. The reward is the fraction of tests passed.

Tests are handed to the sandbox in waves. Once the tests of an answer have taken `total_limit` seconds, added up, no further one is
started, and those count as failed by time. What is added up is the time the tests themselves ran: how long they waited for their
turn on a busy machine does not change the results.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tether.envs.deepcoder.problem import Case
from tether.envs.deepcoder.sandbox.jobs import ProgramRunner, Report

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
    reports: list[Report] = []
    while len(reports) < len(cases) and sum(report.seconds for report in reports) < total_limit:
        reports += runner.run(program, [case.task for case in cases[len(reports) : len(reports) + wave]])
    late = Report("timeout", detail=f"not started: the tests before it took {total_limit:g} s")
    reports += [late] * (len(cases) - len(reports))
    return _results(cases, reports)


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
