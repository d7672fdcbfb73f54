"""How the encyclopedia speaks of realms, towns, rivers, mountains and lakes."""

from tether.envs.searchqa.world.schema import Agreement, Comparison, Kind, Relation

REALM = Kind(
    name="realm",
    reference="{name}",
    relations=(
        Relation(
            "capital",
            ("What is the capital of {x}?", "Which town is the capital of {x}?"),
            ("the capital of {x}", "the capital town of {x}"),
        ),
        Relation("founded", ("In which year was {x} founded?", "When was the realm of {x} founded?")),
        Relation("language", ("Which language is spoken in {x}?", "What language do the people of {x} speak?")),
        Relation("coin", ("What is the coin of {x} called?", "Which coin is used in {x}?")),
        Relation("first_ruler", ("Who was the first recorded ruler of {x}?",), ("the first recorded ruler of {x}",)),
    ),
    groups=(
        (
            "{name} is a realm founded in the year {founded}, with its capital at {capital}.",
            "Founded in {founded}, {name} is a realm governed from its capital, {capital}.",
            "The realm of {name}, whose capital is {capital}, dates from the year {founded}.",
        ),
        (
            "Its people speak {language} and pay in a coin called the {coin}.",
            "The language of the country is {language}, and its coin is the {coin}.",
            "Most of its people speak {language}; accounts are kept in the {coin}.",
        ),
        (
            "The first ruler named in its chronicles is {first_ruler}.",
            "Its chronicles begin with the reign of {first_ruler}, the first recorded ruler.",
            "{first_ruler} is the first ruler of whom any record survives.",
        ),
    ),
    colour=(
        "Older maps draw its borders differently, and no two of them agree.",
        "Travellers praise the roads and complain about the tolls.",
        "Its laws are read aloud once a year in every market square.",
        "Three wars over grazing rights are remembered in songs but in few documents.",
        "A census is held every twelfth {season}, and nobody believes the result.",
        "The royal archive burned twice, so that much of the early history is guesswork.",
        "Foreign merchants must declare their goods at the border before noon.",
    ),
)

TOWN = Kind(
    name="town",
    reference="{name}",
    relations=(
        Relation("realm", ("In which realm is {x}?", "To which realm does {x} belong?"), ("the realm in which {x} lies",)),
        Relation("river", ("On which river does {x} stand?", "Which river flows past {x}?"), ("the river on which {x} stands",)),
        Relation("founded", ("In which year was {x} founded?", "When was {x} founded?")),
        Relation("population", ("How many people live in {x}?", "How many inhabitants does {x} have?")),
        Relation("craft", ("For which goods is {x} known?",)),
        Relation("emblem", ("Which animal stands on the arms of {x}?", "What animal do the arms of {x} show?")),
    ),
    groups=(
        (
            "{name} is a town in {realm}, founded in the year {founded}.",
            "Founded in {founded}, {name} is a town in {realm}.",
            "The town of {name} lies in {realm} and was founded in {founded}.",
            "{name}, a town in {realm}, goes back to the year {founded}.",
        ),
        (
            "It stands on the {river}, which is crossed here by a ferry.",
            "The {river} flows past its walls.",
            "It grew up beside a ford of the {river}.",
        ),
        (
            "About {population} people live there, many of them by the making of {craft}.",
            "It has {population} inhabitants and is known for its {craft}.",
            "Known for its {craft}, it counts {population} inhabitants.",
            "Its {population} inhabitants are known throughout the country for their {craft}.",
        ),
        (
            "The arms of the town show a {emblem} on a plain field.",
            "A {emblem} stands on the arms of the town.",
            "On its seal and arms there is a {emblem}.",
        ),
    ),
    colour=(
        "The old walls were pulled down to make room for a horse market.",
        "A fire destroyed the lower quarter one dry {season}, and it was rebuilt in stone.",
        "Its inns are crowded in {season} and nearly empty for the rest of the year.",
        "The steep lanes behind the market are too narrow for carts.",
        "Visitors are shown a well that is said never to have frozen.",
        "The town clock has been nine minutes slow for as long as anyone remembers.",
        "A small garrison is kept at the north gate.",
        "Children are taught to swim in the mill pond before they can read.",
        "Its market is held twice a week and ends when the bell is rung.",
        "Storks nest on the roof of the grain store every {season}.",
        "The court meets in a former granary that smells of barley to this day.",
        "A stone in the square marks the height of an old flood.",
    ),
)

