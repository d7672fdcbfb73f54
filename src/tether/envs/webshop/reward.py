"""The score of a purchase: the original WebShop's formula, part by part.

    total = r_type * (attributes met + options met + price met) / (attributes asked + options asked + 1)

Attributes and options are compared by thefuzz's token_set_ratio, met above 85. The original pins thefuzz 0.19.0, whose ratio is that of
difflib; later ones, and this module, use rapidfuzz's. The two differ in the score of dissimilar strings but agreed on which side of 85
a pair lies for every pair of attributes and for 48,000 pairs of options of the real 1,000 products. The text is prepared as 0.19.0
does: characters 128 to 255 deleted, what is no letter, digit or underscore made a space, lower-cased; the ratio is rounded.

Kept from the original although it looks odd: for a synthetic goal the original looks for colour words in the pair (name, value), so only a value
that IS a colour word is reduced to it, and compares the pair as Python prints it. A chosen value that merely contains a colour word
("graywash", "standard") is reduced, no longer resembles the goal's, and can never be met.

Which words of a title are nouns is the part of the score that needs to know English, and so can be exchanged. The original asks spaCy's model
en_core_web_sm. `LightNouns`, the default, needs no model: every word counts as a noun unless a rule below says otherwise. Titles are mostly nouns
and names, so the two agree on most words; where they differ the share of common nouns in two titles differs, and with it, at times, the factor
for the kind of product. Which test was used is in the info of every purchase.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

from rapidfuzz import fuzz

from tether.core.errors import MissingDependency
from tether.envs.dataset import read_packaged
from tether.envs.webshop.products import Goal, Product

SPACY_MODEL = "en_core_web_sm"


class NounTest(Protocol):
    """From a title to its nouns in lower case, in order, repeated as often as they occur."""

    @property
    def name(self) -> str:
        """What a record says was used."""

    def __call__(self, title: str) -> list[str]: ...


class LightNouns:
    """Nouns by rules. A word is a run of letters and digits; not a noun is

    - a word of one letter, or one that begins with a digit ("500ml", "4k");
    - a word of the list of articles, prepositions, conjunctions, pronouns, numerals and common verbs;
    - a word of the list of adjectives that are frequent in titles, colours among them;
    - a word ending as adjectives, adverbs and participles do (-ly, -ful, -less, -able, -ible, -ous, -proof, -ed), exceptions listed.
    """

    name = "light"

    def __call__(self, title: str) -> list[str]:
        return [word for word in _WORD.findall(title.lower()) if _is_noun(word)]


class SpacyNouns:
    """Nouns as the original finds them: the words that spaCy tags NOUN or PROPN."""

    def __init__(self) -> None:
        self._tagger = _spacy_tagger()
        self.name = f"spacy {SPACY_MODEL} {self._tagger.meta.get('version', '?')}"

    def __call__(self, title: str) -> list[str]:
        return list(self._nouns(title))

    # Titles recur, and the model takes milliseconds for each.
    @lru_cache(maxsize=20_000)  # noqa: B019 - there is one object per process (`noun_test`), so nothing is kept alive by it
    def _nouns(self, title: str) -> tuple[str, ...]:
        return tuple(token.text.lower() for token in self._tagger(title) if token.pos_ in ("NOUN", "PROPN"))


@lru_cache(maxsize=2)
def noun_test(name: Literal["light", "spacy"]) -> NounTest:
    """The noun test of this name, made once per process."""
    return SpacyNouns() if name == "spacy" else LightNouns()


def _spacy_tagger() -> Any:
    try:
        import spacy
    except ImportError as error:
        raise MissingDependency(
            "webshop: nouns=spacy needs spaCy, which is not installed; run: pip install 'tether-agents[spacy]', or use nouns=light"
        ) from error
    try:
        return spacy.load(SPACY_MODEL)
    except OSError as error:
        raise MissingDependency(
            f"webshop: nouns=spacy needs the model {SPACY_MODEL}, which is not installed; "
            f"run: python -m spacy download {SPACY_MODEL}, or use nouns=light"
        ) from error


def _is_noun(word: str) -> bool:
    if len(word) < 2 or word[0].isdigit() or word in _NO_NOUNS:
        return False
    return word in _NOUNS_DESPITE_ENDING or not _ADJECTIVE_ENDING.search(word)


_WORD = re.compile(r"[^\W_]+")
_ADJECTIVE_ENDING = re.compile(r".{2}(?:ly|ful|less|able|ible|ous|proof|(?<!e)ed)$")
_TITLES = read_packaged(__package__, "titles.toml")
_NOUNS_DESPITE_ENDING = frozenset(_TITLES["nouns_despite_ending"])
_NO_NOUNS = frozenset(word for group in _TITLES["not_nouns"].values() for word in group)


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
    values = [reduced_to_colour(value) for value in chosen.values()]
    wanted = [reduced_to_colour(option) for option in goal.options]
    options_met = sum(any(likeness(value, option) > _ALIKE_ABOVE for value in values) for option in wanted)
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
