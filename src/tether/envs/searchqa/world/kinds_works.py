"""How the encyclopedia speaks of things people made: books, paintings, compositions, instruments, ships and buildings."""

from tether.envs.searchqa.world.schema import Agreement, Comparison, Kind, Relation

BOOK = Kind(
    name="book",
    reference='the book "{name}"',
    relations=(
        Relation("author", ("Who wrote {x}?", "Who is the author of {x}?"), ("the author of {x}",), ("Which book did {v} write?",)),
        Relation("published", ("In which year was {x} published?", "When was {x} first published?")),
        Relation("genre", ("What sort of work is {x}?",)),
        Relation(
            "printed_in", ("In which town was {x} first printed?", "Where was {x} first printed?"), ("the town that first printed {x}",)
        ),
        Relation(
            "dedicated_to", ("To whom is {x} dedicated?",), ("the person to whom {x} is dedicated",), ("Which book is dedicated to {v}?",)
        ),
    ),
    groups=(
        (
            "{name} is {genre} by {author}, first published in {published}.",
            "First published in {published}, {name} is {genre} written by {author}.",
            "{name} is {genre}; it was written by {author} and published in {published}.",
        ),
        (
            "It was first printed in {printed_in}.",
            "The first edition came from a press in {printed_in}.",
            "A press in {printed_in} printed the first edition.",
        ),
        (
            "The book is dedicated to {dedicated_to}.",
            "Its dedication names {dedicated_to}.",
            "A short preface dedicates it to {dedicated_to}.",
        ),
    ),
    colour=(
        "Only a few hundred copies were sold in the first year.",
        "A pirated edition with many errors appeared before the second printing.",
        "The censors removed one chapter, which has never been found.",
        "It has been translated many times and rarely well.",
        "School children still learn its opening page by heart.",
        "Critics of the time disliked its plain style.",
        "The manuscript is written on the backs of old bills.",
        "Its last chapter was added in a later edition.",
        "A copy with notes in the margins is kept under lock and key.",
        "Several phrases from it have become proverbs.",
    ),
)

PAINTING = Kind(
    name="painting",
    reference='the painting "{name}"',
    relations=(
        Relation("painter", ("Who painted {x}?", "Who is the painter of {x}?"), ("the painter of {x}",), ("Which painting is by {v}?",)),
        Relation("painted", ("In which year was {x} painted?", "When was {x} painted?")),
        Relation("scene", ("What does {x} show?", "What can be seen in {x}?")),
        Relation(
            "hangs_in",
            ("In which building does {x} hang?", "Where does {x} hang?"),
            ("the building where {x} hangs",),
            ("Which painting hangs in {v}?",),
        ),
    ),
    groups=(
        (
            "{name} is a painting by {painter}, finished in {painted}.",
            "{painter} painted {name} in the year {painted}.",
            "Painted in {painted}, {name} is a work of {painter}.",
        ),
        (
            "It shows {scene}.",
            "The picture shows {scene}, in muted colours.",
            "Its subject is {scene}.",
        ),
        (
            "It hangs in the {hangs_in}.",
            "Today it can be seen in the {hangs_in}, where it hangs near the entrance.",
            "For many years it has been kept in the {hangs_in}.",
        ),
    ),
    colour=(
        "The frame is older than the picture.",
        "A cleaning revealed a second figure that had been painted over.",
        "It was stolen once and returned by post.",
        "Copies of it were popular as wedding presents.",
        "The varnish has darkened, and some details are lost.",
        "It was paid for in barrels of wine.",
        "Scholars argue about the meaning of the small dog in the corner.",
        "The first owner thought it too large and had it cut down.",
        "An early sketch for it is drawn on a page of accounts.",
    ),
)

COMPOSITION = Kind(
    name="composition",
    reference='the composition "{name}"',
    relations=(
        Relation(
            "composer", ("Who composed {x}?", "Who is the composer of {x}?"), ("the composer of {x}",), ("Which composition is by {v}?",)
        ),
        Relation("performed", ("In which year was {x} first performed?", "When was {x} first performed?")),
        Relation("performed_in", ("In which town was {x} first performed?",), ("the town of the first performance of {x}",)),
        Relation("instrument", ("For which instrument was {x} written?",), ("the instrument for which {x} was written",)),
    ),
    groups=(
        (
            "{name} is a composition by {composer}, written for the {instrument}.",
            "{composer} wrote {name} for the {instrument}.",
            "Written for the {instrument}, {name} is a composition by {composer}.",
        ),
        (
            "It was first performed in {performed_in} in the year {performed}.",
            "The first performance took place in {performed} at {performed_in}.",
            "In {performed} it was performed for the first time, in the town of {performed_in}.",
        ),
    ),
    colour=(
        "The slow middle part is often played at funerals.",
        "The first audience is said to have left before the end.",
        "Only the parts survive, and the full score has been lost.",
        "It lasts a little under half an hour.",
        "A popular dance tune was later made out of its opening.",
        "The final pages are famously hard to play.",
        "It was revised twice, each time making it shorter.",
        "Street singers soon put their own words to it.",
        "For a century it was believed to be the work of another hand.",
    ),
)