RIVER = Kind(
    name="river",
    reference="the {name}",
    relations=(
        Relation("source", ("On which mountain does {x} rise?",), ("the mountain on which {x} rises",)),
        Relation("realm", ("Through which realm does {x} flow?",), ("the realm through which {x} flows",)),
        Relation("sea", ("Into which sea does {x} flow?",)),
        Relation("length", ("How long is {x}?", "How many kilometres long is {x}?"), unit="kilometres"),
    ),
    groups=(
        (
            "The {name} rises on {source} in {realm} and flows into the {sea}.",
            "Rising on {source}, the {name} crosses {realm} on its way to the {sea}.",
            "The {name} is a river of {realm} that springs from {source} and ends in the {sea}.",
        ),
        (
            "It is {length} kilometres long.",
            "Its course measures {length} kilometres from spring to mouth.",
            "From its spring to its mouth it runs for {length} kilometres.",
        ),
    ),
    colour=(
        "Barges can travel on its lower course from the first thaw until late autumn.",
        "The water is brown after rain and famous for its eels.",
        "Two old stone bridges cross it, and a third has been planned for a century.",
        "Floods in {season} leave a dark mud that farmers spread on their fields.",
        "Timber was floated down it until the forests near the spring were gone.",
        "In its gorge the current is so strong that ferries are drawn by ropes.",
        "Millers along the upper course have quarrelled over its water for generations.",
        "Its banks are lined with willows that are cut every {season} for baskets.",
        "A legend tells of a bell that was lost in its deepest pool.",
    ),
    short="River",
)

MOUNTAIN = Kind(
    name="mountain",
    reference="{name}",
    relations=(
        Relation("realm", ("In which realm is {x}?", "In which realm does {x} stand?"), ("the realm in which {x} stands",)),
        Relation("height", ("How high is {x}?", "How many metres high is {x}?"), unit="metres"),
        Relation(
            "first_climber",
            ("Who was the first to climb {x}?", "Who first reached the top of {x}?"),
            ("the first person to climb {x}",),
            ("Which mountain was first climbed by {v}?",),
        ),
        Relation("climbed", ("In which year was {x} first climbed?", "When was {x} first climbed?")),
    ),
    groups=(
        (
            "{name} is a mountain in {realm}, {height} metres high.",
            "At {height} metres, {name} is one of the well-known mountains of {realm}.",
            "{name} stands in {realm} and reaches a height of {height} metres.",
        ),
        (
            "It was first climbed in {climbed} by {first_climber}.",
            "{first_climber} was the first to reach the top, in the year {climbed}.",
            "The first ascent, in {climbed}, was the work of {first_climber}.",
        ),
    ),
    colour=(
        "Its upper slopes keep their snow well into {season}.",
        "A hut below the ridge offers soup and straw to travellers.",
        "Shepherds say that the weather of the whole valley is made on its summit.",
        "The northern face is loose rock and is seldom attempted.",
        "Silver was once mined at its foot, though never enough to pay for the tunnels.",
        "On clear days the sea can be seen from the top.",
        "Clouds gather around it nearly every afternoon.",
        "A cairn on the summit holds a tin box with the names of visitors.",
        "Wild goats are common on its southern side.",
    ),
    short="Mount",
)

LAKE = Kind(
    name="lake",
    reference="{name}",
    relations=(
        Relation("realm", ("In which realm is {x}?", "In which realm does {x} lie?"), ("the realm in which {x} lies",)),
        Relation("depth", ("How deep is {x}?", "How many metres deep is {x}?"), unit="metres"),
        Relation("feeder", ("Which river feeds {x}?", "From which river does {x} take its water?"), ("the river that feeds {x}",)),
    ),
    groups=(
        (
            "{name} is a lake in {realm} that takes most of its water from the {feeder}.",
            "Fed by the {feeder}, {name} is a lake in {realm}.",
            "{name} lies in {realm}, where the {feeder} fills a long basin.",
        ),
        (
            "At its deepest point it measures {depth} metres.",
            "It is {depth} metres deep.",
            "Soundings have found a depth of {depth} metres.",
        ),
    ),
    colour=(
        "Fishing is forbidden during the weeks when the perch spawn.",
        "In hard winters it freezes over, and fairs are held on the ice.",
        "A drowned village is said to lie below the eastern shore.",
        "Reeds from its banks are used for roofs in the whole district.",
        "Its water is so clear that coins can be counted on the bottom.",
        "Sudden winds make it dangerous for small boats in {season}.",
        "Monks once kept a vineyard on the only island.",
        "Swans gather there by the hundred every {season}.",
    ),
    short="Lake",
)

KINDS = (REALM, TOWN, RIVER, MOUNTAIN, LAKE)

COMPARISONS = (
    Comparison("river", "length", ("Which river is longer, {a} or {b}?", "Which is longer, {a} or {b}?"), ("Is {a} longer than {b}?",)),
    Comparison("mountain", "height", ("Which mountain is higher, {a} or {b}?",), ("Is {a} higher than {b}?",)),
    Comparison("lake", "depth", ("Which lake is deeper, {a} or {b}?",), ("Is {a} deeper than {b}?",)),
    Comparison("town", "population", ("Which town has more inhabitants, {a} or {b}?",), ("Does {a} have more inhabitants than {b}?",)),
    Comparison("town", "founded", ("Which town is older, {a} or {b}?",), ("Is {a} older than {b}?",), greater=False),
)

AGREEMENTS = (
    Agreement("town", "realm", ("Are {a} and {b} in the same realm?", "Do {a} and {b} belong to the same realm?")),
    Agreement("river", "realm", ("Do {a} and {b} flow through the same realm?",)),
    Agreement("mountain", "realm", ("Do {a} and {b} stand in the same realm?",)),
)
