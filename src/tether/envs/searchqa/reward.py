"""How an answer is graded against the gold answers (exact match, token F1), and the reward after a number of searches.

Grading is that of SQuAD and HotpotQA: lower case, no punctuation, no articles, single spaces; F1 over the tokens as multisets, the best
over all gold answers; yes, no and noanswer only count whole. The reward is a separate object and can be replaced.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = frozenset({"yes", "no", "noanswer"})


def normalise(text: str) -> str:
    """The form in which answers are compared.

    >>> normalise("  The Platt-Family, of New  York. ")
    'plattfamily of new york'
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, gold: str) -> bool:
    given, wanted = normalise(answer), normalise(gold)
    # An answer that is nothing but articles or signs ("A", "+") would equal every other such: compare those as written.
    return given == wanted if given or wanted else answer.strip().lower() == gold.strip().lower()


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of the answer's tokens."""
    given, wanted = normalise(answer), normalise(gold)
    if given != wanted and (given in _WHOLE or wanted in _WHOLE):
        return 0.0
    given_tokens, wanted_tokens = given.split(), wanted.split()
    shared = sum((Counter(given_tokens) & Counter(wanted_tokens)).values())
    return 2 * shared / (len(given_tokens) + len(wanted_tokens)) if shared else 0.0


@dataclass(frozen=True, slots=True)
class Grade:
    """How good an answer is."""

    em: bool
    """Equal to a gold answer."""
    f1: float
    """Against the nearest gold answer; 1 if equal."""


def grade(answer: str, golds: Sequence[str]) -> Grade:
    """The answer against the gold answer that suits it best."""
    em = any(exact_match(answer, gold) for gold in golds)
    return Grade(em, 1.0 if em else max((token_f1(answer, gold) for gold in golds), default=0.0))


Reward = Callable[[Grade, int], float]
"""From the grade of the final answer and the number of searches made to the reward."""


RewardRule = Literal["f1", "exact_match"]
"""What an answer that is no exact match pays: its F1, or nothing."""


@dataclass(frozen=True, slots=True)
class ExactMatchReward:
    """1 for an exact match, else nothing; less a cost per search after the first, never below 0.

    F1 pays for shared words: "not Henry Platt" has an F1 of 0.8 against "Henry Platt". Here it pays nothing.
    """

    search_cost: float = 0.02

    def __call__(self, grade: Grade, searches: int) -> float:
        return max(0.0, float(grade.em) - self.search_cost * max(0, searches - 1)) if grade.em else 0.0


@dataclass(frozen=True, slots=True)
class AnswerReward:
    """1 for an exact match, else F1 if it reaches the threshold; less a cost per search after the first, never below 0."""

    f1_threshold: float = 0.3
    search_cost: float = 0.02

    def __call__(self, grade: Grade, searches: int) -> float:
        worth = grade.f1 if grade.f1 >= self.f1_threshold else 0.0
        return max(0.0, worth - self.search_cost * max(0, searches - 1))
