"""What an agent is told and shown of a programming problem: the task, examples of replies, the problem, and the result of an attempt.

A hidden test is never shown: for failed hidden tests only their number and how they ended are shown. Long texts are cut in the middle,
and the addresses in what Python prints of an object are left out: they are others in every process.
"""

import re

from tether.envs.deepcoder.parsing import clip, show
from tether.envs.deepcoder.problem import WRONG, Case, Failure, Problem, Satisfies, SuiteResult
from tether.envs.deepcoder.sandbox.jobs import CallTask, ScriptTask, StdinTask
from tether.envs.wording import Example, in_papers_frame

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
    if problem.reads_stdin:
        parts.append("Read the input from standard input and print the output to standard output.")
    else:
        what = (
            f"class Solution with its method {problem.entry_point}"
            if "class Solution" in problem.starter
            else f"function {problem.entry_point}"
        )
        parts.append(f"Write the {what}. Nothing is read or printed.")
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


REFUSED = (
    "Between the answer tags write one ```python code fence with the whole program and nothing else: no explanation, no tests. "
    "Close the fence and stop after </answer>."
)

EXAMPLE = Example(
    "Write `count_even(numbers)`, which returns how many of the numbers are even.",
    "A number is even if its remainder by 2 is 0. I count those.",
    "```python\ndef count_even(numbers):\n    return sum(1 for number in numbers if number % 2 == 0)\n```",
)
WORKED = (
    Example(
        "Write `initials(name)`, which returns the first letter of each word of the name in upper case. "
        "Example: `initials('ada king lovelace')` returns `'AKL'`.",
        "I split the name at spaces and join the first letters in upper case.",
        "```python\ndef initials(name):\n    return ''.join(word[0].upper() for word in name.split())\n```",
    ),
    Example(
        "The first line has a number n, the second has n whole numbers. Print the difference between the largest and the smallest. "
        "Read the input from standard input and print the output to standard output.",
        "I read all numbers and print the maximum minus the minimum.",
        "```python\nn = int(input())\nvalues = list(map(int, input().split()))[:n]\nprint(max(values) - min(values))\n```",
    ),
    Example(
        "Write `first_repeat(text)`, which returns the first character that occurs a second time, or an empty string.",
        "I go through the characters and remember those seen; the first one seen before is the result.",
        "```python\ndef first_repeat(text):\n    seen = set()\n    for character in text:\n        if character in seen:\n"
        "            return character\n        seen.add(character)\n    return ''\n```",
    ),
)

_PAPER = "You are solving a coding task. Provide a complete Python function solution only. Format: <answer>...</answer>"
_AGAIN = " A program that fails is told how, and you may answer again with another one."


def task(max_turns: int) -> str:
    first = (
        "Solve the programming problem in Python 3 with its standard library. "
        "Inside the answer give one whole program in a ```python code fence; it is run on public and hidden tests."
    )
    return f"{first}{_AGAIN}" if max_turns > 1 else first


def paper(max_turns: int) -> str:
    return in_papers_frame(f"{_PAPER}{_AGAIN}" if max_turns > 1 else _PAPER)
