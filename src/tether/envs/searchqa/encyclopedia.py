"""The finished world: its entities, the article of each, and questions, all written from the relation table.

The world has one seed and is the same in every process; making it takes about a second, once per process.

Each question has exactly one answer, and the answer stands in an article. A question is a path through the table (one fact; a fact of an entity
that another fact names; two entities compared), and each path is worded one way only, so a question of the test split is never a rewording of one
trained on. A question that names its own answer, or the entity in the middle of its path, is not asked.
"""

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType

from tether.core.enums import Split
from tether.core.seeding import derive_seed
from tether.envs.searchqa.corpus import ENV, Document, Question
from tether.envs.searchqa.history import WorldDraft, record, settle
from tether.envs.searchqa.world import AGREEMENTS, COMPARISONS, KINDS, WORDS, Comparison, Entity, FactValue, Relation
from tether.envs.splits import draw

WORLD_SEED = 1
MIN_WORDS = 45
"""Sentences of colour are added until an article is at least this long."""


_SLOT = re.compile(r"\{(\w+)\}")


@dataclass(frozen=True)
class World:
    """Every entity, in a fixed order, and by name."""

    entities: tuple[Entity, ...]
    named: Mapping[str, Entity]

    def value_text(self, value: FactValue) -> str:
        """A value as sentences show it; numbers above 9,999 with separators, years and the like plain."""
        return value if isinstance(value, str) else f"{value:,}" if value > 9999 else str(value)

    def reference(self, name: str) -> str:
        """How a sentence speaks of an entity: "the ship Grey Heron"."""
        return KINDS[self.named[name].kind].reference.format(name=name)

    def documents(self) -> list[Document]:
        """The article of every entity."""
        return [Document(str(number), entity.name, self._article(entity)) for number, entity in enumerate(self.entities)]

    def _article(self, entity: Entity) -> str:
        kind = KINDS[entity.kind]
        rng = random.Random(derive_seed("searchqa article", entity.name))
        slots = self._slots(entity) | {"season": rng.choice(WORDS["seasons"])}
        sentences = [rng.choice(group).format_map(slots) for group in kind.groups if _told(group) <= slots.keys()]
        colour = rng.sample(kind.colour, len(kind.colour))
        enough = MIN_WORDS + rng.randrange(30)
        while colour and sum(len(sentence.split()) for sentence in sentences) < enough:
            place = rng.randint(1, len(sentences))  # never before the sentence that says what it is
            sentences.insert(place, colour.pop().format_map(slots))
        return " ".join(sentence[0].upper() + sentence[1:] for sentence in sentences)

    def _slots(self, entity: Entity) -> dict[str, str]:
        he, his, him = ("she", "her", "her") if entity.woman else ("he", "his", "him")
        slots = {relation: self.value_text(value) for relation, value in entity.facts.items()}
        if "famous_for" in entity.facts:
            slots["famous_for"] = self.reference(entity.text("famous_for"))
        return slots | {
            "name": entity.name,
            "he": he,
            "He": he.capitalize(),
            "his": his,
            "His": his.capitalize(),
            "him": him,
            "himself": f"{him}self",
        }


def _told(group: tuple[str, ...]) -> set[str]:
    """The slots a group of sentences needs."""
    return {slot for sentence in group for slot in _SLOT.findall(sentence)}


@lru_cache(maxsize=1)
def the_world() -> World:
    """The one world of the offline default."""
    draft = WorldDraft(WORLD_SEED)
    settle(draft)
    record(draft)
    entities = tuple(entity for name in KINDS for entity in draft.kinds[name])
    return World(entities, MappingProxyType(draft.named))


SHARES = {"fact": 0.30, "inverse": 0.10, "bridge": 0.42, "comparison": 0.10, "yes_no": 0.08}
"""How often each kind of question is drawn. What can be guessed (one of two, yes or no) is kept rare."""

SHORT_UNITS = {"kilometres": "km", "metres": "m"}


