"""What an agent is told about Countdown: the rules, the example of a reply, and the paper's frame."""

from collections.abc import Sequence

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


def worked(puzzle: Puzzle, use: Use) -> Example | None:
    """A puzzle with its solution, computed step by step; None where it has none."""
    solution = puzzle.solution or solve(puzzle.target, puzzle.numbers, use)
    if solution is None:
        return None
    # The sum of all numbers seldom is the target: an example of how to go on from there.
    total = sum(puzzle.numbers)
    first = "" if total == puzzle.target else f"{' + '.join(map(str, puzzle.numbers))} = {total}, not {puzzle.target}. "
    return Example(puzzle_text(puzzle), first + thoughts(puzzle.target, [], solution), solution, instance=puzzle.fingerprint)


def thoughts(target: int, tries: Sequence[str], solution: str) -> str:
    """Expressions that miss the target, then the one that makes it, each computed step by step."""
    failed = "".join(f"{', '.join(sums(attempt))}, not {target}. " for attempt in tries)
    return f"{failed}{', '.join(sums(solution))}. That is the target."
