"""The relation table in the making (`WorldDraft`), and its first part: lands, waters, towns and their rulers."""

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

from tether.core.seeding import derive_seed
from tether.envs.searchqa.world.names import STYLES, WORDS, Namer, NameStyle
from tether.envs.searchqa.world.schema import Entity, FactValue

T = TypeVar("T")

LAST_YEAR = 1495
"""Nothing in the encyclopedia happened later."""
COMING_OF_AGE = 22


class WorldDraft:
    """A world in the making."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(derive_seed("searchqa world", seed))
        self.namer = Namer(self.rng)
        self.kinds: dict[str, list[Entity]] = {}
        self.styles: dict[str, NameStyle] = {}
        """The style of each realm's names, by its name."""
        self.named: dict[str, Entity] = {}

    def add(self, kind: str, name: str, facts: dict[str, FactValue], *, woman: bool = False) -> Entity:
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

    def style_of(self, town: str) -> NameStyle:
        return self.styles[self.named[town].text("realm")]


def active_in(person: Entity, year: int) -> bool:
    """Whether a person was grown up and alive in a year."""
    return person.number("born") + COMING_OF_AGE <= year < person.number("died")


NUM_REALMS, NUM_MOUNTAINS, NUM_RIVERS, NUM_LAKES, NUM_TOWNS = 14, 112, 154, 60, 520


def settle(draft: WorldDraft) -> None:
    """Write the lands into the draft."""
    for number in range(NUM_REALMS):
        _realm(draft, number)
    realms = draft.kinds["realm"]
    for number in range(NUM_MOUNTAINS):
        _mountain(draft, realms[number % NUM_REALMS])
    for number in range(NUM_RIVERS):
        _river(draft, realms[number % NUM_REALMS])
    for number in range(NUM_LAKES):
        _lake(draft, realms[number % NUM_REALMS])
    for number in range(NUM_TOWNS):
        _town(draft, realms[number % NUM_REALMS])
    for realm in realms:
        largest = max(_within(draft, "town", realm), key=lambda town: town.number("population"))
        realm.facts["capital"] = largest.name
        _dynasty(draft, realm)


def _within(draft: WorldDraft, kind: str, realm: Entity) -> list[Entity]:
    return [entity for entity in draft.kinds[kind] if entity.facts["realm"] == realm.name]


def _realm(draft: WorldDraft, number: int) -> None:
    style = STYLES[number % len(STYLES)]
    name = draft.namer.word(style, "places")
    draft.styles[name] = style
    draft.add(
        "realm",
        name,
        {
            "founded": draft.rng.randint(320, 760),
            "language": draft.namer.word(style, "things"),
            "coin": draft.namer.word(style, "things").lower(),
        },
    )


def _mountain(draft: WorldDraft, realm: Entity) -> None:
    name = draft.namer.word(draft.styles[realm.name], "things", "Mount {}")
    draft.add("mountain", name, {"realm": realm.name, "height": draft.rng.randint(900, 6200)})


def _river(draft: WorldDraft, realm: Entity) -> None:
    name = draft.namer.word(draft.styles[realm.name], "things", "River {}")
    source = draft.pick(_within(draft, "mountain", realm))
    draft.add(
        "river",
        name,
        {"realm": realm.name, "source": source.name, "sea": draft.pick(WORDS["seas"]), "length": draft.rng.randint(40, 1400)},
    )


def _lake(draft: WorldDraft, realm: Entity) -> None:
    name = draft.namer.word(draft.styles[realm.name], "things", "Lake {}")
    feeder = draft.pick(_within(draft, "river", realm))
    draft.add("lake", name, {"realm": realm.name, "feeder": feeder.name, "depth": draft.rng.randint(6, 480)})


def _town(draft: WorldDraft, realm: Entity) -> None:
    town = draft.add(
        "town",
        draft.namer.word(draft.styles[realm.name], "places"),
        {
            "realm": realm.name,
            "founded": draft.rng.randint(300, 1040),
            # Many small towns, few large ones.
            "population": round(1200 * 150 ** draft.rng.random()) // 10 * 10,
            "craft": draft.pick(WORDS["crafts"]),
            "emblem": draft.pick(WORDS["emblems"]),
        },
    )
    if draft.chance(0.7):
        town.facts["river"] = draft.pick(_within(draft, "river", realm)).name


def _dynasty(draft: WorldDraft, realm: Entity) -> None:
    """One ruler after the other: each is crowned in the year the last one died."""
    towns = _within(draft, "town", realm)
    crowned = draft.rng.randint(1060, 1110)
    before: Entity | None = None
    while crowned < LAST_YEAR - 40:
        died = crowned + draft.rng.randint(7, 40)
        born = max(crowned - draft.rng.randint(17, 45), died - 88)
        woman = draft.chance(0.4)
        ruler = draft.add(
            "ruler",
            draft.namer.person(draft.styles[realm.name], "women" if woman else "men"),
            {"realm": realm.name, "crowned": crowned, "born": born, "died": died, "birthplace": draft.pick(towns).name},
            woman=woman,
        )
        if before is None:
            realm.facts["first_ruler"] = ruler.name
        else:
            ruler.facts["predecessor"] = before.name
        before, crowned = ruler, died