INSTRUMENT = Kind(
    name="instrument",
    reference="the {name}",
    relations=(
        Relation(
            "inventor",
            ("Who invented {x}?", "Who is the inventor of {x}?"),
            ("the inventor of {x}",),
            ("Which instrument did {v} invent?",),
        ),
        Relation("invented", ("In which year was {x} invented?", "When was {x} invented?")),
        Relation("family", ("What sort of instrument is {x}?",)),
        Relation("made_in", ("In which town was {x} first made?",), ("the town of origin of {x}",)),
        Relation("material", ("What is {x} mostly made of?", "Which material is {x} mostly made of?")),
    ),
    groups=(
        (
            "The {name} is {family} invented in {invented} by {inventor}.",
            "Invented by {inventor} in the year {invented}, the {name} is {family}.",
            "{inventor} invented the {name}, {family}, in {invented}.",
        ),
        (
            "It is mostly made of {material}, and the first one was built in {made_in}.",
            "The first of them was made in {made_in}, mostly of {material}.",
            "Mostly made of {material}, it was first made in {made_in}.",
        ),
    ),
    colour=(
        "Its tone is soft and does not carry far.",
        "Players hold it on the left knee.",
        "Village bands seldom travel without one.",
        "It was banned from temples for a time because it was thought too cheerful.",
        "Good ones are rare, since the makers guard their measurements.",
        "Beginners need about two years to play it in tune.",
        "It has to be kept away from damp air.",
        "A larger form of it is played standing.",
    ),
)

SHIP = Kind(
    name="ship",
    reference="the ship {name}",
    relations=(
        Relation(
            "builder",
            ("Which guild built {x}?", "By which guild was {x} built?"),
            ("the guild that built {x}",),
            ("Which ship was built by {v}?",),
        ),
        Relation(
            "captain", ("Who was the first captain of {x}?",), ("the first captain of {x}",), ("Which ship had {v} as its first captain?",)
        ),
        Relation("launched", ("In which year was {x} launched?", "When was {x} launched?")),
        Relation("home_port", ("What was the home port of {x}?", "Which town was the home port of {x}?"), ("the home port of {x}",)),
        Relation("length", ("How long was {x}?", "How many metres long was {x}?"), unit="metres"),
    ),
    groups=(
        (
            "The {name} was a ship built by the {builder} and launched in {launched}.",
            "Built by the {builder}, the ship {name} was launched in the year {launched}.",
            "The {name}, a ship launched in {launched}, came from the yard of the {builder}.",
        ),
        (
            "Her first captain was {captain}, and her home port was {home_port}.",
            "She sailed from her home port of {home_port} under {captain}, her first captain.",
            "{captain} was her first captain; her home port was {home_port}.",
        ),
        (
            "She was {length} metres long.",
            "From stem to stern she measured {length} metres.",
            "Her length was {length} metres.",
        ),
    ),
    colour=(
        "She carried salt and timber, and once a troupe of actors.",
        "Her figurehead was carved by a prisoner.",
        "In bad weather she was slow to answer the helm.",
        "She ran aground twice and was refloated both times.",
        "Her log books are an important source for the weather of the time.",
        "Part of her crew deserted after a dispute over rations.",
        "She was rebuilt with a second deck in later years.",
        "Her bell now hangs in a school.",
        "Nothing is known of her end.",
    ),
)

BUILDING = Kind(
    name="building",
    reference="the {name}",
    relations=(
        Relation(
            "architect",
            ("Who designed {x}?", "Who was the architect of {x}?"),
            ("the architect of {x}",),
            ("Which building did {v} design?",),
        ),
        Relation("town", ("In which town is {x}?", "Where does {x} stand?"), ("the town where {x} stands",)),
        Relation("completed", ("In which year was {x} completed?", "When was {x} completed?")),
        Relation("height", ("How high is {x}?", "How many metres high is {x}?"), unit="metres"),
        Relation("stone", ("What is {x} built of?", "Which material is {x} built of?")),
    ),
    groups=(
        (
            "The {name} stands in {town}; it was designed by {architect} and completed in {completed}.",
            "Designed by {architect}, the {name} in {town} was completed in the year {completed}.",
            "Completed in {completed}, the {name} in {town} is the work of the architect {architect}.",
        ),
        (
            "It is built of {stone} and {height} metres high.",
            "Built of {stone}, it reaches a height of {height} metres.",
            "It rises to {height} metres and is built of {stone}.",
        ),
    ),
    colour=(
        "The foundations gave way during the work and had to be laid again.",
        "It was paid for by a tax on beer.",
        "Swifts nest under its eaves every {season}.",
        "A crack in the western wall is watched with care.",
        "Its doors came from an older building on the same site.",
        "The upper floor is closed to visitors.",
        "Several workmen are named in an inscription above the entrance.",
        "At night a lamp is kept burning on its highest point.",
        "It served as a hospital during two wars.",
    ),
)

KINDS = (BOOK, PAINTING, COMPOSITION, INSTRUMENT, SHIP, BUILDING)

COMPARISONS = (
    Comparison("book", "published", ("Which book was published earlier, {a} or {b}?",), ("Was {a} published before {b}?",), greater=False),
    Comparison("painting", "painted", ("Which painting is older, {a} or {b}?",), ("Is {a} older than {b}?",), greater=False),
    Comparison("ship", "launched", ("Which ship was launched earlier, {a} or {b}?",), ("Was {a} launched before {b}?",), greater=False),
    Comparison("ship", "length", ("Which ship was longer, {a} or {b}?",), ("Was {a} longer than {b}?",)),
    Comparison("building", "height", ("Which building is higher, {a} or {b}?",), ("Is {a} higher than {b}?",)),
    Comparison("instrument", "invented", ("Which was invented earlier, {a} or {b}?",), ("Was {a} invented before {b}?",), greater=False),
)

AGREEMENTS = (
    Agreement("book", "author", ("Are {a} and {b} by the same author?",)),
    Agreement("ship", "builder", ("Were {a} and {b} built by the same guild?",)),
    Agreement("building", "town", ("Do {a} and {b} stand in the same town?",)),
    Agreement("painting", "painter", ("Are {a} and {b} by the same painter?",)),
)
