"""The relation table while it is being written: entities by kind, and the draws that its authors share."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from tether.core.seeding import derive_seed
from tether.envs.searchqa.world.names import Namer, Style
from tether.envs.searchqa.world.schema import Entity, Value

T = TypeVar("T")

LAST_YEAR = 1495
"""Nothing in the encyclopedia happened later."""
COMING_OF_AGE = 22


class Draft:
    """A world in the making."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(derive_seed("searchqa world", seed))
        self.namer = Namer(self.rng)
        self.kinds: dict[str, list[Entity]] = {}
        self.styles: dict[str, Style] = {}
        """The style of each realm's names, by its name."""
        self.named: dict[str, Entity] = {}

    def add(self, kind: str, name: str, facts: dict[str, Value], *, woman: bool = False) -> Entity:
        entity = Entity(kind, name, facts, woman)
        assert name not in self.named, name
        self.named[name] = entity
        self.kinds.setdefault(kind, []).append(entity)
        return entity

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def pick_where(self, options: Sequence[T], fits: Callable[[T], bool]) -> T | None:
        """One of the options that fit; None if none does."""
        fitting = [option for option in options if fits(option)]
        return self.rng.choice(fitting) if fitting else None

    def working_year(self, person: Entity) -> int:
        """A year in which a person was grown up and alive."""
        return self.rng.randint(person.number("born") + COMING_OF_AGE, person.number("died") - 1)

    def style_of(self, town: str) -> Style:
        return self.styles[self.named[town].text("realm")]


def active_in(person: Entity, year: int) -> bool:
    """Whether a person was grown up and alive in a year."""
    return person.number("born") + COMING_OF_AGE <= year < person.number("died")
