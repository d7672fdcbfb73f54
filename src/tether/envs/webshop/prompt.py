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
_RESULTS = (
    f"Instruction: [SEP] {_LAMP} [SEP] Back to Search [SEP] Page 1 (Total results: 2) [SEP] Next > [SEP] B01AB2C3D4 [SEP] Norvale Desk Lamp, "
    "Dimmable, USB Port [SEP] $31.5 [SEP] B09ZY8X7W6 [SEP] Norvale Floor Lamp, Dimmable [SEP] $55.0\n"
    "Available actions:\nclick[back to search]\nclick[next >]\nclick[b01ab2c3d4]\nclick[b09zy8x7w6]"
)
_ITEM = (
    f"Instruction: [SEP] {_LAMP} [SEP] Back to Search [SEP] < Prev [SEP] color [SEP] white [SEP] black [SEP] Norvale Desk Lamp, Dimmable, USB Port "
    "[SEP] Price: $31.5 [SEP] Rating: N.A. [SEP] Description [SEP] Features [SEP] Reviews [SEP] Buy Now\n"
    "Available actions:\nclick[back to search]\nclick[< prev]\nclick[description]\nclick[features]\nclick[reviews]\nclick[buy now]\n"
    "click[white]\nclick[black]"
)

EXAMPLE = Example(
    f"WebShop [SEP] Instruction: [SEP] {_LAMP} [SEP] Search\nAvailable actions:\nsearch[keywords]",
    "I need a dimmable desk lamp with a USB port. I search for the product and leave out color and price.",
    "search[desk lamp dimmable usb port]",
)
WORKED = (
    Example(_RESULTS, "B01AB2C3D4 is a dimmable desk lamp with a USB port for 31.5 dollars, below 40. I open it.", "click[b01ab2c3d4]"),
    Example(_ITEM, "The lamp fits. The instruction asks for color white, so I choose it before I buy.", "click[white]"),
    Example(
        f"{_ITEM}\n(white was clicked in the turn before)",
        "The color white is chosen, and nothing else is asked for. I buy it.",
        "click[buy now]",
    ),
)

_PAPER = (
    "You are browsing an online shop. Based on the instruction, buy a product that is close to the description: search, read the results, pick a "
    "product, choose size and color, and buy. Choose only from the available actions, which are listed later. "
    "Valid answers are search[<keywords>] and click[<clickable>], such as <answer>search[blanket with fleece throw]</answer>."
)
PAPER = in_papers_frame(_PAPER)
