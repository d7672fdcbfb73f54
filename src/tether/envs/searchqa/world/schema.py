"""The words of the relation table: entities with facts, and per kind of entity how its facts are told and asked for.

A fact is a relation of an entity and its value: a number, a word, or the name of another entity. Articles and questions are both made
from the facts, so they cannot disagree. A kind lists groups of sentences; an article takes one wording of each group, and together the
groups tell every relation. A group whose relations the entity lacks is left out.
"""

from dataclasses import dataclass, field

Value = int | str
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
class Kind:
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
class Agreement:
    """A yes/no question over two entities of a kind: whether a fact of theirs is the same."""

    kind: str
    relation: str
    asks: tuple[str, ...]


@dataclass(slots=True)
class Entity:
    """Something with an article of its own. Names are unique in the whole world."""

    kind: str
    name: str
    facts: dict[str, Value] = field(default_factory=dict)
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
