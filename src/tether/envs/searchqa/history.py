"""The relation table in the making: lands, waters, towns and their rulers; then people, what they made and what they did.

Every date lies within the lives it belongs to. The order of the random draws is part of the world: it must not change.
"""

import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

from tether.core.seeding import derive_seed
from tether.envs.searchqa.world import STYLES, WORDS, Entity, FactValue, Namer, NameStyle

T = TypeVar("T")

LAST_YEAR = 1495
"""Nothing in the encyclopedia happened later."""
COMING_OF_AGE = 22
NUM_REALMS, NUM_MOUNTAINS, NUM_RIVERS, NUM_LAKES, NUM_TOWNS = 14, 112, 154, 60, 520
PEOPLE = {
    "a writer": 200,
    "a painter": 80,
    "a composer": 90,
    "a ship's captain": 150,
    "an architect": 110,
    "an inventor": 80,
    "a scholar": 210,
    "a merchant": 170,
    "a general": 90,
    "an explorer": 90,
}
LEARNED = ("a writer", "a painter", "a composer", "an architect", "an inventor", "a scholar")
"""They have teachers and schools."""


class WorldDraft:
    """A world in the making."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(derive_seed("searchqa world", seed))
        self.namer = Namer(self.rng)
        self.kinds: dict[str, list[Entity]] = {}
        self.styles: dict[str, NameStyle] = {}
        """The style of each realm's names, by its name."""
        self.named: dict[str, Entity] = {}

    def add(self, kind: str, name: str, **facts: FactValue) -> Entity:
        entity = Entity(kind, name, facts)
        assert name not in self.named, name
        self.named[name] = entity
        self.kinds.setdefault(kind, []).append(entity)
        return entity

    def pick(self, options: Sequence[T]) -> T:
        return self.rng.choice(options)

    def pick_where(self, options: Sequence[T], fits: Callable[[T], bool]) -> T | None:
        """One of the options that fit; None if none does."""
        fitting = [option for option in options if fits(option)]
        return self.rng.choice(fitting) if fitting else None

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def word(self, topic: str) -> str:
        """A plain word of a topic."""
        return self.rng.choice(WORDS[topic])

    def town(self) -> Entity:
        return self.rng.choice(self.kinds["town"])

    def people(self, *occupations: str) -> list[Entity]:
        return [person for person in self.kinds["person"] if person.facts["occupation"] in occupations]

    def someone(self, *occupations: str) -> Entity:
        return self.rng.choice(self.people(*occupations))

    def within(self, kind: str, realm: Entity) -> list[Entity]:
        return [entity for entity in self.kinds[kind] if entity.facts["realm"] == realm.name]

    def working_year(self, person: Entity) -> int:
        """A year in which a person was grown up and alive."""
        return self.rng.randint(person.number("born") + COMING_OF_AGE, person.number("died") - 1)

    def new_word(self, town: str, form: str = "{}") -> str:
        """A new name of the sort that things have in the realm of a town."""
        return self.namer.word(self.styles[self.named[town].text("realm")], "things", form)

    def new_person(self, realm: str, woman: bool) -> str:
        return self.namer.person(self.styles[realm], "women" if woman else "men")


def active_in(person: Entity, year: int) -> bool:
    """Whether a person was grown up and alive in a year."""
    return person.number("born") + COMING_OF_AGE <= year < person.number("died")


# --- lands, waters, towns, rulers ---


