"""What the statement of a contest problem says about its judge: whether letters may be in any case, whether several answers are right.

The tests of the public data sets list one answer each. Where the statement accepts any of several ("if there are multiple answers, print any
of them"), the contest had a checker program of its own, which no data set has. A right program fails the listed answer there, so such problems
are left out and counted. The phrases are those of Codeforces, AtCoder, CodeChef and LeetCode, and they are meant narrowly: a tie that the
statement breaks itself ("print the smallest of them") needs no checker.
"""

import re
from dataclasses import dataclass, replace
from typing import Literal

from tether.envs.dataset import RowLeftOut
from tether.envs.deepcoder.problem import Prints, Problem, Returns

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
