"""How the encyclopedia speaks of what people did together: guilds, schools, battles, festivals, expeditions; and of species they described."""

from tether.envs.searchqa.world.schema import Agreement, Comparison, Kind, Relation

GUILD = Kind(
    name="guild",
    reference="the {name}",
    relations=(
        Relation("founder", ("Who founded {x}?", "Who was the founder of {x}?"), ("the founder of {x}",), ("Which guild did {v} found?",)),
        Relation("founded", ("In which year was {x} founded?", "When was {x} founded?")),
        Relation("seat", ("In which town does {x} have its seat?", "Where is the seat of {x}?"), ("the town where {x} has its seat",)),
        Relation("assembly", ("In which month does {x} hold its assembly?",)),
    ),
    groups=(
        (
            "The {name} is a guild of shipwrights founded in {founded} by {founder}.",
            "Founded by {founder} in the year {founded}, the {name} is a guild of shipwrights.",
            "{founder} founded the {name}, a guild of shipwrights, in {founded}.",
        ),
        (
            "It has its seat in {seat}.",
            "Its seat is in the town of {seat}.",
            "Its hall and its seat are in {seat}.",
        ),
        (
            "The members hold their assembly in {assembly}.",
            "An assembly of all members is held in {assembly}.",
            "In {assembly} the whole guild meets for its assembly.",
        ),
    ),
    colour=(
        "Apprentices serve for seven years and may not marry in that time.",
        "Its account books are kept in a cipher.",
        "Widows of members receive a pension and a ham.",
        "The guild once refused to work for a king who had not paid.",
        "Its mark is burned into every keel.",
        "A dispute with the rope makers lasted for two generations.",
        "Members are known by their blue aprons.",
        "Its strong room has three locks, and the keys are kept by three families.",
        "Foreigners were admitted only in later times.",
    ),
    short="Guild",
)

ACADEMY = Kind(
    name="academy",
    reference="the {name}",
    relations=(
        Relation("founder", ("Who founded {x}?", "Who was the founder of {x}?"), ("the founder of {x}",), ("Which school did {v} found?",)),
        Relation("founded", ("In which year was {x} founded?", "When was {x} founded?")),
        Relation("town", ("In which town is {x}?", "Where is {x}?"), ("the home town of {x}",)),
        Relation("subject", ("For which subject is {x} known?", "Which subject is {x} known for?")),
    ),
    groups=(
        (
            "The {name} is a school in {town}, founded in {founded} by {founder}.",
            "Founded in the year {founded} by {founder}, the {name} is a school in {town}.",
            "{founder} founded the {name}, a school in {town}, in {founded}.",
        ),
        (
            "It is known above all for the teaching of {subject}.",
            "Its name is bound up with the study of {subject}, for which it is known.",
            "Students come from far away to learn {subject}, for which it is known.",
        ),
    ),
    colour=(
        "Lectures begin before dawn and end at noon.",
        "Students are fined for whistling in the corridors.",
        "Its garden of medicinal plants is open to the public.",
        "Women were admitted from the beginning.",
        "The library was saved from a fire by a chain of washerwomen.",
        "Examinations are held in public and draw large crowds.",
        "Poor students pay with a year of work in the kitchens.",
        "Its rectors serve for three years and may not serve twice.",
        "For a time it had more teachers than students.",
    ),
)

BATTLE = Kind(
    name="battle",
    reference="the {name}",
    relations=(
        Relation("fought", ("In which year was {x} fought?", "When was {x} fought?")),
        Relation("near", ("Near which town was {x} fought?",), ("the town near which {x} was fought",)),
        Relation("victor", ("Which realm won {x}?",), ("the realm that won {x}",)),
        Relation("loser", ("Which realm lost {x}?",), ("the realm that lost {x}",)),
        Relation(
            "commander", ("Who commanded the victors at {x}?",), ("the commander of the victors at {x}",), ("Which battle did {v} win?",)
        ),
        Relation("reign", ("Who ruled the victors at the time of {x}?",), ("the ruler of the victors at the time of {x}",)),
    ),
    groups=(
        (
            "The {name} was fought near {near} in {fought}.",
            "In {fought} the {name} took place near the town of {near}.",
            "The {name} was fought in the year {fought}, a short march from {near}.",
        ),
        (
            "It was won by {victor} and lost by {loser}.",
            "It ended in a victory of {victor} over {loser}.",
            "The army of {loser} was beaten by that of {victor}.",
        ),
        (
            "The victors, who were then ruled by {reign}, were commanded by {commander}.",
            "{commander} commanded the victors, whose ruler at the time was {reign}.",
            "The commander of the winning side was {commander}, in the service of {reign}, its ruler.",
        ),
    ),
    colour=(
        "Rain had turned the ground to mud, and the guns arrived late.",
        "Both sides claimed to have been outnumbered.",
        "It lasted from dawn until the early afternoon.",
        "The dead were buried by monks, who kept a list of names.",
        "Ploughs still turn up buckles and lead shot.",
        "A truce was signed before the end of the {season}.",
        "A drummer boy is the hero of most songs about it.",
        "The baggage train was looted by villagers during the night.",
        "Military schools use it as an example of what to avoid.",
    ),
)

