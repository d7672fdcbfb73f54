"""The second part of the relation table: people, what they made and what they did, every date within the lives it belongs to."""

from collections.abc import Callable
from itertools import pairwise

from tether.envs.searchqa.world.names import WORDS
from tether.envs.searchqa.world.schema import Entity
from tether.envs.searchqa.world.settlement import COMING_OF_AGE, LAST_YEAR, WorldDraft, active_in

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


def record(draft: WorldDraft) -> None:
    """Write people, works and deeds into a draft that has its lands."""
    for occupation, number in PEOPLE.items():
        for _ in range(number):
            _person(draft, occupation)
    for mountain in draft.kinds["mountain"]:
        explorer = draft.pick(_people(draft, "an explorer"))
        mountain.facts |= {"first_climber": explorer.name, "climbed": draft.working_year(explorer)}
    for (kind, wanted), make in _MAKERS.items():
        while len(draft.kinds.get(kind, ())) < wanted:
            make(draft)
    for person in draft.kinds["person"]:
        _upbringing(draft, person)
    _marriages(draft)
    _fame(draft)


def _people(draft: WorldDraft, *occupations: str) -> list[Entity]:
    return [person for person in draft.kinds["person"] if person.facts["occupation"] in occupations]


def _towns(draft: WorldDraft) -> list[Entity]:
    return draft.kinds["town"]


def _person(draft: WorldDraft, occupation: str) -> None:
    birthplace = draft.pick(_towns(draft))
    woman = draft.chance(0.5)
    born = draft.rng.randint(1110, 1425)
    draft.add(
        "person",
        draft.namer.person(draft.style_of(birthplace.name), "women" if woman else "men"),
        {
            "occupation": occupation,
            "born": born,
            "died": min(born + draft.rng.randint(40, 88), LAST_YEAR - 1),
            "birthplace": birthplace.name,
            "deathplace": draft.pick(_towns(draft)).name,
        },
        woman=woman,
    )


def _academy(draft: WorldDraft) -> None:
    founder, town = draft.pick(_people(draft, "a scholar", "a merchant")), draft.pick(_towns(draft))
    form = f"{{}} {draft.pick(WORDS['academy_types'])}"
    draft.add(
        "academy",
        draft.namer.word(draft.style_of(town.name), "things", form),
        {"founder": founder.name, "founded": draft.working_year(founder), "town": town.name, "subject": draft.pick(WORDS["subjects"])},
    )


def _guild(draft: WorldDraft) -> None:
    founder = draft.pick(_people(draft, "a merchant"))
    adjective, noun = draft.namer.pair()
    draft.add(
        "guild",
        f"{adjective} {noun} Guild",
        {
            "founder": founder.name,
            "founded": draft.working_year(founder),
            "seat": draft.pick(_towns(draft)).name,
            "assembly": draft.pick(WORDS["months"]),
        },
    )


def _ship(draft: WorldDraft) -> None:
    builder = draft.pick(draft.kinds["guild"])
    launched = builder.number("founded") + draft.rng.randint(1, 120)
    captain = draft.pick_where(_people(draft, "a ship's captain"), lambda person: active_in(person, launched))
    if captain is None:
        return
    adjective, noun = draft.namer.pair()
    draft.add(
        "ship",
        f"{adjective} {noun}",
        {
            "builder": builder.name,
            "captain": captain.name,
            "launched": launched,
            "home_port": draft.pick(_towns(draft)).name,
            "length": draft.rng.randint(14, 78),
        },
    )


def _building(draft: WorldDraft) -> None:
    architect, town = draft.pick(_people(draft, "an architect")), draft.pick(_towns(draft))
    form = f"{{}} {draft.pick(WORDS['outdoor_types'] + WORDS['indoor_types'])}"
    draft.add(
        "building",
        draft.namer.word(draft.style_of(town.name), "things", form),
        {
            "architect": architect.name,
            "completed": draft.working_year(architect),
            "town": town.name,
            "height": draft.rng.randint(9, 96),
            "stone": draft.pick(WORDS["stones"]),
        },
    )


def _book(draft: WorldDraft) -> None:
    author = draft.pick(_people(draft, "a writer"))
    published = draft.working_year(author)
    adjective, noun = draft.namer.pair()
    book = draft.add(
        "book",
        f"The {adjective} {noun}",
        {
            "author": author.name,
            "published": published,
            "genre": draft.pick(WORDS["genres"]),
            "printed_in": draft.pick(_towns(draft)).name,
        },
    )
    friend = draft.pick_where(draft.kinds["person"], lambda person: person is not author and active_in(person, published))
    if friend is not None and draft.chance(0.5):
        book.facts["dedicated_to"] = friend.name


def _painting(draft: WorldDraft) -> None:
    painter = draft.pick(_people(draft, "a painter"))
    building = draft.pick_where(draft.kinds["building"], lambda building: building.name.endswith(WORDS["indoor_types"]))
    assert building is not None
    adjective, noun = draft.namer.pair()
    draft.add(
        "painting",
        f"{adjective} {noun} {draft.pick(('in Snow', 'at Night', 'at Dawn', 'after Rain', 'by Candlelight'))}",
        {
            "painter": painter.name,
            "painted": draft.working_year(painter),
            "scene": draft.pick(WORDS["scenes"]),
            "hangs_in": building.name,
        },
    )


