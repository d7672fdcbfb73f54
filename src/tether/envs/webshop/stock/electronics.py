"""Things with a plug, a battery or a screen, and what goes with them."""

from tether.envs.webshop.stock.kinds import Axis, Department, Feature, Kind, names

_FEATURES = {
    "noise cancelling": Feature("with", "Two microphones a side do the noise cancelling."),
    "stereo sound": Feature("with", "It gives true stereo sound, not two copies of one channel."),
    "deep bass": Feature("with", "A passive radiator adds deep bass."),
    "fast charging": Feature("with", "Fast charging brings it to half in twenty minutes."),
    "wireless charging": Feature("with", "Wireless charging works without a cable in sight."),
    "carrying case": Feature("with", "A carrying case with a belt loop is in the box."),
    "quick release": Feature("with", "The quick release plate opens with one finger."),
    "high speed": Feature("with", "Data runs at high speed in both directions."),
    "gold plated": Feature("with", "The contacts are gold plated."),
    "braided nylon": Feature("with", "A coat of braided nylon outlives plain rubber."),
    "aluminum alloy": Feature("with", "Its metal parts are aluminum alloy."),
    "tempered glass": Feature("with", "The tempered glass breaks the fall so that the screen does not."),
    "shock absorption": Feature("with", "Air corners add shock absorption."),
    "phone holder": Feature("with", "A phone holder turns both ways."),
    "led indicator": Feature("with", "A led indicator tells how much is left."),
    "touch control": Feature("with", "Touch control answers to one or two taps."),
    "hands free": Feature("is", "It is hands free once it is on."),
    "easy install": Feature("is", "It is easy install: a guide frame does the aiming."),
    "case friendly": Feature("is", "It is case friendly and stops short of the edge."),
    "scratch resistant": Feature("is", "It is scratch resistant against keys and sand."),
    "water resistant": Feature("is", "It is water resistant to a metre for half an hour."),
    "dust proof": Feature("is", "All openings are dust proof."),
    "ultra slim": Feature("is", "Ultra slim: it adds less than a coin."),
    "heavy duty": Feature("is", "A heavy duty build, bent and dropped a thousand times by us."),
    "long lasting": Feature("is", "It is long lasting; we have one in use since the first batch."),
    "home office": Feature("for", "A good companion in the home office."),
    "video calls": Feature("for", "Clear in video calls."),
    "outdoor trips": Feature("for", "Made to go along on outdoor trips."),
    "car use": Feature("for", "Sized for car use."),
    "gaming sessions": Feature("for", "Stays cool in long gaming sessions."),
}

_COLOURS = Axis("color", names("black, white, silver, navy blue, coral red, forest green, rose gold, lavender"), 2, 4)
_PHONES = Axis("size", names("5.4 inch, 5.8 inch, 6.1 inch, 6.4 inch, 6.7 inch"), 2, 4)
_LENGTHS = Axis("size", names("1.5 feet, 3 feet, 6 feet, 10 feet"), 2, 3, run=True)
_PLUGS = Axis("style", names("usb c to usb c, usb a to usb c, usb a to micro usb"), 1, 3)
_PHONE_PATH = "Cell Phones & Accessories › Accessories › "

