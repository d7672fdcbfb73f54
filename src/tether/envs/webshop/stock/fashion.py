"""Clothes and shoes."""

from tether.envs.webshop.stock.kinds import Axis, Department, Feature, Kind, names

_FEATURES = {
    "machine wash": Feature("is", "Simple care: machine wash cold and tumble dry low."),
    "hand wash": Feature("is", "Treat it kindly: hand wash in cool water and lay it out to dry."),
    "quick drying": Feature("is", "The quick drying cloth is ready to wear again an hour after the rain."),
    "moisture wicking": Feature("is", "A moisture wicking weave carries sweat to the outside."),
    "light weight": Feature("is", "So light weight that it folds to the size of a fist."),
    "water resistant": Feature("is", "A water resistant coat lets drizzle roll off."),
    "non slip": Feature("is", "The non slip underside holds on wet tiles."),
    "wrinkle free": Feature("is", "Comes out of the suitcase wrinkle free."),
    "long sleeve": Feature("with", "The long sleeve cut reaches the wrist bone."),
    "short sleeve": Feature("with", "The short sleeve cut ends above the elbow."),
    "crew neck": Feature("with", "A ribbed crew neck keeps its shape."),
    "v neck": Feature("with", "The v neck sits two fingers below the collarbone."),
    "relaxed fit": Feature("with", "Cut in a relaxed fit with room at the shoulders."),
    "slim fit": Feature("with", "Cut in a slim fit that follows the body."),
    "high waist": Feature("with", "The high waist sits at the navel and stays there."),
    "elastic waist": Feature("with", "A covered elastic waist moves along with you."),
    "drawstring closure": Feature("with", "The drawstring closure is a flat cord that stays tied."),
    "button closure": Feature("with", "The button closure is sewn on twice."),
    "zipper closure": Feature("with", "The zipper closure runs in a covered track."),
    "side pockets": Feature("with", "Deep side pockets take a phone and keys."),
    "tummy control": Feature("with", "A double front panel gives tummy control without pinching."),
    "rubber sole": Feature("with", "The rubber sole is stitched, not only glued."),
    "arch support": Feature("with", "Moulded arch support carries the middle of the foot."),
    "memory foam": Feature("with", "A memory foam insole takes the shape of the foot."),
    "open toe": Feature("with", "The open toe leaves room for warm days."),
    "ankle strap": Feature("with", "An ankle strap with two holes more than usual keeps the heel in."),
    "lace up": Feature("with", "The lace up front has eight metal eyelets."),
    "daily wear": Feature("for", "Plain enough for daily wear."),
    "gym workout": Feature("for", "Tried over a year of gym workout by our own staff."),
    "office work": Feature("for", "Tidy enough for office work."),
    "teen girls": Feature("for", "Sized down for teen girls as well."),
    "beach vacation": Feature("for", "Packs small for a beach vacation."),
}

_WOMEN = "Clothing, Shoes & Jewelry › Women › Clothing › "
_MEN = "Clothing, Shoes & Jewelry › Men › Clothing › "
_COLOURS = Axis("color", names("black, white, navy blue, olive green, burgundy, heather grey, dusty pink, camel, teal, charcoal"), 2, 4)
_SIZES = Axis("size", names("x-small, small, medium, large, x-large, xx-large"), 2, 4, run=True)
_WOMENS_SHOES = Axis("size", names("5.5, 6, 6.5, 7, 7.5, 8, 8.5, 9, 9.5"), 2, 4, run=True)
_MENS_SHOES = Axis("size", names("8, 8.5, 9, 9.5, 10, 10.5, 11, 12"), 2, 4, run=True)
_LEATHER = Axis("color", names("black, chestnut, cream, tan, cognac brown, slate blue"), 2, 3)