def settle(draft: WorldDraft) -> None:
    """Write the lands into the draft."""
    for number in range(NUM_REALMS):
        style = STYLES[number % len(STYLES)]
        name = draft.namer.word(style, "places")
        draft.styles[name] = style
        founded = draft.rng.randint(320, 760)
        draft.add(
            "realm", name, founded=founded, language=draft.namer.word(style, "things"), coin=draft.namer.word(style, "things").lower()
        )
    realms = draft.kinds["realm"]
    for number in range(NUM_MOUNTAINS):
        realm = realms[number % NUM_REALMS]
        name = draft.namer.word(draft.styles[realm.name], "things", "Mount {}")
        draft.add("mountain", name, realm=realm.name, height=draft.rng.randint(900, 6200))
    for number in range(NUM_RIVERS):
        realm = realms[number % NUM_REALMS]
        name = draft.namer.word(draft.styles[realm.name], "things", "River {}")
        source = draft.pick(draft.within("mountain", realm))
        draft.add("river", name, realm=realm.name, source=source.name, sea=draft.word("seas"), length=draft.rng.randint(40, 1400))
    for number in range(NUM_LAKES):
        realm = realms[number % NUM_REALMS]
        name = draft.namer.word(draft.styles[realm.name], "things", "Lake {}")
        draft.add("lake", name, realm=realm.name, feeder=draft.pick(draft.within("river", realm)).name, depth=draft.rng.randint(6, 480))
    for number in range(NUM_TOWNS):
        _town(draft, realms[number % NUM_REALMS])
    for realm in realms:
        realm.facts["capital"] = max(draft.within("town", realm), key=lambda town: town.number("population")).name
        _dynasty(draft, realm)


def _town(draft: WorldDraft, realm: Entity) -> None:
    town = draft.add(
        "town",
        draft.namer.word(draft.styles[realm.name], "places"),
        realm=realm.name,
        founded=draft.rng.randint(300, 1040),
        population=round(1200 * 150 ** draft.rng.random()) // 10 * 10,  # many small towns, few large ones
        craft=draft.word("crafts"),
        emblem=draft.word("emblems"),
    )
    if draft.chance(0.7):
        town.facts["river"] = draft.pick(draft.within("river", realm)).name


def _dynasty(draft: WorldDraft, realm: Entity) -> None:
    """One ruler after the other: each is crowned in the year the last one died."""
    towns = draft.within("town", realm)
    crowned = draft.rng.randint(1060, 1110)
    before: Entity | None = None
    while crowned < LAST_YEAR - 40:
        died = crowned + draft.rng.randint(7, 40)
        born = max(crowned - draft.rng.randint(17, 45), died - 88)
        woman = draft.chance(0.4)
        name = draft.new_person(realm.name, woman)
        birthplace = draft.pick(towns).name
        ruler = draft.add("ruler", name, realm=realm.name, crowned=crowned, born=born, died=died, birthplace=birthplace)
        ruler.woman = woman
        if before is None:
            realm.facts["first_ruler"] = ruler.name
        else:
            ruler.facts["predecessor"] = before.name
        before, crowned = ruler, died


# --- people, works, deeds ---


def record(draft: WorldDraft) -> None:
    """Write people, works and deeds into a draft that has its lands."""
    for occupation, number in PEOPLE.items():
        for _ in range(number):
            _person(draft, occupation)
    for mountain in draft.kinds["mountain"]:
        explorer = draft.someone("an explorer")
        mountain.facts |= {"first_climber": explorer.name, "climbed": draft.working_year(explorer)}
    for (kind, wanted), make in _MAKERS.items():
        while len(draft.kinds.get(kind, ())) < wanted:
            make(draft)
    for person in draft.kinds["person"]:
        _upbringing(draft, person)
    # Couples of about the same age, both of them grown up before either died.
    by_age = sorted(draft.kinds["person"], key=lambda person: person.number("born"))
    for one, other in pairwise(by_age):
        near = other.number("born") - one.number("born") < COMING_OF_AGE // 2
        if near and one.woman != other.woman and "spouse" not in one.facts and draft.chance(0.5):
            one.facts["spouse"], other.facts["spouse"] = other.name, one.name
    # Every person who made or did something is known for the first such thing in the table.
    for kind, relation in _FAME.items():
        for entity in draft.kinds[kind]:
            draft.named[entity.text(relation)].facts.setdefault("famous_for", entity.name)


def _person(draft: WorldDraft, occupation: str) -> None:
    birthplace = draft.town()
    woman = draft.chance(0.5)
    born = draft.rng.randint(1110, 1425)
    name = draft.new_person(birthplace.text("realm"), woman)
    died = min(born + draft.rng.randint(40, 88), LAST_YEAR - 1)
    places = {"birthplace": birthplace.name, "deathplace": draft.town().name}
    draft.add("person", name, occupation=occupation, born=born, died=died, **places).woman = woman


