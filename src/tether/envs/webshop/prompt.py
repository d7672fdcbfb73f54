"""What an agent is told and shown of the shop: its pages, the task, examples of replies, and the paper's frame.

A page is a list of pieces, in the original's order: the strings a browser would show, and the things that can be clicked. As text, its visible
strings are joined by ` [SEP] `; as rich text, buttons are marked and each string has a line of its own. Strings are treated as the original's
HTML parser treats them: an empty one is not there, one of white space alone counts only if it has no line break.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from tether.envs.webshop.products import Product
from tether.envs.webshop.reward import Score
from tether.envs.wording import Example, in_papers_frame

BACK_TO_SEARCH, PREVIOUS, NEXT, BUY = "Back to Search", "< Prev", "Next >", "Buy Now"
SUB_PAGES = ("Description", "Features", "Reviews", "Attributes")
PRODUCTS_A_PAGE = 10
_HTML_SPACE = " \n\t\f\r"

PageName = Literal["search", "results", "item", "description", "features", "reviews", "attributes", "done"]
ObservationStyle = Literal["text", "text_rich"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One string of a page."""

    text: str
    kind: Literal["text", "button", "link", "option"] = "text"
    option: str = ""
    """The name of the option that a value belongs to."""
    pressed: bool = False
    """A product already visited, an option value chosen."""

    @property
    def visible(self) -> bool:
        return bool(self.text.strip(_HTML_SPACE)) or (self.text != "" and "\n" not in self.text)


@dataclass(frozen=True, slots=True)
class Page:
    """What is shown at one place of the shop."""

    place: PageName
    pieces: tuple[Piece, ...]

    @property
    def clickables(self) -> dict[str, Piece]:
        """What can be clicked, by its text in lower case: buttons, then products, then option values. Of two with one text the last counts."""
        found = {piece.text.lower(): piece for kind in ("button", "link") for piece in self.pieces if piece.kind == kind}
        return found | {piece.text: piece for piece in self.pieces if piece.kind == "option"}

    def text(self, style: ObservationStyle) -> str:
        shown = [piece for piece in self.pieces if piece.visible]
        if style == "text":
            return " [SEP] ".join(piece.text.strip() for piece in shown)
        clicked = [f"You have clicked {piece.text}." for piece in reversed(shown) if piece.kind == "option" and piece.pressed]
        return "\n".join([*clicked, *map(_rich, shown)])


def observation(page: Page, style: ObservationStyle) -> str:
    """A page with the actions that it takes."""
    actions = ["search[keywords]"] if page.place == "search" else [f"click[{text}]" for text in page.clickables]
    return "\n".join([page.text(style), "Available actions:", *actions])


def search_page(instruction: str) -> Page:
    return Page("search", (Piece("WebShop"), Piece("Instruction: "), Piece(instruction), Piece("Search", "button")))


def results_page(instruction: str, found: Sequence[Product], number: int, visited: Set[str]) -> Page:
    """Page `number` (from 1) of a search."""
    previous = (Piece(PREVIOUS, "button"),) if number > 1 else ()
    pieces = [
        *_head(instruction),
        Piece(f"Page {number} (Total results: {len(found)})"),
        *previous,
        Piece(NEXT, "button"),
    ]
    for product in found[(number - 1) * PRODUCTS_A_PAGE : number * PRODUCTS_A_PAGE]:
        pieces += [Piece(product.asin, "link", pressed=product.asin in visited), Piece(product.title), Piece(product.price_tag)]
    return Page("results", tuple(pieces))


def item_page(instruction: str, product: Product, chosen: Mapping[str, str], with_attributes: bool) -> Page:
    pieces = [*_head(instruction), Piece(PREVIOUS, "button")]
    for name, values in product.choices.items():
        pieces.append(Piece(name))
        pieces += [Piece(value, "option", name, value in chosen.values()) for value in values]
    pieces += [Piece(product.title), Piece(f"Price: {product.price_tag}"), Piece("Rating: N.A.")]
    pieces += [Piece(name, "button") for name in (SUB_PAGES if with_attributes else SUB_PAGES[:3])]
    return Page("item", (*pieces, Piece(BUY, "button")))


def sub_page(instruction: str, product: Product, place: PageName) -> Page:
    """Description, features, reviews (there are none in the data) or attributes of a product."""
    texts: dict[str, list[str]] = {
        "description": [product.description],
        "features": [f" {bullet}" for bullet in product.bullets],
        "attributes": [*(f" {attribute}" for attribute in product.attributes), product.category, product.query, product.product_category],
    }
    return Page(place, (*_head(instruction), Piece(PREVIOUS, "button"), *map(Piece, texts.get(place, []))))


def done_page(score: Score) -> Page:
    return Page("done", tuple(map(Piece, ("Thank you for shopping with us!", "Your score (min 0.0, max 1.0)", str(score.total)))))


def _head(instruction: str) -> tuple[Piece, ...]:
    return Piece("Instruction:"), Piece(instruction), Piece(BACK_TO_SEARCH, "button")


def _rich(piece: Piece) -> str:
    if piece.kind == "text":
        return piece.text
    word = "clicked button" if piece.pressed else "button"
    before = {"button": "", "option": "  ", "link": "\n"}[piece.kind]
    return f"{before}[{word}] {piece.text} [{word}_]"


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
    observation(search_page(_LAMP), "text"),
    "I need a dimmable desk lamp with a USB port. I search for the product and leave out color and price.",
    "search[desk lamp dimmable usb port]",
)


def worked(style: ObservationStyle, with_attributes: bool) -> list[Example]:
    """One game, turn by turn: a product that does not fit is left, one that fits is bought."""
    black, white, _ = _LAMPS

    def results(visited: set[str]) -> Page:
        return results_page(_LAMP, _LAMPS, 1, visited)

    def item(product: Product, chosen: dict[str, str]) -> Page:
        return item_page(_LAMP, product, chosen, with_attributes)

    game = (
        (search_page(_LAMP), EXAMPLE.reasoning, EXAMPLE.answer),
        (results(set()), "B07KL5M6N7 is a dimmable desk lamp with a USB port for 35 dollars, below 40. I open it.", "click[b07kl5m6n7]"),
        (item(black, {}), "Its colors are black and grey, and I need white. I go back.", "click[< prev]"),
        (results({black.asin}), "B01AB2C3D4 fits too, for 31.5 dollars. I open it.", "click[b01ab2c3d4]"),
        (item(white, {}), "It comes in white. I choose the color before I buy.", "click[white]"),
        (item(white, {"color": "white"}), "The color white is chosen, and nothing else is asked for. I buy it.", "click[buy now]"),
    )
    return [Example(observation(page, style), reasoning, answer, turn=number) for number, (page, reasoning, answer) in enumerate(game, 1)]


_PAPER = (
    "You are browsing an online shop. Based on the instruction, buy a product that is close to the description: search, read the results, pick a "
    "product, choose size and color, and buy. Choose only from the available actions, which are listed later. "
    "Valid answers are search[<keywords>] and click[<clickable>], such as <answer>search[blanket with fleece throw]</answer>."
)
PAPER = in_papers_frame(_PAPER)
