"""WebShop as a turn-based task: search the shop, open a product, choose its options, buy it; the purchase is scored by the original's rule.

One answer is one action, `search[keywords]` or `click[something on the page]`, read as the original reads it. An action that is
not possible on a page changes nothing, uses the turn, and the observation says so. Buying ends the episode, whatever its score; success is a full score.
"""

import random
from typing import Literal

from pydantic import Field

from tether.envs.base import Outcome, TextEnv, TurnOptions
from tether.envs.dataset import BadRows, Pool
from tether.envs.webshop import prompt
from tether.envs.webshop.dataset import GoalKind, load_catalogue, load_goals
from tether.envs.webshop.products import Catalogue, Generator, Goal, Product, synthetic_goals
from tether.envs.webshop.reward import NounTest, Reward, binary, graded, noun_test, score_purchase
from tether.envs.wording import Example

NOTHING_DONE = "That action is not available on this page; nothing has changed."

_PLACES: dict[str, prompt.PageName] = {
    "description": "description",
    "features": "features",
    "reviews": "reviews",
    "attributes": "attributes",
}
LONGEST_ACTION = 32_000
"""Characters of an action; keywords and texts of a page have far fewer."""


def read_action(answer: str) -> tuple[str, str]:
    """Name and argument of an action; both empty where the answer is none.

    As the original's regular expression `(.+)\\[(.+)\\]` reads it, in linear time: on the first line, from the last bracket that opens.

    >>> read_action(" search[blue [dark] shirt] please"), read_action("click[]"), read_action("buy now")
    (('search[blue ', 'dark] shirt'), ('', ''), ('', ''))
    """
    line = answer.strip().partition("\n")[0]
    if len(line) > LONGEST_ACTION:
        return "", ""
    end = line.rfind("]")
    start = line.rfind("[", 1, max(end - 1, 0))
    return (line[:start], line[start + 1 : end]) if start > 0 else ("", "")


class WebShopOptions(TurnOptions):
    """Options of webshop."""

    max_turns: int = Field(default=9, ge=1)
    data: str | None = None
    """Folder of the original's data files, or its file of products; the generated catalogue if left out."""
    goals: GoalKind = "synthetic"
    """Instructions made by rule, or written by people (needs items_human_ins.json in `data`)."""
    nouns: Literal["light", "spacy"] = "light"
    """How the nouns of two titles are found: by rules, or by the model of spaCy that the original uses."""
    reward: Literal["graded", "binary"] = "graded"
    """The original's score, or 1 for a full score and 0 otherwise."""
    observation: prompt.ObservationStyle = "text"
    """The original's plain text, or its text with buttons marked."""
    show_attributes: bool = False
    """Whether products have an Attributes page, which names their kind and attributes outright."""
    bad_rows: BadRows = "error"


class WebShop(TextEnv[WebShopOptions]):
    """Buy what the instruction asks for."""

    name = "webshop"
    Options = WebShopOptions
    metrics = ("score",)
    task, example, refused, paper = prompt.TASK, prompt.EXAMPLE, prompt.REFUSED, prompt.PAPER

    def __init__(
        self,
        options: WebShopOptions | None = None,
        *,
        catalogue: Catalogue | None = None,
        generator: Generator | None = None,
        reward: Reward | None = None,
        nouns: NounTest | None = None,
    ) -> None:
        super().__init__(options or WebShopOptions())
        chosen = self.options
        self._catalogue = catalogue or load_catalogue(chosen.data, chosen.bad_rows)
        self._make: Generator = generator or (
            load_goals(chosen.data, chosen.goals, chosen.bad_rows)
            if catalogue is None
            else Pool(synthetic_goals(catalogue.products), env=self.name, source="the catalogue given")
        )
        self._pay: Reward = reward or (graded if chosen.reward == "graded" else binary)
        self._nouns = nouns or noun_test(chosen.nouns)

    # --- the episode ---

    def generate(self, seed: int) -> None:
        self.goal: Goal = self._make(seed, self.options.split)
        self._found: list[Product] = []
        self._open_search()

    def seed_randomness(self, env_seed: int) -> None:
        self._rng = random.Random(env_seed)

    def take(self, answer: str) -> Outcome:
        name, argument = read_action(answer)
        argument = argument.lower()
        if name == "search":
            self._search(argument)
        elif name == "click" and argument in self._clickables and argument != "search":
            if argument == prompt.BUY.lower():
                return self._buy()
            self._click(argument)
        else:
            return Outcome(f"{NOTHING_DONE}\n{self.opening()}", valid=False, info={"page": self._page.place})
        return Outcome(self.opening(), info={"page": self._page.place})

    def opening(self) -> str:
        return prompt.observation(self._page, self.options.observation)

    # --- from page to page ---

    def _show(self, page: prompt.Page) -> None:
        self._page = page
        self._clickables = page.clickables

    def _open_search(self) -> None:
        self._visited: set[str] = set()
        self._chosen: dict[str, str] = {}
        self._show(prompt.search_page(self.goal.text))

    def _search(self, keywords: str) -> None:
        self._found = self._catalogue.find(keywords, self._rng)
        self._open_results(1)

    def _open_results(self, number: int) -> None:
        self._number = number
        self._chosen = {}
        self._show(prompt.results_page(self.goal.text, self._found, number, self._visited))

    def _open_item(self) -> None:
        self._show(prompt.item_page(self.goal.text, self._product, self._chosen, self.options.show_attributes))

    def _click(self, text: str) -> None:
        piece = self._clickables[text]
        if text == prompt.BACK_TO_SEARCH.lower():
            self._open_search()
        elif text == prompt.PREVIOUS.lower():
            place = self._page.place
            if place in ("results", "item"):
                self._open_results(self._number - (place == "results"))
            else:
                self._open_item()
        elif text == prompt.NEXT.lower() and self._page.place == "results":
            self._open_results(self._number + 1)
        elif piece.kind == "link":
            self._product = next(product for product in self._found if product.asin == piece.text)
            self._visited.add(piece.text)
            self._open_item()
        elif text in _PLACES:
            self._show(prompt.sub_page(self.goal.text, self._product, _PLACES[text]))
        else:
            self._chosen[piece.option] = text
            self._open_item()

    def _buy(self) -> Outcome:
        score = score_purchase(self.goal, self._product, self._chosen, self._nouns)
        self._show(prompt.done_page(score))
        parts = score.parts()
        info = {"page": "done", "asin": self._product.asin, "score": parts.pop("total"), **parts, "noun_test": self._nouns.name}
        return Outcome(self._page.text(self.options.observation), self._pay(score), done=True, success=score.full, info=info)

    # --- what others are told ---

    @property
    def reward_range(self) -> tuple[float, float]:
        return (0.0, 1.0) if self._pay in (graded, binary) else super().reward_range

    @property
    def instance(self) -> str:
        return self.goal.fingerprint

    def worked_examples(self, count: int) -> list[Example]:
        return prompt.worked(self.options.observation, self.options.show_attributes)
