"""Invented brands and model names, and the sentences that any product may carry."""

from tether.envs.webshop.stock.kinds import names

BRANDS = names(
    """
    Abrendale, Arvellin, Astrapeak, Bellowick, Brimmory, Calverra, Cindlewood, Corvanto, Dapplefern, Delmarrow, Dunhollow, Eddlestone,
    Elmorra, Everthistle, Fennimoor, Fjellora, Galdwin, Glimmerash, Granvoss, Hallowmere, Hexelby, Ilvanna, Ironbramble, Jasperlin, Kelderon,
    Kestrova, Lanternby, Lorimost, Luvindale, Marrowind, Mistelga, Nolvera, Nordhexa, Oakhavern, Orlistone, Pellacroft, Pinnerly, Quillmont,
    Quorvane, Rallowby, Rivendash, Sableford, Selkirra, Solvanta, Tamberley, Thornquist, Tovarra, Umberlane, Undelia, Valdresk, Velmora,
    Wexcombe, Willowarn, Xantherly, Yarrowick, Ylvania, Zellmoor, Zephandra
    """
)

SERIES = names(
    """
    Alder, Almanac, Anchor, Aspen, Atlas, Beacon, Birch, Breeze, Canyon, Cedar, Cinder, Clover, Comet, Crest, Delta, Drift, Echo, Ember, Falcon,
    Fern, Flint, Gale, Garnet, Glen, Harbor, Hazel, Heron, Horizon, Island, Juniper, Kite, Lagoon, Larch, Lark, Linden, Lumen, Maple, Meadow,
    Mesa, Nimbus, Nomad, Oasis, Opal, Orchard, Otter, Pebble, Pioneer, Prairie, Quartz, Quest, Raven, Ridge, Ripple, River, Saffron, Sage,
    Sierra, Summit, Thicket, Tundra, Vale, Vista, Wander, Willow, Zenith
    """
)

INTROS = (
    "{brand} {series} {noun}: made for every day.",
    "{brand} {series} {noun}, a plain answer to a common need.",
    "{noun} by {brand}, one of the things customers come back for.",
    "{noun} by {brand}, checked by hand before leaving the house.",
    "{brand} {noun}: simple, because nothing is there without a reason.",
)

CLOSINGS = (
    "Write to us within thirty days if it is not what you expected.",
    "Made in small runs, so shades may differ a little from the photograph.",
    "Comes in recycled cardboard without a loose piece of film.",
    "Questions are answered by people, usually within a day.",
    "Each one is counted, packed and sealed by the same small team.",
)