@dataclass(frozen=True)
class WorldQuestions:
    """A generator of questions: by seed and split."""

    world: World

    def __call__(self, seed: int, split: Split) -> Question:
        return draw(ENV, seed, split, self._propose)

    def _propose(self, rng: random.Random) -> Question | None:
        kind = rng.choices(list(SHARES), list(SHARES.values()))[0]
        if kind == "fact":
            return self.fact(*rng.choice(self.facts))
        if kind == "inverse":
            return self.inverse(*rng.choice(self.inverses))
        if kind == "bridge":
            return self.bridge(*rng.choice(self.bridges))
        return self._comparison(rng) if kind == "comparison" else self._yes_no(rng)

    # --- the paths ---

    @cached_property
    def facts(self) -> Sequence[tuple[Entity, Relation]]:
        """Every entity with each relation it has."""
        return [
            (entity, relation)
            for entity in self.world.entities
            for relation in KINDS[entity.kind].relations
            if relation.name in entity.facts
        ]

    @cached_property
    def inverses(self) -> Sequence[tuple[Relation, Entity]]:
        """Relations and the one entity that has its value."""
        having: dict[tuple[str, str, FactValue], list[tuple[Relation, Entity]]] = {}
        for entity, relation in self.facts:
            if relation.inverse:
                having.setdefault((entity.kind, relation.name, entity.facts[relation.name]), []).append((relation, entity))
        return [pairs[0] for pairs in having.values() if len(pairs) == 1]

    @cached_property
    def bridges(self) -> Sequence[tuple[Entity, Relation, Relation]]:
        """An entity, a relation that leads to another, and a relation of that one."""
        return [
            (entity, first, second)
            for entity, first in self.facts
            if first.phrases
            for second in KINDS[self._target(entity, first).kind].relations
            if second.name in self._target(entity, first).facts
        ]

    @cached_property
    def _by_kind(self) -> Mapping[str, Sequence[Entity]]:
        return {kind: [entity for entity in self.world.entities if entity.kind == kind] for kind in KINDS}

    @cached_property
    def _by_value(self) -> Mapping[tuple[str, str], Sequence[Sequence[Entity]]]:
        """For every agreement the groups of two or more entities that agree."""
        groups: dict[tuple[str, str], list[list[Entity]]] = {}
        for agreement in AGREEMENTS:
            having: dict[FactValue, list[Entity]] = {}
            for entity in self._by_kind[agreement.kind]:
                if agreement.relation in entity.facts:
                    having.setdefault(entity.facts[agreement.relation], []).append(entity)
            groups[agreement.kind, agreement.relation] = [group for group in having.values() if len(group) > 1]
        return groups

    def _target(self, entity: Entity, relation: Relation) -> Entity:
        return self.world.named[entity.text(relation.name)]

    # --- their wording ---

    def fact(self, entity: Entity, relation: Relation) -> Question | None:
        """ "Who wrote the book X?" """
        text = _worded(relation.asks, entity.name, relation.name).format(x=self.world.reference(entity.name))
        return self._asked("one_hop", text, self._answers(entity, relation), [entity.name])

    def inverse(self, relation: Relation, entity: Entity) -> Question | None:
        """ "Which book did X write?" """
        value = entity.text(relation.name)
        text = _worded(relation.inverse, value, relation.name, entity.kind).format(v=self.world.reference(value))
        return self._asked("one_hop", text, self._names(entity.name), [entity.name])

    def bridge(self, entity: Entity, first: Relation, second: Relation) -> Question | None:
        """ "Where was the author of the book X born?" """
        middle = self._target(entity, first)
        phrase = _worded(first.phrases, entity.name, first.name, second.name).format(x=self.world.reference(entity.name))
        text = _worded(second.asks, entity.name, second.name, first.name).format(x=phrase)
        if any(name in text for name in self._names(middle.name)):
            return None
        return self._asked("bridge", text, self._answers(middle, second), [entity.name, middle.name])

    def _comparison(self, rng: random.Random) -> Question | None:
        """ "Which river is longer, A or B?" """
        comparison = rng.choice(COMPARISONS)
        a, b = self._pair(rng, comparison)
        if a is b or a.facts[comparison.relation] == b.facts[comparison.relation]:
            return None
        text = self._over(comparison.asks, a, b, comparison.relation)
        winner = a if _has_it(comparison, a, b) else b
        return Question(text, self._names(winner.name), (a.name, b.name), "comparison")

    def _yes_no(self, rng: random.Random) -> Question | None:
        """ "Is A longer than B?", "Were A and B born in the same town?" """
        if rng.random() < 0.5:
            comparison = rng.choice(COMPARISONS)
            a, b = self._pair(rng, comparison)
            if a is b or a.facts[comparison.relation] == b.facts[comparison.relation]:
                return None
            text, yes = self._over(comparison.whether, a, b, comparison.relation), _has_it(comparison, a, b)
        else:
            agreement = rng.choice(AGREEMENTS)
            group = rng.choice(self._by_value[agreement.kind, agreement.relation])
            a = rng.choice(group)
            b = rng.choice(group if rng.random() < 0.5 else self._by_kind[agreement.kind])
            if a is b or agreement.relation not in b.facts:
                return None
            a, b = in_order(a, b, agreement.relation)
            text, yes = self._over(agreement.asks, a, b, agreement.relation), a.facts[agreement.relation] == b.facts[agreement.relation]
        return Question(text, ("yes" if yes else "no",), (a.name, b.name), "yes_no")

    def _pair(self, rng: random.Random, comparison: Comparison) -> tuple[Entity, Entity]:
        """Two of a kind, in an order that does not depend on the draw: A or B is never also asked as B or A."""
        entities = self._by_kind[comparison.kind]
        return in_order(rng.choice(entities), rng.choice(entities), comparison.relation)

    def _over(self, wordings: Sequence[str], a: Entity, b: Entity, relation: str) -> str:
        return _worded(wordings, a.name, b.name, relation).format(a=self.world.reference(a.name), b=self.world.reference(b.name))

    # --- answers ---

    def _asked(self, kind: str, text: str, answers: tuple[str, ...], gold: Iterable[str]) -> Question | None:
        return None if any(answer in text for answer in answers) else Question(text, answers, tuple(gold), kind)

    def _answers(self, entity: Entity, relation: Relation) -> tuple[str, ...]:
        """The value of a fact, and other ways to write it."""
        value = entity.facts[relation.name]
        text = self.world.value_text(value)
        if relation.unit:
            return f"{text} {relation.unit}", f"{text} {SHORT_UNITS[relation.unit]}", text
        return self._names(text) if text in self.world.named else (text,)

    def _names(self, name: str) -> tuple[str, ...]:
        """A name; without the word that tells its kind ("River Sorel", "Sorel"); and as a sentence speaks of it ("the ship Grey Heron")."""
        short = KINDS[self.world.named[name].kind].short
        bare = name.removeprefix(f"{short} ").removesuffix(f" {short}") if short else name
        return tuple(dict.fromkeys((name, bare, self.world.reference(name))))


def _worded(wordings: Sequence[str], *path: str) -> str:
    """One wording, always the same for a path."""
    return wordings[derive_seed("searchqa wording", *path) % len(wordings)]


def in_order(a: Entity, b: Entity, relation: str) -> tuple[Entity, Entity]:
    first, second = sorted((a, b), key=lambda entity: entity.name)
    return (first, second) if derive_seed("searchqa order", first.name, second.name, relation) % 2 else (second, first)


def _has_it(comparison: Comparison, a: Entity, b: Entity) -> bool:
    greater = a.number(comparison.relation) > b.number(comparison.relation)
    return greater is comparison.greater


@lru_cache(maxsize=1)
def world_questions() -> WorldQuestions:
    """Questions about the one world; shared, since its paths take a moment to list."""
    return WorldQuestions(the_world())
