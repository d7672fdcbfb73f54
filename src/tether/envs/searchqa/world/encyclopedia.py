"""The finished world: its entities, and the article of each, written from the relation table.

The world has one seed and is the same in every process; making it takes about a second, once per process.
"""

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from tether.core.seeding import derive_seed
from tether.envs.searchqa.corpus import Document
from tether.envs.searchqa.world import chronicle, settlement
from tether.envs.searchqa.world.names import WORDS
from tether.envs.searchqa.world.schema import KINDS, Entity, FactValue
from tether.envs.searchqa.world.settlement import WorldDraft

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
    settlement.settle(draft)
    chronicle.record(draft)
    entities = tuple(entity for name in KINDS for entity in draft.kinds[name])
    return World(entities, MappingProxyType(draft.named))
