"""What an agent is told about Countdown: the rules, the example of a reply, and the paper's frame."""

from collections.abc import Sequence
from itertools import product

from tether.envs.countdown.expression import Use
from tether.envs.countdown.generator import Puzzle
from tether.envs.countdown.solver import solve, sums
from tether.envs.wording import Example, in_papers_frame

_HOW_OFTEN = {
    "at_most_once": "Use each number at most once; you need not use them all.",
    "exactly_once": "Use every number exactly once.",
}

EXAMPLE_PUZZLES = (Puzzle(29, (7, 3, 12), "(12 * 3) - 7"), Puzzle(30, (5, 2, 4), "(4 + 2) * 5"))
"""The example shows the first of them that is not the puzzle being played."""

OUT_OF_REACH = (Puzzle(58, (44, 19, 35)), Puzzle(83, (26, 61, 9, 44)), Puzzle(35, (8, 71, 50)))
"""Puzzles without a solution, for worked examples: where a model finds none, it should answer with the nearest it has found, not with nothing."""

TRIES = 2
"""Expressions of a worked example that miss the target."""

HOW_TO_THINK = "In your thoughts try combinations of the numbers and compute each result, until one equals the target. Then answer."

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


def shown(puzzle: Puzzle, use: Use) -> Example:
    """A puzzle with its solution, computed step by step, for the instructions."""
    solution = puzzle.solution or solve(puzzle.target, puzzle.numbers, use)
    assert solution is not None, f"{puzzle} has no solution to show"
    # The sum of all numbers seldom is the target: an example of how to go on from there.
    total = sum(puzzle.numbers)
    first = "" if total == puzzle.target else f"{' + '.join(map(str, puzzle.numbers))} = {total}, not {puzzle.target}. "
    return Example(puzzle_text(puzzle), first + thoughts(puzzle.target, [], solution), solution, instance=puzzle.fingerprint)


def worked(puzzle: Puzzle) -> Example:
    """A puzzle with sums and differences of all its numbers that miss the target, and the one that makes it or comes nearest.

    Every try is a whole expression of all the numbers in their order: a model that computes in steps, or with some of the numbers, goes on
    with results as if they were its numbers.
    """
    nearest_first = sorted(_signed_sums(puzzle.numbers), key=lambda pair: abs(pair[1] - puzzle.target))
    answer, value = nearest_first[0]
    missed = [pair for pair in nearest_first if pair[1] != puzzle.target][:TRIES]
    gaps = [(text, value, value - puzzle.target) for text, value in reversed(missed)]
    said = [f"{text} = {value}, {abs(gap)} too {'few' if gap < 0 else 'many'}." for text, value, gap in gaps]
    said.append(f"{answer} = {puzzle.target}, the target." if value == puzzle.target else f"The nearest is {answer}.")
    return Example(puzzle_text(puzzle), " ".join(said), answer, instance=puzzle.fingerprint)


def worked_by_sums(puzzle: Puzzle) -> list[Example]:
    """The worked example of a puzzle that sums and differences solve; empty for another one."""
    return [worked(puzzle)] if any(value == puzzle.target for _, value in _signed_sums(puzzle.numbers)) else []


def with_some_out_of_reach(solved: Sequence[Example]) -> list[Example]:
    """Worked examples; every second one has no solution, while there are such puzzles."""
    mixed: list[Example] = []
    for number, example in enumerate(solved):
        mixed += [example, *map(worked, OUT_OF_REACH[number : number + 1])]
    return mixed


def _signed_sums(numbers: Sequence[int]) -> list[tuple[str, int]]:
    """Sums and differences of all the numbers in their order, each with its value; none below zero."""
    first, *others = numbers
    found = []
    for signs in product("+-", repeat=len(others)):
        terms = list(zip(signs, others, strict=True))
        value = first + sum(number if sign == "+" else -number for sign, number in terms)
        if value >= 0:
            found.append((" ".join([str(first), *(f"{sign} {number}" for sign, number in terms)]), value))
    return found


def thoughts(target: int, tries: Sequence[str], solution: str) -> str:
    """Expressions that miss the target, then the one that makes it, each computed step by step."""
    failed = "".join(f"{', '.join(sums(attempt))}, not {target}. " for attempt in tries)
    return f"{failed}{', '.join(sums(solution))}. That is the target."