def _instrument(draft: WorldDraft) -> None:
    inventor, town = draft.pick(_people(draft, "an inventor")), draft.pick(_towns(draft))
    draft.add(
        "instrument",
        draft.namer.word(draft.style_of(town.name), "things"),
        {
            "inventor": inventor.name,
            "invented": draft.working_year(inventor),
            "family": draft.pick(WORDS["families"]),
            "made_in": town.name,
            "material": draft.pick(WORDS["materials"]),
        },
    )


def _composition(draft: WorldDraft) -> None:
    composer = draft.pick(_people(draft, "a composer"))
    performed = draft.working_year(composer)
    instrument = draft.pick_where(draft.kinds["instrument"], lambda instrument: instrument.number("invented") <= performed)
    if instrument is None:
        return
    adjective, noun = draft.namer.pair()
    draft.add(
        "composition",
        f"{draft.pick(('Song', 'Dance', 'March', 'Lament'))} of the {adjective} {noun}",
        {
            "composer": composer.name,
            "performed": performed,
            "performed_in": draft.pick(_towns(draft)).name,
            "instrument": instrument.name,
        },
    )


def _battle(draft: WorldDraft) -> None:
    commander = draft.pick(_people(draft, "a general"))
    fought = draft.working_year(commander)
    victor = draft.named[draft.named[commander.text("birthplace")].text("realm")]
    ruler = next((ruler for ruler in draft.kinds["ruler"] if ruler.facts["realm"] == victor.name and _reigned(ruler, fought)), None)
    loser = draft.pick_where(draft.kinds["realm"], lambda realm: realm is not victor)
    if ruler is None or loser is None:
        return
    near = draft.pick_where(_towns(draft), lambda town: town.facts["realm"] in (victor.name, loser.name))
    assert near is not None
    form = f"Battle of {{}} {draft.pick(WORDS['field_types'])}"
    draft.add(
        "battle",
        draft.namer.word(draft.style_of(near.name), "things", form),
        {
            "commander": commander.name,
            "fought": fought,
            "near": near.name,
            "victor": victor.name,
            "loser": loser.name,
            "reign": ruler.name,
        },
    )


def _reigned(ruler: Entity, year: int) -> bool:
    return ruler.number("crowned") < year < ruler.number("died")


def _festival(draft: WorldDraft) -> None:
    honoured = draft.pick(draft.kinds["person"])
    first_held = honoured.number("died") + draft.rng.randint(1, 60)
    if first_held > LAST_YEAR:
        return
    adjective, noun = draft.namer.pair()
    draft.add(
        "festival",
        f"{draft.pick(('Feast', 'Fair', 'Night', 'Week'))} of the {adjective} {noun}",
        {
            "town": draft.pick(_towns(draft)).name,
            "first_held": first_held,
            "honours": honoured.name,
            "month": draft.pick(WORDS["months"]),
            "dish": draft.pick(WORDS["dishes"]),
        },
    )


def _expedition(draft: WorldDraft) -> None:
    leader = draft.pick(_people(draft, "an explorer"))
    year = draft.working_year(leader)
    ship = draft.pick_where(draft.kinds["ship"], lambda ship: ship.number("launched") < year <= ship.number("launched") + 45)
    if ship is None:
        return
    style = draft.style_of(leader.text("birthplace"))
    draft.add(
        "expedition",
        draft.namer.word(style, "things", "{} Expedition"),
        {"leader": leader.name, "ship": ship.name, "reached": draft.pick(draft.kinds["lake"]).name, "set_out": year},
    )


def _species(draft: WorldDraft) -> None:
    describer, river = draft.pick(_people(draft, "a scholar")), draft.pick(draft.kinds["river"])
    sort = draft.pick(WORDS["sorts"])
    style = draft.styles[river.text("realm")]
    species = draft.add(
        "species",
        draft.namer.word(style, "things", f"{draft.pick(WORDS['adjectives'])} {{}}"),
        {"sort": sort, "describer": describer.name, "described": draft.working_year(describer), "river": river.name},
    )
    if sort in WORDS["plants"]:
        species.facts["flowers"] = draft.pick(WORDS["ripenings"])
    else:
        species.facts["diet"] = draft.pick(WORDS["diets"])


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


def _upbringing(draft: WorldDraft, person: Entity) -> None:
    """A teacher of the same trade and a school, where there are suitable ones."""
    if person.facts["occupation"] not in LEARNED:
        return
    year = person.number("born") + 17
    if draft.chance(0.6):
        peers = _people(draft, person.text("occupation"))
        teacher = draft.pick_where(peers, lambda other: other is not person and active_in(other, year))
        if teacher is not None:
            person.facts["teacher"] = teacher.name
    if draft.chance(0.6):
        academy = draft.pick_where(draft.kinds["academy"], lambda academy: academy.number("founded") <= year)
        if academy is not None:
            person.facts["academy"] = academy.name


def _marriages(draft: WorldDraft) -> None:
    """Couples of about the same age, both of them grown up before either died."""
    by_age = sorted(draft.kinds["person"], key=lambda person: person.number("born"))
    for one, other in pairwise(by_age):
        near = other.number("born") - one.number("born") < COMING_OF_AGE // 2
        if near and one.woman != other.woman and "spouse" not in one.facts and draft.chance(0.5):
            one.facts["spouse"], other.facts["spouse"] = other.name, one.name


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


def _fame(draft: WorldDraft) -> None:
    """Every person who made or did something is known for the first such thing in the table."""
    for kind, relation in _FAME.items():
        for entity in draft.kinds[kind]:
            draft.named[entity.text(relation)].facts.setdefault("famous_for", entity.name)