def _upbringing(draft: WorldDraft, person: Entity) -> None:
    """A teacher of the same trade and a school, where there are suitable ones."""
    if person.facts["occupation"] not in LEARNED:
        return
    year = person.number("born") + 17
    if draft.chance(0.6):
        peers = draft.people(person.text("occupation"))
        teacher = draft.pick_where(peers, lambda other: other is not person and active_in(other, year))
        if teacher is not None:
            person.facts["teacher"] = teacher.name
    if draft.chance(0.6):
        academy = draft.pick_where(draft.kinds["academy"], lambda academy: academy.number("founded") <= year)
        if academy is not None:
            person.facts["academy"] = academy.name


def _academy(draft: WorldDraft) -> None:
    founder, town = draft.someone("a scholar", "a merchant"), draft.town()
    name = draft.new_word(town.name, f"{{}} {draft.word('academy_types')}")
    founded = draft.working_year(founder)
    draft.add("academy", name, founder=founder.name, founded=founded, town=town.name, subject=draft.word("subjects"))


def _guild(draft: WorldDraft) -> None:
    founder = draft.someone("a merchant")
    name = "{} {} Guild".format(*draft.namer.pair())
    founded = draft.working_year(founder)
    draft.add("guild", name, founder=founder.name, founded=founded, seat=draft.town().name, assembly=draft.word("months"))


def _ship(draft: WorldDraft) -> None:
    builder = draft.pick(draft.kinds["guild"])
    launched = builder.number("founded") + draft.rng.randint(1, 120)
    captain = draft.pick_where(draft.people("a ship's captain"), lambda person: active_in(person, launched))
    if captain is None:
        return
    made: dict[str, FactValue] = {"builder": builder.name, "captain": captain.name, "launched": launched}
    draft.add("ship", " ".join(draft.namer.pair()), **made, home_port=draft.town().name, length=draft.rng.randint(14, 78))


def _building(draft: WorldDraft) -> None:
    architect, town = draft.someone("an architect"), draft.town()
    name = draft.new_word(town.name, f"{{}} {draft.pick(WORDS['outdoor_types'] + WORDS['indoor_types'])}")
    made: dict[str, FactValue] = {"architect": architect.name, "completed": draft.working_year(architect), "town": town.name}
    draft.add("building", name, **made, height=draft.rng.randint(9, 96), stone=draft.word("stones"))


def _book(draft: WorldDraft) -> None:
    author = draft.someone("a writer")
    published = draft.working_year(author)
    name = "The {} {}".format(*draft.namer.pair())
    book = draft.add("book", name, author=author.name, published=published, genre=draft.word("genres"), printed_in=draft.town().name)
    friend = draft.pick_where(draft.kinds["person"], lambda person: person is not author and active_in(person, published))
    if friend is not None and draft.chance(0.5):
        book.facts["dedicated_to"] = friend.name


def _painting(draft: WorldDraft) -> None:
    painter = draft.someone("a painter")
    building = draft.pick_where(draft.kinds["building"], lambda building: building.name.endswith(WORDS["indoor_types"]))
    assert building is not None
    name = "{} {} {}".format(*draft.namer.pair(), draft.pick(("in Snow", "at Night", "at Dawn", "after Rain", "by Candlelight")))
    painted = draft.working_year(painter)
    draft.add("painting", name, painter=painter.name, painted=painted, scene=draft.word("scenes"), hangs_in=building.name)


def _instrument(draft: WorldDraft) -> None:
    inventor, town = draft.someone("an inventor"), draft.town()
    name = draft.new_word(town.name)
    made: dict[str, FactValue] = {
        "inventor": inventor.name,
        "invented": draft.working_year(inventor),
        "family": draft.word("families"),
        "made_in": town.name,
    }
    draft.add("instrument", name, **made, material=draft.word("materials"))


