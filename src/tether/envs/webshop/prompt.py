"""What an agent is told about the shop: the task, examples of replies, and the paper's frame."""

from tether.envs.webshop import pages
from tether.envs.webshop.products import Product
from tether.envs.wording import Example, in_papers_frame

TASK = (
    "You are in a web shop. Buy the product that the instruction asks for: the right kind of product, with the attributes, the options "
    "and the price it names. You are paid for the share of this that you meet.\n"
    "Give one action per turn. search[keywords] searches the shop, from any page. click[...] clicks a button, a product code or an option "
    "value of the page you see; the available ones are listed under it. Choose the options before click[buy now], which ends the episode."
)
REFUSED = (
    "On a later page copy one of the available actions letter by letter, such as <answer> click[b01ab2c3d4] </answer>, then the option "
    "values, one per turn, then <answer> click[buy now] </answer>. Only the actions listed under the page that you see now exist; those of "
    "earlier pages do not.\n"
    "Between the answer tags write exactly one action and nothing else. Stop after </answer>."
)

_LAMP = "Find me desk lamps with dimmable, usb port with color: white, and price lower than 40.00 dollars"
_LAMPS = tuple(
    Product(asin, title, "garden", "desk lamps", "Home › Lighting › Desk Lamps", prices=(price,), options={"color": colors})
    for asin, title, price, colors in (
        ("B07KL5M6N7", "Arden Desk Lamp, Dimmable, USB Port", 35.0, ("black", "grey")),
        ("B01AB2C3D4", "Norvale Desk Lamp, Dimmable, USB Port", 31.5, ("white", "black")),
        ("B09ZY8X7W6", "Norvale Floor Lamp, Dimmable", 55.0, ("white", "black")),
    )
)

EXAMPLE = Example(
    pages.observation(pages.search_page(_LAMP), "text"),
    "I need a dimmable desk lamp with a USB port. I search for the product and leave out color and price.",
    "search[desk lamp dimmable usb port]",
)


def worked(style: pages.ObservationStyle, with_attributes: bool) -> list[Example]:
    """One game, turn by turn: a product that does not fit is left, one that fits is bought."""
    black, white, _ = _LAMPS

    def results(visited: set[str]) -> pages.Page:
        return pages.results_page(_LAMP, _LAMPS, 1, visited)

    def item(product: Product, chosen: dict[str, str]) -> pages.Page:
        return pages.item_page(_LAMP, product, chosen, with_attributes)

    game = (
        (pages.search_page(_LAMP), EXAMPLE.reasoning, EXAMPLE.answer),
        (results(set()), "B07KL5M6N7 is a dimmable desk lamp with a USB port for 35 dollars, below 40. I open it.", "click[b07kl5m6n7]"),
        (item(black, {}), "Its colors are black and grey, and I need white. I go back.", "click[< prev]"),
        (results({black.asin}), "B01AB2C3D4 fits too, for 31.5 dollars. I open it.", "click[b01ab2c3d4]"),
        (item(white, {}), "It comes in white. I choose the color before I buy.", "click[white]"),
        (item(white, {"color": "white"}), "The color white is chosen, and nothing else is asked for. I buy it.", "click[buy now]"),
    )
    return [
        Example(pages.observation(page, style), reasoning, answer, turn=number) for number, (page, reasoning, answer) in enumerate(game, 1)
    ]


_PAPER = (
    "You are browsing an online shop. Based on the instruction, buy a product that is close to the description: search, read the results, pick a "
    "product, choose size and color, and buy. Choose only from the available actions, which are listed later. "
    "Valid answers are search[<keywords>] and click[<clickable>], such as <answer>search[blanket with fleece throw]</answer>."
)
PAPER = in_papers_frame(_PAPER)
