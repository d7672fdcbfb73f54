"""The plain words the invented world is described with: what towns make, what ships are called after, what beasts eat.

Names are not here (`names` builds them from syllables). The order of each list is part of the world: a change makes another one.
"""


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


ADJECTIVES = _words(
    "Amber, Ashen, Blue, Bold, Bright, Broken, Bronze, Brown, Burning, Calm, Clear, Cold, Copper, Coral, Crooked, Crystal, Dark, Deep,"
    "Distant, Early, Faded, Fallen, Fair, First, Flint, Floating, Forgotten, Gilded, Glass, Golden, Green, Grey, Hidden, Hollow, Honest,"
    "Idle, Iron, Ivory, Jade, Last, Laughing, Leaden, Lonely, Long, Lost, Marble, Midnight, Mossy, Narrow, Northern, Open, Painted, Pale,"
    "Paper, Patient, Quiet, Red, Restless, Rising, Rusted, Sable, Salt, Scarlet, Second, Secret, Silent, Silver, Singing, Slow, Southern,"
    "Steady, Stone, Stray, Sunken, Swift, Tall, Thirsty, Velvet, Wandering, White, Wild, Winter, Wooden, Yellow, Young"
)
NOUNS = _words(
    "Acorn, Anchor, Anvil, Apple, Arrow, Badger, Barrel, Basket, Beacon, Bell, Bramble, Brook, Bucket, Candle, Chestnut, Cloak, Comet,"
    "Compass, Cormorant, Crane, Crow, Cuckoo, Dolphin, Door, Dove, Drum, Eagle, Ember, Falcon, Feather, Fern, Ferry, Finch, Flame, Fox,"
    "Garden, Gate, Gull, Hammer, Harbour, Hare, Harp, Harvest, Hazel, Hearth, Heron, Hive, Horn, Hound, Ivy, Jackdaw, Kettle, Key, Kite,"
    "Ladder, Lamp, Lantern, Lark, Ledger, Lily, Loom, Magpie, Maple, Mast, Meadow, Mill, Mirror, Moth, Needle, Nettle, Oak, Oar, Orchard,"
    "Otter, Owl, Oyster, Pearl, Pilgrim, Plough, Poppy, Quill, Rainbow, Raven, Reed, Ribbon, Ring, Robin, Rope, Rose, Sail, Saddle,"
    "Salmon, Scythe, Seal, Shell, Shepherd, Sickle, Spade, Sparrow, Spindle, Squirrel, Staircase, Star, Stork, Swallow, Swan,"
    "Thistle, Thorn, Thread, Thrush, Tide, Torch, Tower, Trout, Vine, Violet, Walnut, Wheel, Whistle, Willow, Window, Wolf, Wren"
)
CRAFTS = _words(
    "glass lamps, wool blankets, copper kettles, willow baskets, clay pipes, church bells, saddles, oak barrels, fishing nets, bone combs,"
    "felt hats, paper, candles, roof tiles, door locks, sailcloth, violins, silk ribbons, pocket knives, millstones, painted plates, salt,"
    "smoked trout, honey cakes, pear cider, plum brandy, goat cheese, rope, ink, soap, buttons, lace collars, leather gloves, wooden toys,"
    "ship anchors, brass compasses, iron stoves, bricks, mustard, walnut oil, embroidered shawls, clocks, spectacles, carved doors"
)
EMBLEMS = _words(
    "heron, wolf, bear, boar, stag, falcon, raven, salmon, hare, fox, badger, goat, bull, horse, swan, crab, pike, squirrel, hedgehog, bee,"
    "lynx, beaver, crow, lizard, stork, viper, toad, ram, rooster, seal"
)
GENRES = _words(
    "a novel, a book of travels, a collection of short stories, a verse comedy, a long poem, a handbook of gardening, a history, a tragedy,"
    "a cookery book, a book of riddles, a memoir, a treatise on the weather, a children's book, a book of fables, a satire,"
    "a dictionary of dialects, a manual of navigation, a collection of letters, a study of old laws, a book of sermons"
)
SUBJECTS = _words(
    "astronomy, medicine, music, law, navigation, botany, geometry, painting, rhetoric, engineering, history, mining, languages,"
    "veterinary science, philosophy, architecture"
)
SORTS = _words(
    "a wading bird, a river fish, a climbing vine, a night moth, a small deer, a song bird, a tree frog, a water beetle, a ground squirrel,"
    "a marsh flower, a wild onion, a grazing antelope, a freshwater crab, a burrowing owl, a thorny shrub, a striped snake, a tall grass,"
    "an edible mushroom, an otter, an evergreen tree"
)
DIETS = _words(
    "beech nuts, snails, river weed, mayflies, berries, small frogs, seeds, mosquito larvae, fallen fruit, bark, earthworms, clover,"
    "pine needles, dragonflies, roots, honeydew, moss, freshwater shrimp, beetles, grasshoppers"
)
RIPENINGS = _words("early spring, late spring, midsummer, late summer, early autumn, late autumn, midwinter, the first thaw")
PLANTS = frozenset(
    {"a climbing vine", "a marsh flower", "a wild onion", "a thorny shrub", "a tall grass", "an edible mushroom", "an evergreen tree"}
)
STONES = _words(
    "grey granite, red sandstone, white limestone, black basalt, green slate, yellow brick, pink marble, dark flint, pale oak, larch"
)
FAMILIES = _words(
    "a plucked string instrument, a bowed string instrument, a reed instrument, a small organ, a hand drum, a wooden flute, a brass horn,"
    "a set of tuned bells, a keyed zither, a bagpipe"
)
MATERIALS = _words("pear wood, goat skin, cedar, bronze, horn, maple, silver wire, boxwood, clay, walnut, brass, bamboo")
SEASONS = _words("spring, summer, autumn, winter")
MONTHS = _words(
    "the month of Thaw, the month of Seed, the month of Blossom, the month of Hay, the month of Bees, the month of Harvest, the month of"
    " Nuts, the month of Mist, the month of Frost, the month of Candles"
)
DISHES = _words(
    "barley soup, honey cakes, roast chestnuts, eel pie, plum dumplings, smoked goose, saffron bread, pear tarts, fish stew, pancakes,"
    "rye biscuits, cherry pudding, stuffed cabbage, almond rolls, lentil pies, apple fritters"
)
SCENES = _words(
    "a ferry at dusk, an old woman reading, a market in the rain, three sleeping dogs, a wedding on a frozen lake, a boy with a lantern,"
    "a ship leaving harbour, a table set for nobody, a storm over wheat fields, a cat on a window sill, two judges quarrelling,"
    "a mill on fire, a blind musician, an empty theatre, women washing linen, a fox in the snow, a surgeon at work, a child asleep in a boat"
)
SEAS = ("Sea of Glass", "Amber Sea", "Narrow Sea", "Sea of Herons", "Cold Strait", "Gulf of Lamps")
OUTDOOR_TYPES = ("Bridge", "Gate", "Lighthouse")
INDOOR_TYPES = ("Tower", "Library", "Theatre", "Hall", "Observatory")
"""Buildings with walls for a painting."""
OCCUPATIONS = _words(
    "a writer, a painter, a composer, a ship's captain, an architect, an inventor, a scholar, a merchant, a general, an explorer"
)
ACADEMY_TYPES = ("Academy", "College", "School", "Institute")
FIELD_TYPES = ("Field", "Ford", "Hill", "Marsh", "Pass", "Heath", "Mill", "Wood")