FESTIVAL = Kind(
    name="festival",
    reference="the {name}",
    relations=(
        Relation("town", ("In which town is {x} held?", "Where is {x} held?"), ("the town that holds {x}",)),
        Relation("first_held", ("In which year was {x} first held?", "When was {x} first held?")),
        Relation(
            "honours",
            ("Whom does {x} honour?", "In whose honour is {x} held?"),
            ("the person whom {x} honours",),
            ("Which festival honours {v}?",),
        ),
        Relation("month", ("In which month is {x} held?",)),
        Relation("dish", ("What is eaten at {x}?", "Which dish is eaten at {x}?")),
    ),
    groups=(
        (
            "The {name} is held in {town} in {month}.",
            "In {month} the people of {town} hold the {name}.",
            "The {name} is a festival held in {town} in {month}.",
        ),
        (
            "It honours {honours} and was first held in {first_held}.",
            "First held in {first_held}, it honours {honours}.",
            "It was first held in the year {first_held}, in honour of {honours}.",
        ),
        (
            "By custom everyone eats {dish}.",
            "The dish of the day is {dish}.",
            "Stalls sell {dish}, which nobody may refuse.",
        ),
    ),
    colour=(
        "The evening ends with a race of wheelbarrows.",
        "Masks are worn until midnight and then burned.",
        "Debts may not be collected while it lasts.",
        "The youngest apprentice is mayor for a day.",
        "Boats decorated with paper flowers are set adrift.",
        "In years of war it was held in secret.",
        "Dogs are given ribbons and a place in the procession.",
        "The oldest inhabitant lights the first torch.",
        "Strangers are asked to sing or to pay a fine.",
    ),
)

EXPEDITION = Kind(
    name="expedition",
    reference="the {name}",
    relations=(
        Relation("leader", ("Who led {x}?", "Who was the leader of {x}?"), ("the leader of {x}",), ("Which expedition was led by {v}?",)),
        Relation("ship", ("Which ship carried {x}?",), ("the ship that carried {x}",), ("Which expedition was carried by {v}?",)),
        Relation("reached", ("Which lake did {x} reach?",), ("the lake reached by {x}",)),
        Relation("set_out", ("In which year did {x} set out?", "When did {x} set out?")),
    ),
    groups=(
        (
            "The {name} set out in {set_out} under {leader}.",
            "Led by {leader}, the {name} set out in the year {set_out}.",
            "In {set_out} the {name} left the coast under the leadership of {leader}.",
        ),
        (
            "It was carried by the ship {ship} and reached the shores of {reached}.",
            "The ship {ship} carried it to the coast, from where it went on foot and reached {reached}.",
            "Carried by the ship {ship}, it reached {reached} after many months.",
        ),
    ),
    colour=(
        "Half of the pack animals were lost in the first month.",
        "Its maps were kept secret for thirty years.",
        "The members lived for weeks on boiled leather and berries.",
        "A cook wrote the only honest account of the journey.",
        "It brought back seeds, stones and a fever.",
        "The public paid to see the torn tents afterwards.",
        "Two members stayed behind and married there.",
        "It had been planned for a single summer and took three.",
    ),
)

SPECIES = Kind(
    name="species",
    reference="the {name}",
    relations=(
        Relation("sort", ("What sort of living thing is {x}?", "What is {x}?")),
        Relation(
            "describer",
            ("Who first described {x}?",),
            ("the scholar who first described {x}",),
            ("Which species was first described by {v}?",),
        ),
        Relation("described", ("In which year was {x} first described?", "When was {x} first described?")),
        Relation("river", ("Along which river does {x} live?",), ("the river along which {x} lives",)),
        Relation("diet", ("What does {x} eat?", "What does {x} feed on?")),
        Relation("flowers", ("When is {x} in season?",)),
    ),
    groups=(
        (
            "The {name} is {sort} that lives along the {river}.",
            "Living along the {river}, the {name} is {sort}.",
            "The {name}, {sort}, lives only along the {river}.",
        ),
        (
            "It was first described by {describer} in {described}.",
            "{describer} gave the first description of it in the year {described}.",
            "The first to describe it was {describer}, in {described}.",
        ),
        (
            "It feeds on {diet}.",
            "Its food is {diet}.",
            "It lives on {diet} and little else.",
        ),
        (
            "It is in season in {flowers}.",
            "Its season is {flowers}.",
            "Country people gather it in {flowers}, when it is in season.",
        ),
    ),
    colour=(
        "Its numbers have fallen since the marshes were drained.",
        "Farmers think it a sign of rain.",
        "Few people have seen it more than once.",
        "The young ones are paler than the old.",
        "Several proverbs mention it, none of them kindly.",
        "It does badly in captivity and in gardens.",
        "Children keep dried ones as charms.",
        "It is often confused with a common relative.",
        "A tea made from it was once sold as a remedy for gout.",
    ),
)

KINDS = (GUILD, ACADEMY, BATTLE, FESTIVAL, EXPEDITION, SPECIES)

COMPARISONS = (
    Comparison("guild", "founded", ("Which guild is older, {a} or {b}?",), ("Is {a} older than {b}?",), greater=False),
    Comparison("academy", "founded", ("Which school is older, {a} or {b}?",), ("Is {a} older than {b}?",), greater=False),
    Comparison("battle", "fought", ("Which battle was fought earlier, {a} or {b}?",), ("Was {a} fought before {b}?",), greater=False),
    Comparison("festival", "first_held", ("Which festival is older, {a} or {b}?",), ("Is {a} older than {b}?",), greater=False),
)

AGREEMENTS = (
    Agreement("festival", "town", ("Are {a} and {b} held in the same town?",)),
    Agreement("battle", "victor", ("Did the same realm win {a} and {b}?",)),
    Agreement("species", "river", ("Do {a} and {b} live along the same river?",)),
)
