"""Care for skin, hair, teeth and nails."""

from tether.envs.webshop.stock.kinds import Axis, Department, Feature, Kind, names

_FEATURES = {
    "cruelty free": Feature("is", "Cruelty free from the first trial to the last."),
    "paraben free": Feature("is", "The recipe is paraben free."),
    "sulfate free": Feature("is", "It is sulfate free, so it foams a little less."),
    "fragrance free": Feature("is", "It is fragrance free and smells of nothing at all."),
    "alcohol free": Feature("is", "Being alcohol free, it does not sting."),
    "dermatologist tested": Feature("is", "It was dermatologist tested on forty volunteers."),
    "long lasting": Feature("is", "It is long lasting: one go in the morning is enough."),
    "travel size": Feature("is", "The travel size passes any airport check."),
    "easy apply": Feature("is", "It is easy apply, with no mirror needed."),
    "high quality": Feature("is", "Only high quality parts went into it."),
    "leak proof": Feature("is", "The lid is leak proof even upside down."),
    "bpa free": Feature("is", "All of it is bpa free."),
    "quick dry": Feature("is", "A quick dry formula sets in a minute."),
    "tea tree": Feature("with", "A little tea tree clears the head."),
    "coconut oil": Feature("with", "Cold pressed coconut oil makes it rich."),
    "argan oil": Feature("with", "Two drops of argan oil in every portion add shine."),
    "hyaluronic acid": Feature("with", "Two weights of hyaluronic acid hold water where it is needed."),
    "vitamin c": Feature("with", "Ten percent vitamin c brightens within weeks."),
    "shea butter": Feature("with", "Unrefined shea butter melts at the touch."),
    "aloe vera": Feature("with", "Juice of aloe vera cools at once."),
    "soft bristles": Feature("with", "The soft bristles are rounded under the microscope."),
    "bamboo handle": Feature("with", "The bamboo handle may go on the compost in the end."),
    "storage case": Feature("with", "It comes in a storage case with a magnet."),
    "wide mouth": Feature("with", "The wide mouth takes a spoon."),
    "dry skin": Feature("for", "Recommended for dry skin in winter."),
    "sensitive skin": Feature("for", "Kind to sensitive skin."),
    "fine lines": Feature("for", "Made to soften fine lines."),
    "dark circles": Feature("for", "Meant for dark circles after short nights."),
    "damaged hair": Feature("for", "Repairs damaged hair from root to tip."),
    "curly hair": Feature("for", "Keeps curly hair in its shape."),
    "hair growth": Feature("for", "Massaged in, it helps hair growth."),
    "fresh breath": Feature("for", "Leaves fresh breath for hours."),
    "sensitive teeth": Feature("for", "Mild on sensitive teeth."),
    "nail art": Feature("for", "Fine enough for nail art."),
}

_CARE = "Beauty & Personal Care › "
_SCENTS = Axis("scent", names("unscented, lavender, vanilla, eucalyptus, citrus, cedarwood, honey"), 2, 4)
_BOTTLES = Axis("size", names("2 fl oz, 4 fl oz, 8 fl oz, 12 fl oz, 16 fl oz"), 2, 3, run=True)
_DROPPERS = Axis("size", names("0.5 fl oz, 1 fl oz, 1.7 fl oz, 2 fl oz"), 2, 3, run=True)
_PACKS = Axis("size", names("pack of 1, pack of 2, pack of 3, pack of 4, pack of 6"), 2, 3)
_TINTS = Axis("color", names("black, rose, champagne, purple, turquoise, gold, white"), 2, 4)

