"""What an agent is told about the shop: the task, examples of replies, and the paper's frame."""

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
_TOP = f"Instruction: [SEP] {_LAMP} [SEP] Back to Search"
_PAGE_1 = (
    f"{_TOP} [SEP] Page 1 (Total results: 12) [SEP] Next > [SEP] B09ZY8X7W6 [SEP] Norvale Floor Lamp, Dimmable [SEP] $55.0 [SEP] B04QW5E6R7 [SEP] "
    "Arden Clip Light [SEP] $12.0\nAvailable actions:\nclick[back to search]\nclick[next >]\nclick[b09zy8x7w6]\nclick[b04qw5e6r7]"
)
_PAGE_2 = (
    f"{_TOP} [SEP] Page 2 (Total results: 12) [SEP] < Prev [SEP] B07KL5M6N7 [SEP] Arden Desk Lamp, Dimmable, USB Port [SEP] $35.0 [SEP] B01AB2C3D4 "
    "[SEP] Norvale Desk Lamp, Dimmable, USB Port [SEP] $31.5\n"
    "Available actions:\nclick[back to search]\nclick[< prev]\nclick[b07kl5m6n7]\nclick[b01ab2c3d4]"
)


def _item(title: str, price: str, colors: tuple[str, str]) -> str:
    choices = "\n".join(f"click[{color}]" for color in colors)
    return (
        f"{_TOP} [SEP] < Prev [SEP] color [SEP] {' [SEP] '.join(colors)} [SEP] {title} [SEP] Price: {price} [SEP] Rating: N.A. [SEP] Description [SEP] "
        "Features [SEP] Reviews [SEP] Buy Now\nAvailable actions:\nclick[back to search]\nclick[< prev]\nclick[description]\nclick[features]\n"
        f"click[reviews]\nclick[buy now]\n{choices}"
    )


_BLACK = _item("Arden Desk Lamp, Dimmable, USB Port", "$35.0", ("black", "grey"))
_WHITE = _item("Norvale Desk Lamp, Dimmable, USB Port", "$31.5", ("white", "black"))

EXAMPLE = Example(
    f"WebShop [SEP] Instruction: [SEP] {_LAMP} [SEP] Search\nAvailable actions:\nsearch[keywords]",
    "I need a dimmable desk lamp with a USB port. I search for the product and leave out color and price.",
    "search[desk lamp dimmable usb port]",
)
WORKED = (
    EXAMPLE,
    Example(_PAGE_1, "Neither is a desk lamp with a USB port. I look at the next page.", "click[next >]", turn=2),
    Example(
        _PAGE_2, "B07KL5M6N7 is a dimmable desk lamp with a USB port for 35 dollars, below 40. I open it.", "click[b07kl5m6n7]", turn=3
    ),
    Example(_BLACK, "Its colors are black and grey, and I need white. I go back.", "click[< prev]", turn=4),
    Example(_PAGE_2, "B01AB2C3D4 also fits, for 31.5 dollars. I open it.", "click[b01ab2c3d4]", turn=5),
    Example(_WHITE, "It comes in white. I choose the color before I buy.", "click[white]", turn=6),
    Example(_WHITE, "The color white is chosen, and nothing else is asked for. I buy it.", "click[buy now]", turn=7),
)
"""One game, turn by turn."""

_PAPER = (
    "You are browsing an online shop. Based on the instruction, buy a product that is close to the description: search, read the results, pick a "
    "product, choose size and color, and buy. Choose only from the available actions, which are listed later. "
    "Valid answers are search[<keywords>] and click[<clickable>], such as <answer>search[blanket with fleece throw]</answer>."
)
PAPER = in_papers_frame(_PAPER)
