"""How a problem and the result of an attempt are shown.

A hidden test is never shown: for failed hidden tests only their number and how they ended are shown. Long texts are cut in the middle,
and the addresses in what Python prints of an object are left out: they are others in every process.
"""

import re

from tether.envs.deepcoder.grade import WRONG, Failure, SuiteResult
from tether.envs.deepcoder.parsing import clip, show
from tether.envs.deepcoder.problem import Case, Problem, Satisfies
from tether.envs.deepcoder.sandbox.jobs import CallTask, ScriptTask, StdinTask

MAX_EXAMPLES = 3
_MAX_SHOWN = 600
"""Characters of any one input, output or value."""

NO_PROGRAM = "No program was found in the answer; put one into a ```python code fence."

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")

_WORDS = {
    WRONG: "gave a wrong answer",
    "error": "ended with an error",
    "timeout": "ran out of time",
    "memory": "ran out of memory",
    "output": "printed too much",
    "killed": "was killed",
}


def opening(problem: Problem) -> str:
    """The first observation: the statement, the starter code, what form the program has, examples."""
    parts = [problem.statement]
    if problem.starter.strip():
        parts.append(f"Starter code:\n```python\n{problem.starter.strip()}\n```")
    parts.append(_form(problem))
    examples = [case for case in problem.cases if case.public][:MAX_EXAMPLES] if problem.show_examples else []
    parts += [f"Example:\n{_example(case)}" for case in examples]
    return "\n\n".join(parts)


def feedback(results: SuiteResult) -> str:
    """The reply to an attempt: the first public test that failed, or what the hidden ones ended with."""
    lines = [f"Passed {results.passed} of {results.total} tests."]
    public = next((failure for failure in results.failures if failure.case.public), None)
    if public is not None:
        lines.append(f"The first public test that failed {_WORDS[public.ending]}.\n{_failed(public)}")
    elif results.failures:
        counts = ", ".join(f"{count} {_WORDS[ending]}" for ending, count in results.endings.items())
        lines.append(f"Hidden tests that failed: {counts}.")
    return "\n".join(lines)


def failure_line(failure: Failure) -> str:
    """A failure in one line, for records."""
    got = failure.report.detail if failure.ending != WRONG else _got(failure)
    kind = "public" if failure.case.public else "hidden"
    return f"test {failure.number} ({kind}) {_WORDS[failure.ending]}: {_shown(' '.join(got.split()))}".rstrip(": ")


def _form(problem: Problem) -> str:
    if problem.reads_stdin:
        return "Read the input from standard input and print the output to standard output."
    if "class Solution" in problem.starter:
        return f"Write the class Solution with its method {problem.entry_point}. Nothing is read or printed."
    return f"Write the function {problem.entry_point}. Nothing is read or printed."


def _example(case: Case) -> str:
    if isinstance(case.check, Satisfies):
        return _shown(case.expected)
    if isinstance(case.task, ScriptTask):
        return _shown(case.given)
    if isinstance(case.task, StdinTask):
        return f"Input:\n{_shown(case.given)}\nOutput:\n{_shown(case.expected)}"
    return f"{_shown(case.given)} returns {_shown(case.expected)}"


def _failed(failure: Failure) -> str:
    lines = [_example(failure.case)]
    if failure.ending == WRONG and not isinstance(failure.case.task, ScriptTask):
        between = "\n" if isinstance(failure.case.task, StdinTask) else " "
        lines.append(f"Got:{between}{_shown(_got(failure))}")
    elif failure.report.detail:
        lines.append(f"Error: {_shown(failure.report.detail)}")
    return "\n".join(lines)


def _got(failure: Failure) -> str:
    """What the program printed or returned."""
    if isinstance(failure.case.task, CallTask):
        return show(failure.report.value)
    return failure.report.stdout


def _shown(text: str) -> str:
    return clip(_ADDRESS.sub("at 0x...", text.strip("\n")), _MAX_SHOWN)
