"""The score of a purchase: the original WebShop's formula, part by part.

    total = r_type * (attributes met + options met + price met) / (attributes asked + options asked + 1)

Attributes and options are compared by thefuzz's token_set_ratio, met above 85. The original pins thefuzz 0.19.0, whose ratio is that of
difflib; later ones, and this module, use rapidfuzz's. The two differ in the score of dissimilar strings but agreed on which side of 85
a pair lies for every pair of attributes and for 48,000 pairs of options of the real 1,000 products. The text is prepared as 0.19.0
does: characters 128 to 255 deleted, what is no letter, digit or underscore made a space, lower-cased; the ratio is rounded.

Kept from the original although it looks odd: for a synthetic goal the original looks for colour words in the pair (name, value), so only a value
that IS a colour word is reduced to it, and compares the pair as Python prints it. A chosen value that merely contains a colour word
("graywash", "standard") is reduced, no longer resembles the goal's, and can never be met.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rapidfuzz import fuzz

from tether.envs.dataset import read_packaged
from tether.envs.webshop.goals import Goal
from tether.envs.webshop.nouns import NounTest
from tether.envs.webshop.products import Product

Reward = Callable[["Score"], float]
"""From the score of a purchase to the reward."""

COLOURS: tuple[str, ...] = tuple(read_packaged(__package__, "titles.toml")["colours"])
"""The colour words an option is reduced to before it is compared, in the original's order: the first one found counts."""

_ALIKE_ABOVE = 85
_DELETED = dict.fromkeys(range(128, 256))
_NO_WORD = re.compile(r"\W")


@dataclass(frozen=True, slots=True)
class Score:
    """How well a purchase meets a goal, whole and in parts."""

    total: float
    r_type: float
    """1, or less if the product is of another kind."""
    r_att: float
    """Share of the attributes met."""
    r_option: float | None
    """Share of the options met; None if the goal asks for none."""
    r_price: bool
    query_match: bool
    category_match: bool
    title_score: float

    @property
    def full(self) -> bool:
        """Everything in the instruction was met."""
        return self.total >= 1.0

    def parts(self) -> dict[str, Any]:
        return asdict(self)


def graded(score: Score) -> float:
    """The original's reward: the score."""
    return score.total


def binary(score: Score) -> float:
    """Upstream's reward: 1 for a full score, otherwise 0."""
    return float(score.full)


def score_purchase(goal: Goal, product: Product, chosen: Mapping[str, str], nouns: NounTest) -> Score:
    """The score of buying `product` with the options `chosen` (value by name)."""
    r_type, query_match, category_match, title_score = _kind(goal.product, product, nouns)
    attributes_met = sum(_has_attribute(product, attribute) for attribute in goal.attributes)
    options_met = _options_met(goal, chosen)
    price_met = product.price <= goal.price_limit
    asked = len(goal.attributes) + len(goal.options) + 1
    return Score(
        total=(attributes_met + options_met + price_met) / asked * r_type,
        r_type=r_type,
        r_att=attributes_met / len(goal.attributes),
        r_option=options_met / len(goal.options) if goal.options else None,
        r_price=price_met,
        query_match=query_match,
        category_match=category_match,
        title_score=title_score,
    )


def likeness(one: str, other: str) -> int:
    """thefuzz's token_set_ratio, 0 to 100.

    >>> likeness("Rose-Gold", "gold rose (shiny)"), likeness("tea tree", "tee")
    (100, 55)
    """
    return round(fuzz.token_set_ratio(_prepared(one), _prepared(other)))


def reduced_to_colour(value: str | tuple[str, str]) -> str:
    """The first colour word of the list that is in the value (in a pair: is one of its two parts), else the value as text."""
    return next((colour for colour in COLOURS if colour in value), str(value))


def _prepared(text: str) -> str:
    return _NO_WORD.sub(" ", text.translate(_DELETED)).lower().strip()


def _kind(wanted: Product, bought: Product, nouns: NounTest) -> tuple[float, bool, bool, float]:
    """r_type, and the three tests behind it: same query, two shared parts of the category path, share of the title's nouns."""
    query_match = wanted.query == bought.query
    category_match = len(_path(wanted) & _path(bought)) >= 2
    wanted_nouns = nouns(wanted.title)
    shared = set(wanted_nouns) & set(nouns(bought.title))
    title_score = len(shared) / len(wanted_nouns) if wanted_nouns else 0.2
    r_type = 1.0 if query_match or category_match or title_score > 0.2 else 0.5
    if title_score < 0.1:
        r_type = 0.1
    if title_score == 0:
        r_type = 0.0
    return r_type, query_match, category_match, title_score


def _path(product: Product) -> set[str]:
    return {part.strip() for part in product.product_category.split("›")}


def _has_attribute(product: Product, attribute: str) -> bool:
    if any(likeness(own, attribute) > _ALIKE_ABOVE for own in product.attributes):
        return True
    texts = (product.title, " ".join(product.bullets), product.description)
    return any(attribute in text.lower() for text in texts)


def _options_met(goal: Goal, chosen: Mapping[str, str]) -> int:
    values = [reduced_to_colour(value) for value in chosen.values()]
    wanted = [reduced_to_colour(option) for option in goal.options]
    return sum(any(likeness(value, option) > _ALIKE_ABOVE for value in values) for option in wanted)
