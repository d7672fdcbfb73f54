"""What an agent is told about Countdown: the rules, the example of a reply, and the paper's frame."""

import re
from collections.abc import Sequence
from functools import lru_cache

from tether.envs.countdown.expression import Use, check_answer
from tether.envs.countdown.generator import Puzzle
from tether.envs.countdown.solver import near_misses, solve, sums
from tether.envs.wording import Example, in_papers_frame

_HOW_OFTEN = {
    "at_most_once": "Use each number at most once; you need not use them all.",
    "exactly_once": "Use every number exactly once.",
}

EXAMPLE_PUZZLES = (Puzzle(29, (7, 3, 12), "(12 * 3) - 7"), Puzzle(30, (5, 2, 4), "(4 + 2) * 5"))
"""The example shows the first of them that is not the puzzle being played."""

OUT_OF_REACH = (Puzzle(58, (44, 19, 35)), Puzzle(77, (90, 31, 6)), Puzzle(35, (8, 71, 50)))
"""Puzzles without a solution, for worked examples: where a model finds none, it should answer with the nearest it has found, not with nothing."""

TRIES = 2
"""Expressions of a worked example that miss the target."""

HOW_TO_THINK = (
    "In your thoughts write expressions of the numbers, each with its result, until one equals the target. "
    "Then answer with the one that comes nearest to the target."
)

_PAPER = (
    "You are solving the Countdown puzzle. Use the list of numbers to create an equation that equals the target. {how_often} "
    "Example answer format: <think> To find an equation using [3, 5, 2] to get 4. Let's check 2 + 5 = 7, 7 - 3 = 4. "
    "So the answer is 2 + 5 - 3 = 4. </think><answer>2 + 5 - 3</answer>"
)


def task(use: Use) -> str:
    return (
        "Write an arithmetic expression that equals the target. "
        f"{_HOW_OFTEN[use]} Allowed are + - * / and parentheses; division is exact. "
        "Answer with the expression alone, such as (3 + 5) * 2, without an equals sign."
    )


def refused(use: Use) -> str:
    often = "each exactly once" if use == "exactly_once" else "each at most once"
    return (
        f"Between the answer tags write only the numbers of your own task, {often}, with + - * / and parentheses: "
        "no equals sign, no result, no other number, no words. Stop after </answer>."
    )


def paper(use: Use) -> str:
    return in_papers_frame(_PAPER.format(how_often=_HOW_OFTEN[use]))


def puzzle_text(puzzle: Puzzle) -> str:
    return f"Target: {puzzle.target}, nums: {list(puzzle.numbers)}"


@lru_cache(maxsize=64)  # every environment of a run shows the same ones
def worked(puzzle: Puzzle, use: Use) -> Example:
    """A puzzle with expressions that miss the target, and the one that makes it or comes nearest.

    Whole expressions, not their steps: a model that computes step by step answers with a number of its calculation.
    """
    solution = puzzle.solution or solve(puzzle.target, puzzle.numbers, use)
    total = " + ".join(map(str, puzzle.numbers))
    nearest = near_misses(puzzle.target, puzzle.numbers, TRIES)[::-1] if use == "at_most_once" else [total]
    tries = [attempt for attempt in nearest if not check_answer(attempt, puzzle, use).solved]
    answer = solution or tries[-1]
    thoughts = [_weighed(attempt, puzzle, use) for attempt in tries]
    thoughts.append(f"{answer} = {puzzle.target}, the target." if solution else f"The nearest is {answer}.")
    return Example(puzzle_text(puzzle), " ".join(thoughts), answer, instance=puzzle.fingerprint)


def worked_simply(puzzle: Puzzle, use: Use) -> list[Example]:
    """The worked example of a puzzle whose solution neither divides nor multiplies; empty for another one.

    A small model takes what it is shown as its model, and computes products of large numbers wrongly.
    """
    example = worked(puzzle, use)
    return [] if re.search("[*/]", example.answer) else [example]


def with_some_out_of_reach(solved: Sequence[Example], use: Use) -> list[Example]:
    """Worked examples; every second one has no solution, while there are such puzzles."""
    mixed: list[Example] = []
    for number, example in enumerate(solved):
        mixed += [example, *(worked(puzzle, use) for puzzle in OUT_OF_REACH[number : number + 1])]
    return mixed


def _weighed(attempt: str, puzzle: Puzzle, use: Use) -> str:
    """An expression with its result, and how far that is from the target."""
    value = check_answer(attempt, puzzle, use).value
    assert value is not None, f"{attempt} has no value"
    return f"{attempt} = {value}, {abs(value - puzzle.target)} too {'few' if value < puzzle.target else 'many'}."


def thoughts(target: int, tries: Sequence[str], solution: str) -> str:
    """Expressions that miss the target, then the one that makes it, each computed step by step."""
    failed = "".join(f"{', '.join(sums(attempt))}, not {target}. " for attempt in tries)
    return f"{failed}{', '.join(sums(solution))}. That is the target."