_KINDS = (
    Kind(
        _CARE + "Hair Care › Shampoo & Conditioner › Shampoos",
        "shampoo",
        names("Shampoo, Daily Shampoo, Scalp Shampoo, Shampoo Bar"),
        names("cruelty free, paraben free, sulfate free, dermatologist tested, travel size, tea tree, coconut oil, argan oil, aloe vera, damaged hair, curly hair, hair growth"),
        names("Oat Extract, Nettle Extract, Rice Water, Quinoa Protein"),
        ("A portion the size of a hazelnut is enough.", "The bottle is made from old bottles."),
        (_SCENTS, _BOTTLES),
        (7, 34),
    ),
    Kind(
        _CARE + "Skin Care › Body › Moisturizers › Lotions",
        "body lotion",
        names("Body Lotion, Hand and Body Lotion, Body Milk, Night Lotion"),
        names("cruelty free, paraben free, alcohol free, dermatologist tested, travel size, coconut oil, shea butter, aloe vera, hyaluronic acid, dry skin, sensitive skin"),
        names("Oat Extract, Calendula, Almond Milk, Glycerin"),
        ("It sinks in within a minute.", "The pump can be locked."),
        (_SCENTS, _BOTTLES),
        (6, 32),
    ),
    Kind(
        _CARE + "Skin Care › Lip Care › Lip Balms & Moisturizers",
        "lip balm",
        names("Lip Balm, Lip Butter, Tinted Lip Balm, Overnight Lip Mask"),
        names("cruelty free, paraben free, fragrance free, long lasting, travel size, easy apply, coconut oil, shea butter, aloe vera, vitamin c, dry skin, sensitive skin"),
        names("Beeswax, Candelilla Wax, Cocoa Butter, Jojoba"),
        ("One tube lasts about two months.", "The tube is made of paper."),
        (Axis("flavor", names("vanilla, cherry, coconut, honey, cranberry, mango"), 2, 4), _PACKS),
        (4, 18),
    ),
    Kind(
        _CARE + "Skin Care › Face › Treatments & Masks › Serums",
        "face serum",
        names("Face Serum, Brightening Serum, Eye Serum, Night Serum"),
        names("cruelty free, paraben free, fragrance free, alcohol free, dermatologist tested, easy apply, hyaluronic acid, vitamin c, argan oil, aloe vera, fine lines, dark circles, sensitive skin"),
        names("Niacinamide, Peptides, Squalane, Ceramides"),
        ("Use before the cream, morning or evening.", "The glass keeps daylight out."),
        (_DROPPERS,),
        (11, 52),
    ),
    Kind(
        _CARE + "Tools & Accessories › Makeup Brushes & Tools › Brush Sets",
        "makeup brushes",
        names("Makeup Brush Set, Foundation Brush Set, Eyeshadow Brush Set, Powder Brush Set"),
        names("cruelty free, high quality, easy apply, travel size, long lasting, soft bristles, bamboo handle, storage case, sensitive skin, dark circles"),
        names("Vegan Fibre, Taklon, Aluminium Ferrule, Birch"),
        ("Wash with mild soap once a week.", "The numbers are printed on the stems."),
        (_TINTS, Axis("number of items", names("5 piece, 8 piece, 12 piece, 16 piece"), 2, 3, run=True)),
        (8, 46),
    ),
    Kind(
        _CARE + "Oral Care › Toothbrushes & Accessories › Manual Toothbrushes",
        "toothbrushes",
        names("Toothbrush, Toothbrush Set, Travel Toothbrush, Family Toothbrushes"),
        names("bpa free, high quality, travel size, long lasting, easy apply, soft bristles, bamboo handle, storage case, fresh breath, sensitive teeth"),
        names("Charcoal Fibre, Castor Oil Nylon, Plant Starch, Silicone"),
        ("Change it every three months.", "The head is a quarter smaller than most."),
        (_TINTS, _PACKS),
        (5, 24),
    ),
    Kind(
        _CARE + "Foot, Hand & Nail Care › Nail Polish & Nail Decoration › Nail Polish",
        "nail polish",
        names("Nail Polish, Gel Nail Polish, Nail Lacquer, Nail Polish Set"),
        names("cruelty free, paraben free, fragrance free, long lasting, easy apply, quick dry, high quality, travel size, argan oil, vitamin c, nail art"),
        names("Glossy Coat, Matte Coat, Glitter Coat, Cream Coat"),
        ("Two thin coats cover fully.", "The brush is wide and flat."),
        (Axis("color", names("cherry red, nude, plum, coral, teal, midnight blue, lilac, gold"), 3, 5), _PACKS),
        (5, 22),
    ),
    Kind(
        _CARE + "Tools & Accessories › Bags & Cases › Refillable Containers",
        "travel bottles",
        names("Travel Bottles, Spray Bottles, Pump Bottles, Squeeze Bottles"),
        names("bpa free, leak proof, travel size, high quality, long lasting, easy apply, wide mouth, storage case, sensitive skin"),
        names("Silicone, Amber Glass, Aluminium, Recycled Plastic"),
        ("Labels and a funnel are in the box.", "They stand on the cap as well."),
        (_TINTS, Axis("size", names("1 ounce, 2 ounce, 3 ounce, 4 ounce"), 2, 3, run=True)),
        (6, 26),
    ),
)  # fmt: skip

BEAUTY = Department("beauty", _FEATURES, _KINDS)