_KINDS = (
    Kind(
        _WOMEN + "Sweaters",
        "women's sweaters",
        names("Women's Knit Sweater, Women's Pullover Sweater, Women's Cable Sweater, Women's Tunic Sweater"),
        names("machine wash, hand wash, long sleeve, short sleeve, crew neck, v neck, relaxed fit, button closure, daily wear, office work, teen girls, wrinkle free"),
        names("Cotton Blend, Merino Wool, Acrylic Yarn, Recycled Wool"),
        ("The hem ends at the hip.", "Knitted in one piece, without a side seam."),
        (_COLOURS, _SIZES),
        (22, 78),
    ),
    Kind(
        _WOMEN + "Dresses",
        "women's dresses",
        names("Women's Midi Dress, Women's Wrap Dress, Women's Shirt Dress, Women's Sun Dress"),
        names("machine wash, hand wash, long sleeve, short sleeve, v neck, high waist, elastic waist, side pockets, zipper closure, light weight, wrinkle free, beach vacation, office work"),
        names("Viscose, Linen, Cotton Poplin, Crepe"),
        ("The skirt has a lining to the knee.", "The back is cut a little longer than the front."),
        (_COLOURS, _SIZES),
        (24, 95),
    ),
    Kind(
        _WOMEN + "Leggings",
        "women's leggings",
        names("Women's Leggings, Women's Yoga Leggings, Women's Capri Leggings, Women's Running Leggings"),
        names("machine wash, quick drying, moisture wicking, high waist, elastic waist, tummy control, side pockets, light weight, gym workout, daily wear, teen girls"),
        names("Nylon Jersey, Cotton Jersey, Recycled Polyester, Bamboo Viscose"),
        ("The seams lie flat.", "Tested for squats in daylight."),
        (_COLOURS, _SIZES),
        (14, 58),
    ),
    Kind(
        _MEN + "Shirts › T-Shirts",
        "men's t-shirts",
        names("Men's T-Shirt, Men's Pocket Tee, Men's Graphic Tee, Men's Training Tee"),
        names("machine wash, quick drying, moisture wicking, light weight, long sleeve, short sleeve, crew neck, v neck, relaxed fit, slim fit, daily wear, gym workout"),
        names("Combed Cotton, Jersey, Cotton Blend, Hemp"),
        ("The collar is taped from shoulder to shoulder.", "Washed before cutting, so it does not shrink."),
        (_COLOURS, _SIZES),
        (9, 38),
    ),
    Kind(
        _MEN + "Shorts",
        "men's shorts",
        names("Men's Shorts, Men's Cargo Shorts, Men's Chino Shorts, Men's Board Shorts"),
        names("machine wash, quick drying, light weight, water resistant, elastic waist, drawstring closure, button closure, zipper closure, side pockets, relaxed fit, slim fit, beach vacation, gym workout"),
        names("Ripstop, Cotton Twill, Recycled Nylon, Linen Blend"),
        ("The inside leg measures nine inches.", "The back pocket has a flap."),
        (_COLOURS, _SIZES),
        (15, 55),
    ),
    Kind(
        _MEN + "Fashion Hoodies & Sweatshirts",
        "men's hoodies",
        names("Men's Hoodie, Men's Zip Hoodie, Men's Pullover Hoodie, Men's Fleece Hoodie"),
        names("machine wash, quick drying, water resistant, long sleeve, drawstring closure, zipper closure, side pockets, relaxed fit, slim fit, light weight, daily wear, gym workout"),
        names("Brushed Fleece, French Terry, Cotton Blend, Sherpa"),
        ("The hood has three panels.", "The cuffs are ribbed twice."),
        (_COLOURS, _SIZES),
        (19, 79),
    ),
    Kind(
        "Clothing, Shoes & Jewelry › Women › Shoes › Sandals",
        "women's sandals",
        names("Women's Sandals, Women's Wedge Sandals, Women's Slide Sandals, Women's Hiking Sandals"),
        names("non slip, water resistant, light weight, rubber sole, arch support, memory foam, open toe, ankle strap, daily wear, beach vacation, office work"),
        names("Leather, Cork, Woven Canvas, Suede"),
        ("The heel measures one and a half inches.", "The footbed can be taken out."),
        (_LEATHER, _WOMENS_SHOES),
        (17, 88),
    ),
    Kind(
        "Clothing, Shoes & Jewelry › Men › Shoes › Walking",
        "men's walking shoes",
        names("Men's Walking Shoes, Men's Slip-On Shoes, Men's Trail Shoes, Men's Canvas Sneakers"),
        names("non slip, water resistant, light weight, quick drying, rubber sole, arch support, memory foam, lace up, daily wear, gym workout, office work"),
        names("Mesh, Canvas, Leather, Recycled Knit"),
        ("The tongue is padded.", "A loop at the heel helps to pull it on."),
        (_LEATHER, _MENS_SHOES),
        (25, 110),
    ),
)  # fmt: skip

_RIVALS = (
    names("machine wash, hand wash"),
    names("long sleeve, short sleeve"),
    names("crew neck, v neck"),
    names("relaxed fit, slim fit"),
    names("button closure, zipper closure, drawstring closure"),
)

FASHION = Department("fashion", _FEATURES, _KINDS, _RIVALS)
