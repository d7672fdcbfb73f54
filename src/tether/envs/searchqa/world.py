"""The schema of the relation table, and names for what it holds: entities with facts, and for each kind of entity the sentences and questions about its facts.

A fact is a relation of an entity and its value: a number, a word, or the name of another entity. Articles and questions are both made
from the facts, so they cannot disagree. A kind lists groups of sentences; an article takes one wording of each group, and together the
groups tell every relation. A group whose relations the entity lacks is left out.

The tables are TOML files in `searchqa/data/`, read once when this module is imported.

Names are built from syllables by rule, in several styles, so that names of one people sound alike and no name is used twice. A word is onset +
vowel + middle (+ vowel + middle) + ending, where middles stand between vowels and endings begin with one: whatever is drawn can be pronounced.
People share given names and family names, as people do, but no two have the same full name.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pydantic import TypeAdapter

from tether.envs.dataset import read_packaged

PACKAGE = "tether.envs.searchqa"
"""The package whose `data` folder holds the tables of the world."""
_KIND_FILES = ("land.toml", "people.toml", "works.toml", "deeds.toml")
"""In this order: the order of kinds and comparisons is part of the world."""

FactValue = int | str
"""A year or a measure; else a plain word or the name of another entity."""


@dataclass(frozen=True, slots=True)
class Relation:
    """One thing that is known about a kind of entity."""

    name: str
    asks: tuple[str, ...]
    """Questions for the value, each with {x} for the entity: "Who wrote {x}?"."""
    phrases: tuple[str, ...] = ()
    """What the value may be called instead of by its name, such as "the author of {x}"; only where the value is an entity."""
    inverse: tuple[str, ...] = ()
    """Questions for the entity by its value: "Which book did {v} write?"; asked only where one entity has that value."""
    unit: str = ""
    """Of a measure: "kilometres"."""


@dataclass(frozen=True, slots=True)
class EntityKind:
    """A kind of entity: how it is called, what is known of it, and how an article tells it."""

    name: str
    reference: str
    """How a sentence speaks of it: "the ship {name}"."""
    relations: tuple[Relation, ...]
    groups: tuple[tuple[str, ...], ...]
    """Alternatives for each sentence of an article; slots are {name}, relations, and {he} {He} {his} {His} for people."""
    colour: tuple[str, ...]
    """Sentences that tell no fact of the table."""
    short: str = ""
    """A word that an answer may leave out: "River" of "River Sorel"."""

    def relation(self, name: str) -> Relation:
        return next(relation for relation in self.relations if relation.name == name)


@dataclass(frozen=True, slots=True)
class Comparison:
    """A question over two entities of a kind: which has the greater (or the lesser) value."""

    kind: str
    relation: str
    asks: tuple[str, ...]
    """Questions with {a} and {b}, to be answered with a name."""
    whether: tuple[str, ...]
    """Questions with {a} and {b}, to be answered with yes or no: yes if `a` has it."""
    greater: bool = True
    """The entity with the greater value has it; else the one with the lesser."""


@dataclass(frozen=True, slots=True)
class SameFactQuestion:
    """A yes/no question over two entities of a kind: whether a fact of theirs is the same."""

    kind: str
    relation: str
    asks: tuple[str, ...]


@dataclass(slots=True)
class Entity:
    """Something with an article of its own. Names are unique in the whole world."""

    kind: str
    name: str
    facts: dict[str, FactValue] = field(default_factory=dict)
    woman: bool = False

    def number(self, relation: str) -> int:
        """A fact that is a number."""
        value = self.facts[relation]
        assert isinstance(value, int), (self.name, relation)
        return value

    def text(self, relation: str) -> str:
        """A fact that is a word or a name."""
        value = self.facts[relation]
        assert isinstance(value, str), (self.name, relation)
        return value


def _read(name: str) -> list[Any]:
    """The entries of one name in all files of kinds."""
    return [entry for file in _KIND_FILES for entry in read_packaged(PACKAGE, file).get(name, ())]


KINDS: Mapping[str, EntityKind] = MappingProxyType(
    {kind.name: kind for kind in TypeAdapter(tuple[EntityKind, ...]).validate_python(_read("kinds"))}
)
COMPARISONS = TypeAdapter(tuple[Comparison, ...]).validate_python(_read("comparisons"))
AGREEMENTS = TypeAdapter(tuple[SameFactQuestion, ...]).validate_python(_read("agreements"))


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How the words of one people sound."""

    onsets: tuple[str, ...]
    vowels: tuple[str, ...]
    middles: tuple[str, ...]
    places: tuple[str, ...]
    """Endings of towns and lands."""
    families: tuple[str, ...]
    """Endings of family names."""
    men: tuple[str, ...]
    women: tuple[str, ...]
    things: tuple[str, ...]
    """Endings of rivers, mountains, instruments and beasts."""


_NAMES = read_packaged(PACKAGE, "names.toml")
STYLES = TypeAdapter(tuple[NameStyle, ...]).validate_python(_NAMES["styles"])
UNFIT = tuple(_NAMES["unfit"])
"""Strings of letters that no name may contain."""
WORDS: Mapping[str, tuple[str, ...]] = {name: tuple(words) for name, words in read_packaged(PACKAGE, "words.toml").items()}
"""Plain words by topic: what towns make, what ships are called after, what beasts eat."""

LONGER = 0.2
"""Share of words with one more syllable."""


class Namer:
    """Hands out names, each once."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._taken: set[str] = set()
        pairs = [(adjective, noun) for adjective in WORDS["adjectives"] for noun in WORDS["nouns"]]
        rng.shuffle(pairs)
        self._pairs = iter(pairs)
        self._given = {(style, sex): self._pool(style, sex, 34) for style in STYLES for sex in ("men", "women")}
        self._family = {style: self._pool(style, "families", 110) for style in STYLES}

    def word(self, style: NameStyle, endings: str, form: str = "{}") -> str:
        """A new word of a style, put into a form such as "Lake {}"."""
        while True:
            word = self._spell(style, endings)
            if word.lower() not in self._taken and not any(letters in word.lower() for letters in UNFIT):
                self._taken.add(word.lower())
                return form.format(word)

    def pair(self) -> tuple[str, str]:
        """An adjective and a noun that no other thing is called after."""
        return next(self._pairs)

    def person(self, style: NameStyle, sex: str) -> str:
        """A new full name."""
        while True:
            name = f"{self._rng.choice(self._given[style, sex])} {self._rng.choice(self._family[style])}"
            if name not in self._taken:
                self._taken.add(name)
                return name

    def _pool(self, style: NameStyle, endings: str, size: int) -> list[str]:
        return [self.word(style, endings) for _ in range(size)]

    def _spell(self, style: NameStyle, endings: str) -> str:
        rng = self._rng
        syllables = [rng.choice(style.onsets), rng.choice(style.vowels), rng.choice(style.middles)]
        if rng.random() < LONGER:
            syllables += [rng.choice(style.vowels), rng.choice(style.middles)]
        return "".join(syllables) + rng.choice(getattr(style, endings))
