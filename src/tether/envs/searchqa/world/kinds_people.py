"""How the encyclopedia speaks of people and of rulers."""

from tether.envs.searchqa.world.schema import Agreement, Comparison, Kind, Relation

_BORN = Relation("born", ("In which year was {x} born?", "When was {x} born?"))
_DIED = Relation("died", ("In which year did {x} die?", "When did {x} die?"))
_BIRTHPLACE = Relation(
    "birthplace", ("Where was {x} born?", "In which town was {x} born?"), ("the birthplace of {x}", "the town where {x} was born")
)

PERSON = Kind(
    name="person",
    reference="{name}",
    relations=(
        Relation("occupation", ("What did {x} do for a living?", "What was the occupation of {x}?")),
        _BORN,
        _DIED,
        _BIRTHPLACE,
        Relation("deathplace", ("Where did {x} die?", "In which town did {x} die?"), ("the town where {x} died",)),
        Relation("teacher", ("Who was the teacher of {x}?", "Who taught {x}?"), ("the teacher of {x}",), ("Who was a pupil of {v}?",)),
        Relation(
            "academy",
            ("Where did {x} study?", "At which school did {x} study?"),
            ("the school where {x} studied",),
            ("Who studied at {v}?",),
        ),
        Relation("spouse", ("To whom was {x} married?", "Who was the spouse of {x}?"), ("the spouse of {x}",)),
        Relation("famous_for", ("For what is {x} best remembered?", "What is {x} best remembered for?")),
    ),
    groups=(
        (
            "{name} was {occupation}, born in {birthplace} in the year {born}.",
            "Born at {birthplace} in {born}, {name} was {occupation}.",
            "{name}, {occupation}, was born in {born} in the town of {birthplace}.",
        ),
        (
            "In youth {he} was a pupil of {teacher}.",
            "{His} teacher was {teacher}, with whom {he} later quarrelled.",
            "{He} learned the craft from {teacher}.",
        ),
        (
            "{He} studied at the {academy} for several years.",
            "{He} was a student of the {academy}.",
            "After a false start in trade {he} went to study at the {academy}.",
        ),
        (
            "{He} was married to {spouse}.",
            "{His} marriage to {spouse} was a happy one.",
            "Some of {his} letters to {spouse}, whom {he} married, survive.",
        ),
        (
            "{He} is best remembered for {famous_for}.",
            "{His} name lives on chiefly because of {famous_for}.",
            "What {he} is best remembered for today is {famous_for}.",
        ),
        (
            "{He} died at {deathplace} in {died}.",
            "In {died} {he} died in the town of {deathplace}.",
            "{His} death came in {died}, at {deathplace}.",
        ),
    ),
    colour=(
        "Letters kept by the family speak of a quiet and stubborn temper.",
        "Two portraits survive, and neither of them is signed.",
        "{He} kept bees all {his} life and wrote about them to everyone.",
        "A lawsuit over an inheritance took up eleven years of {his} life.",
        "Late in life {he} lost the sight of one eye.",
        "{He} travelled widely and hardly ever wrote home.",
        "Early biographers confuse {him} with a cousin of the same age.",
        "A street and two inns are named after {him}.",
        "Contemporaries describe a small person with a very loud voice.",
        "{He} owned a large library, which was sold to pay debts.",
        "{His} notebooks were found in a {season} flood and are hard to read.",
        "{He} refused every public honour that {he} was offered.",
        "It is said that {he} could recite the whole calendar of saints backwards.",
        "An illness in childhood left {him} with a limp.",
    ),
)

RULER = Kind(
    name="ruler",
    reference="{name}",
    relations=(
        Relation("realm", ("Which realm did {x} rule?", "Over which realm did {x} rule?"), ("the realm ruled by {x}",)),
        Relation("crowned", ("In which year did {x} come to the throne?", "When was {x} crowned?")),
        _BORN,
        _DIED,
        _BIRTHPLACE,
        Relation(
            "predecessor",
            ("After whom did {x} come to the throne?", "Who ruled before {x}?"),
            ("the predecessor of {x}",),
            ("Who came to the throne after {v}?",),
        ),
    ),
    groups=(
        (
            "{name} ruled {realm} from {crowned} until {his} death in {died}.",
            "Crowned in {crowned}, {name} ruled {realm} and died in {died}.",
            "From {crowned} to {died}, the year of {his} death, {name} was ruler of {realm}.",
        ),
        (
            "{He} was born in {born} at {birthplace}.",
            "{His} birthplace was {birthplace}, where {he} was born in {born}.",
            "The chronicles give {born} as the year of {his} birth and {birthplace} as the place.",
        ),
        (
            "{He} came to the throne after {predecessor}.",
            "{His} predecessor on the throne was {predecessor}.",
            "{predecessor} had ruled before {him}.",
        ),
    ),
    colour=(
        "{His} reign is remembered for low taxes and bad roads.",
        "A plot of the court physicians was discovered in time.",
        "{He} is said to have read every petition {himself}.",
        "The coins of {his} reign are rare and badly struck.",
        "Foreign envoys complained about the length of the banquets.",
        "{He} had the old law code copied and sent to every town.",
        "Most of {his} reign was spent in the saddle.",
        "A famine in the middle years led to riots in the ports.",
        "{His} tomb was opened once and found to be empty.",
        "The court poets of the time are better known than the court.",
    ),
)

KINDS = (PERSON, RULER)

COMPARISONS = (
    Comparison("person", "born", ("Who was born earlier, {a} or {b}?",), ("Was {a} born before {b}?",), greater=False),
    Comparison("person", "died", ("Who died later, {a} or {b}?",), ("Did {a} die after {b}?",)),
    Comparison("ruler", "crowned", ("Who came to the throne earlier, {a} or {b}?",), ("Was {a} crowned before {b}?",), greater=False),
)

AGREEMENTS = (
    Agreement("person", "birthplace", ("Were {a} and {b} born in the same town?",)),
    Agreement("person", "academy", ("Did {a} and {b} study at the same school?",)),
    Agreement("person", "teacher", ("Did {a} and {b} have the same teacher?",)),
    Agreement("ruler", "realm", ("Did {a} and {b} rule the same realm?",)),
)
