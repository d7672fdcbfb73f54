"""Instructions for shoppers: `Goal`, and how goals are made from products.

Synthetic goals, as in the original: each product with an instruction gives one goal for each combination of its option values, and its
text names the values and a price limit. Human goals are what people wrote, with a price limit put behind it. The limit is one of the
first four tens above the price: two are drawn and the larger is kept. The original draws it from global chance at every start; here it
follows from the product, so that a goal is the same goal in every process.
"""

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from tether.core.enums import Split
from tether.core.seeding import derive_seed
from tether.envs.webshop.products import Product

NO_LIMIT = 1_000_000.0
_LIMITS = tuple(10.0 * tens for tens in range(1, 100))

Generator = Callable[[int, Split], "Goal"]


Wanted = tuple[tuple[str, str], ...] | tuple[str, ...]
"""Options of an instruction: (name, value) pairs in a synthetic goal, values alone in one a person wrote."""


@dataclass(frozen=True, slots=True)
class HumanInstruction:
    """An instruction that a person wrote for a product."""

    text: str
    attributes: tuple[str, ...]
    options: Wanted


@dataclass(frozen=True, slots=True)
class Goal:
    """A product to buy, and what it is scored by."""

    product: Product
    text: str
    attributes: tuple[str, ...]
    options: Wanted
    price_limit: float

    @property
    def fingerprint(self) -> str:
        return "\n".join([self.text, self.product.asin, repr(self.options), repr(self.price_limit)])


def synthetic_goals(products: Iterable[Product]) -> list[Goal]:
    """One goal for each combination of option values of each product with an instruction."""
    goals: list[Goal] = []
    for product in products:
        if product.instruction is None:
            continue
        limit, limit_text = _price_limit(product.price, "synthetic", product.asin)
        names = sorted(product.choices)
        for values in itertools.product(*(product.choices[name] for name in names)):
            options = tuple(zip(names, values, strict=True))
            option_text = ", and ".join(f"{name}: {value}" for name, value in options)
            text = f"{product.instruction}{' with ' if options else ''}{option_text}{limit_text}"
            goals.append(Goal(product, text, product.instruction_attributes, options, limit))
    return _shuffled(goals)


def human_goals(products: Iterable[Product], written: Mapping[str, tuple[HumanInstruction, ...]]) -> list[Goal]:
    """One goal for each thing a person wrote, by product code; those without an attribute are left out, as in the original."""
    goals: list[Goal] = []
    for product in products:
        for number, wanted in enumerate(written.get(product.asin, ())):
            if wanted.attributes:
                limit, limit_text = _price_limit(product.price, "human", product.asin, number)
                goals.append(Goal(product, wanted.text.strip(".") + limit_text, wanted.attributes, wanted.options, limit))
    return _shuffled(goals)


def _price_limit(price: float, *stream: int | str) -> tuple[float, str]:
    """The most the product may cost, and the words for it."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return NO_LIMIT, ""
    limit = max(random.Random(derive_seed("webshop", "limit", *stream)).sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def _shuffled(goals: list[Goal]) -> list[Goal]:
    """The goals in the order of a hash, so that neighbouring seeds are not the same product in another size."""
    return sorted(goals, key=lambda goal: hashlib.sha256(goal.fingerprint.encode("utf-8", "surrogatepass")).digest())
