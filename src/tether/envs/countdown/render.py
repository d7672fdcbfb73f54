"""What the agent is told: the rules, the puzzle, and what became of an answer."""

from tether.envs.countdown.generator import Puzzle
from tether.envs.countdown.verdict import Use, Verdict

_HOW_OFTEN = {
    "at_most_once": "Use each number at most once; you need not use them all.",
    "exactly_once": "Use every number exactly once.",
}


def rules(use: Use) -> str:
    return (
        "Write an arithmetic expression that equals the target. "
        f"{_HOW_OFTEN[use]} Allowed are + - * / and parentheses; division is exact. "
        "Answer with the expression alone, such as (3 + 5) * 2, without an equals sign."
    )


def puzzle_text(puzzle: Puzzle) -> str:
    return f"Target: {puzzle.target}, nums: {list(puzzle.numbers)}"


def reply(verdict: Verdict, puzzle: Puzzle, *, over: bool) -> str:
    """The judgement; while turns are left, with the puzzle once more."""
    if verdict.solved:
        return f"The expression is {puzzle.target}."
    return verdict.reason if over else f"{verdict.reason} Try again.\n{puzzle_text(puzzle)}"
