"""Several turns over rows of one's own, with a tool: docs/environments/custom.md explains it."""

from tether.envs.tools import ToolEnv

STOCK = {f"{letter}-{number}": (number * 7) % 40 + 3 for letter in "ABC" for number in range(10, 40)}


class OrderDesk(ToolEnv):
    name = "order_desk"
    task = "Answer the customer's question about the prices of the shop."
    tools = ("price",)
    rows = [
        {"question": f"What do {one} and {two} cost together?", "answer": STOCK[one] + STOCK[two]}
        for one, two in zip(STOCK, list(STOCK)[1:], strict=False)
    ]

    def price(self, code: str) -> str:
        """The price of an article, by its code."""
        return f"{code} costs {STOCK[code]} dollars." if code in STOCK else f"There is no article '{code}'."
