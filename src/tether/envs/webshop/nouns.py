"""Which words of a title are nouns: the part of the score that needs to know English, and so can be exchanged.

The original asks spaCy's model en_core_web_sm. `LightNouns`, the default, needs no model: every word counts as a noun unless a rule
below says otherwise. Titles are mostly nouns and names, so the two agree on most words; where they differ the share of common nouns in
two titles differs, and with it, at times, the factor for the kind of product. Which test was used is in the info of every purchase.
"""

import re
from functools import lru_cache
from typing import Any, Literal, Protocol

from tether.core.errors import MissingDependency

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


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_WORD = re.compile(r"[^\W_]+")
_ADJECTIVE_ENDING = re.compile(r".{2}(?:ly|ful|less|able|ible|ous|proof|(?<!e)ed)$")
_NOUNS_DESPITE_ENDING = _words(
    """
    assembly belly butterfly family firefly jelly lily monopoly poly rally reply supply tally trolly armful bagful cupful handful mouthful
    spoonful bible cable crucible syllable table timetable turntable vegetable airbed daybed flatbed seabed shed sled sunbed waterbed
    watershed
    """
)
_NO_NOUNS = _words(
    # articles, prepositions, conjunctions, pronouns and the like
    """
    a about above across after again against all along also among an and any anyone anywhere are around as at away back be because been
    before behind below beneath beside besides between beyond both but by can could do does during each either enough ever every few for
    from further had has have he her here hers him himself his how if in into is it its itself just less many me more most much my near
    neither never no nor not now of off often on only onto or other otherwise our ours out over own per same several she should since so
    some still such than that the their them then there these they this those through to too under until up upon us very via was we were
    what when where which while who whose why will with within without would yet you your yours
    """
    # numerals and prefixes
    """
    one two three four five six seven eight nine ten eleven twelve dozen hundred thousand first second third half double triple single dual
    anti extra mega micro mini multi non pre pro semi super ultra
    """
    # verbs of product titles
    """
    comes compatible featuring fit fits fitting get includes including keep let make replaces use uses using work working works
    """
    # adjectives of product titles
    """
    active adult advanced african american antique anxious artificial asian assorted athletic authentic automatic basic best better big
    bitter botanical bright british busy casual ceramic chewy chic chinese classic clean clear closed cold comfy compact contemporary
    convenient cool cordless cosmetic cozy crazy creamy crispy crunchy cute daily dark deep dental different digital dry eastern easy
    elastic electric electronic elegant empty english ergonomic european external facial fake fancy fast faux female firm flat floral
    fluffy formal free french fresh front full funny furry fuzzy general gentle genuine german global glossy golden good great happy hard
    healthy heavy heavyweight herbal hidden high hot huge ideal indian indoor inner inside internal italian japanese juicy korean large
    left light lightweight little local long loose low lower luxurious magical magnetic main major male manual matte mechanical medical
    medium merry metallic mexican mild mineral minor modern multiple narrow natural new nice nordic northern oily old opaque open organic
    original orthopedic outdoor outdoors outer outside oval perfect plain plastic portable premium pretty professional pure quick raw real
    rear reflective resistant retro rich right ripe rough round royal rustic safe salty savory scary seasonal sensitive sexy sharp sheer
    shiny short silky similar simple sleek slim small smart smooth soft solid sour southern special spicy square stainless stiff stretchy
    strong sturdy stylish suitable sweet synthetic tactical tall tender thermal thick thin tight tiny tough traditional transparent trendy
    true unique unisex universal upper various vegan vintage visible warm western wet wide wireless wooden woolen young
    """
    # colours
    """
    beige black blue brown burgundy colorful gray green grey khaki maroon multicolor navy pink purple red teal turquoise white yellow
    """
)
