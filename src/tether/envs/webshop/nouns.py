"""Which words of a title are nouns: the part of the score that needs to know English, and so can be exchanged.

The original asks spaCy's model en_core_web_sm. `LightNouns`, the default, needs no model: every word counts as a noun unless a rule
below says otherwise. Titles are mostly nouns and names, so the two agree on most words; where they differ the share of common nouns in
two titles differs, and with it, at times, the factor for the kind of product. Which test was used is in the info of every purchase.
"""

import re
from functools import lru_cache
from typing import Any, Literal, Protocol

from tether.core.errors import MissingDependency
from tether.envs.dataset import read_packaged

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