_KINDS = (
    Kind(
        "Electronics › Headphones › Over-Ear Headphones",
        "over-ear headphones",
        names("Over-Ear Headphones, Travel Headphones, Studio Headphones, Folding Headphones"),
        names("noise cancelling, stereo sound, deep bass, fast charging, carrying case, touch control, hands free, long lasting, home office, video calls, gaming sessions"),
        names("Protein Leather, Velour, Mesh Fabric, Steel Band"),
        ("The cushions can be changed without tools.", "It folds flat."),
        (_COLOURS, Axis("style", names("wire, wireless, wireless and wire"), 1, 3)),
        (24, 180),
    ),
    Kind(
        _PHONE_PATH + "Cases, Holsters & Sleeves › Basic Cases",
        "phone cases",
        names("Phone Case, Clear Phone Case, Wallet Phone Case, Rugged Phone Case"),
        names("wireless charging, shock absorption, tempered glass, scratch resistant, water resistant, dust proof, ultra slim, heavy duty, hands free, outdoor trips, car use"),
        names("Polycarbonate, Silicone, Vegan Leather, Wheat Straw"),
        ("The buttons have a clear click.", "The edge stands above the camera."),
        (_COLOURS, _PHONES),
        (8, 39),
    ),
    Kind(
        _PHONE_PATH + "Maintenance, Upkeep & Repairs › Screen Protectors",
        "screen protectors",
        names("Screen Protector, Privacy Screen Protector, Matte Screen Protector, Camera and Screen Protector"),
        names("tempered glass, easy install, case friendly, scratch resistant, water resistant, dust proof, ultra slim, touch control, long lasting, gaming sessions"),
        names("Ceramic Film, Hydrogel, Sapphire Coat, Hard Film"),
        ("Wipes and a dust sticker are in the box.", "Fingerprints come off with a sleeve."),
        (_PHONES, Axis("number of items", names("1 pack, 2 pack, 3 pack, 5 pack"), 2, 3)),
        (6, 28),
    ),
    Kind(
        _PHONE_PATH + "Chargers & Power Adapters › Cables",
        "charging cables",
        names("Charging Cable, USB Cable, Coiled Cable, Charger Cord"),
        names("fast charging, high speed, gold plated, braided nylon, aluminum alloy, led indicator, heavy duty, ultra slim, long lasting, car use, home office"),
        names("Copper Core, Silicone Jacket, Rubber Jacket, Recycled Jacket"),
        ("A strap keeps it rolled up.", "The plug fits through thick covers."),
        (_COLOURS, _LENGTHS, _PLUGS),
        (6, 29),
    ),
    Kind(
        _PHONE_PATH + "Chargers & Power Adapters › Portable Power Banks",
        "power banks",
        names("Power Bank, Solar Power Bank, Pocket Power Bank, Magnetic Power Bank"),
        names("fast charging, wireless charging, carrying case, led indicator, aluminum alloy, water resistant, dust proof, ultra slim, heavy duty, outdoor trips, car use"),
        names("Lithium Polymer, Lithium Iron, Rubber Shell, Fabric Shell"),
        ("It charges two things at once.", "It may be taken on board of an aeroplane."),
        (_COLOURS, Axis("size", names("5000 mah, 10000 mah, 20000 mah, 26800 mah"), 2, 3, run=True)),
        (16, 79),
    ),
    Kind(
        "Electronics › Portable Audio & Video › Portable Speakers & Docks › Portable Bluetooth Speakers",
        "bluetooth speakers",
        names("Bluetooth Speaker, Shower Speaker, Party Speaker, Clip Speaker"),
        names("stereo sound, deep bass, fast charging, carrying case, led indicator, hands free, water resistant, dust proof, long lasting, outdoor trips, video calls"),
        names("Woven Fabric, Rubber Shell, Bamboo Shell, Metal Grille"),
        ("Two of them can be played as a pair.", "It floats."),
        (_COLOURS,),
        (18, 120),
    ),
    Kind(
        "Electronics › Camera & Photo › Tripods & Monopods › Complete Tripods",
        "tripods",
        names("Tripod, Phone Tripod, Travel Tripod, Desk Tripod"),
        names("quick release, carrying case, phone holder, aluminum alloy, heavy duty, easy install, hands free, long lasting, outdoor trips, video calls, home office"),
        names("Carbon Legs, Steel Screws, Rubber Feet, Magnesium Head"),
        ("The middle column can be turned upside down.", "A hook takes a weight in the wind."),
        (Axis("color", names("black, grey, orange, white"), 2, 3), Axis("size", names("12 inch, 20 inch, 50 inch, 60 inch, 70 inch"), 2, 3, run=True)),
        (15, 95),
    ),
    Kind(
        "Electronics › Wearable Technology › Arm & Wristband Accessories › Smartwatch Bands",
        "smartwatch bands",
        names("Watch Band, Smartwatch Strap, Sport Watch Band, Loop Watch Band"),
        names("quick release, braided nylon, aluminum alloy, scratch resistant, water resistant, dust proof, ultra slim, easy install, long lasting, outdoor trips, home office"),
        names("Silicone, Milanese Mesh, Leather, Canvas"),
        ("It can be shortened without tools.", "The buckle has two pins."),
        (_COLOURS, Axis("size", names("38 mm, 40 mm, 42 mm, 44 mm, 46 mm"), 2, 3, run=True)),
        (7, 42),
    ),
)  # fmt: skip

ELECTRONICS = Department("electronics", _FEATURES, _KINDS)