def _composition(draft: WorldDraft) -> None:
    composer = draft.someone("a composer")
    performed = draft.working_year(composer)
    instrument = draft.pick_where(draft.kinds["instrument"], lambda instrument: instrument.number("invented") <= performed)
    if instrument is None:
        return
    pair = draft.namer.pair()
    name = "{} of the {} {}".format(draft.pick(("Song", "Dance", "March", "Lament")), *pair)
    made: dict[str, FactValue] = {"composer": composer.name, "performed": performed, "performed_in": draft.town().name}
    draft.add("composition", name, **made, instrument=instrument.name)


def _battle(draft: WorldDraft) -> None:
    commander = draft.someone("a general")
    fought = draft.working_year(commander)
    victor = draft.named[draft.named[commander.text("birthplace")].text("realm")]
    rulers = draft.within("ruler", victor)
    ruler = next((ruler for ruler in rulers if ruler.number("crowned") < fought < ruler.number("died")), None)
    loser = draft.pick_where(draft.kinds["realm"], lambda realm: realm is not victor)
    if ruler is None or loser is None:
        return
    near = draft.pick_where(draft.kinds["town"], lambda town: town.facts["realm"] in (victor.name, loser.name))
    assert near is not None
    name = draft.new_word(near.name, f"Battle of {{}} {draft.word('field_types')}")
    sides = {"victor": victor.name, "loser": loser.name, "reign": ruler.name}
    draft.add("battle", name, commander=commander.name, fought=fought, near=near.name, **sides)


def _festival(draft: WorldDraft) -> None:
    honoured = draft.pick(draft.kinds["person"])
    first_held = honoured.number("died") + draft.rng.randint(1, 60)
    if first_held > LAST_YEAR:
        return
    pair = draft.namer.pair()
    name = "{} of the {} {}".format(draft.pick(("Feast", "Fair", "Night", "Week")), *pair)
    held: dict[str, FactValue] = {"town": draft.town().name, "first_held": first_held, "honours": honoured.name}
    draft.add("festival", name, **held, month=draft.word("months"), dish=draft.word("dishes"))


def _expedition(draft: WorldDraft) -> None:
    leader = draft.someone("an explorer")
    year = draft.working_year(leader)
    ship = draft.pick_where(draft.kinds["ship"], lambda ship: ship.number("launched") < year <= ship.number("launched") + 45)
    if ship is None:
        return
    name = draft.new_word(leader.text("birthplace"), "{} Expedition")
    draft.add("expedition", name, leader=leader.name, ship=ship.name, reached=draft.pick(draft.kinds["lake"]).name, set_out=year)


def _species(draft: WorldDraft) -> None:
    describer, river = draft.someone("a scholar"), draft.pick(draft.kinds["river"])
    sort = draft.word("sorts")
    name = draft.namer.word(draft.styles[river.text("realm")], "things", f"{draft.word('adjectives')} {{}}")
    described = draft.working_year(describer)
    species = draft.add("species", name, sort=sort, describer=describer.name, described=described, river=river.name)
    if sort in WORDS["plants"]:
        species.facts["flowers"] = draft.word("ripenings")
    else:
        species.facts["diet"] = draft.word("diets")


_MAKERS: dict[tuple[str, int], Callable[[WorldDraft], None]] = {
    # In this order: ships need guilds, paintings buildings, compositions instruments, expeditions ships.
    ("academy", 90): _academy,
    ("guild", 170): _guild,
    ("ship", 240): _ship,
    ("building", 240): _building,
    ("book", 420): _book,
    ("painting", 150): _painting,
    ("instrument", 110): _instrument,
    ("composition", 180): _composition,
    ("battle", 140): _battle,
    ("festival", 150): _festival,
    ("expedition", 90): _expedition,
    ("species", 260): _species,
}

_FAME = {
    "book": "author",
    "painting": "painter",
    "composition": "composer",
    "ship": "captain",
    "building": "architect",
    "instrument": "inventor",
    "species": "describer",
    "guild": "founder",
    "battle": "commander",
    "expedition": "leader",
}
"""Which relation of which kind makes a person known."""
