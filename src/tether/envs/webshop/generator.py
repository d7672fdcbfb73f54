"""The catalogue used when no data is given: 2,520 invented products of 42 kinds, the same in every process.

Products of a kind come in families of three near-duplicates: one brand, one model, one noun, mostly the same features. Each has a feature
or two that the others of its family lack, another material, other option values and another price. An instruction asks for features that
tell a product from its family, so buying the first of them is not enough.

The tables are TOML files in `data/`, one per department, and `words.toml`. A department file holds `category`, `rivals`, `features`
(by name: slot and sentence), `axes` (options that several kinds share) and a list of `kinds`; a kind names a shared axis by its key or
defines its own. The name of a feature is an attribute of the score and a phrase that agents search for. So the feature's sentence contains
the name word for word, and no sentence, fact or material contains the name of another feature of the same kind. The tests check this.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from pydantic import TypeAdapter

from tether.core.seeding import derive_seed
from tether.envs.dataset import read_packaged
from tether.envs.webshop.products import Product

_DEPARTMENT_FILES = ("fashion.toml", "beauty.toml", "electronics.toml", "home.toml", "grocery.toml")
"""In this order: the order of the departments is part of the catalogue's fixed random stream."""

FeatureSlot = Literal["is", "with", "for"]
"""Where an instruction puts a feature: Find me IS things with WITH for FOR."""


@dataclass(frozen=True, slots=True)
class Feature:
    """A property that products may have, and the sentence that describes it."""

    slot: FeatureSlot
    sentence: str


@dataclass(frozen=True, slots=True)
class Axis:
    """One option of a kind; a product offers `least` to `most` of the values."""

    name: str
    values: tuple[str, ...]
    least: int
    most: int
    run: bool = False
    """Whether a product offers neighbouring values (sizes) rather than any."""


@dataclass(frozen=True, slots=True)
class ProductKind:
    """A kind of product. Example: desk lamps, their category path, and their materials, prices and options."""

    path: str
    query: str
    nouns: tuple[str, ...]
    features: tuple[str, ...]
    materials: tuple[str, ...]
    facts: tuple[str, ...]
    axes: tuple[Axis, ...]
    price: tuple[int, int]
    """About the least and the most that such a product costs, in dollars."""


@dataclass(frozen=True, slots=True)
class Department:
    """Kinds of products that share a category and a table of features."""

    category: str
    features: Mapping[str, Feature]
    kinds: tuple[ProductKind, ...]
    rivals: tuple[tuple[str, ...], ...] = ()
    """Features of which a product has at most one, such as a long and a short sleeve."""


@dataclass(frozen=True, slots=True)
class ProductWords:
    """Invented brands and model names, and the sentences that any product may carry."""

    brands: tuple[str, ...]
    series: tuple[str, ...]
    intros: tuple[str, ...]
    closings: tuple[str, ...]


@lru_cache(maxsize=1)
def departments() -> tuple[Department, ...]:
    """Every department, read once per process."""
    found = []
    for table in (read_packaged(__package__, name) for name in _DEPARTMENT_FILES):
        shared = table["axes"]  # kinds name the axes that they share
        kinds = [{**kind, "axes": [shared[axis] if isinstance(axis, str) else axis for axis in kind["axes"]]} for kind in table["kinds"]]
        found.append(TypeAdapter(Department).validate_python({**table, "kinds": kinds}))
    return tuple(found)


@lru_cache(maxsize=1)
def words() -> ProductWords:
    """The words of titles and descriptions, read once per process."""
    return TypeAdapter(ProductWords).validate_python(read_packaged(__package__, "words.toml"))


FAMILIES_A_KIND = 20
SISTERS = 3

_SHARED_FEATURES = 3
_OWN_FEATURES = 2
_IN_TITLE, _IN_DESCRIPTION = 2, 3
_LETTERS = "0123456789ABCDEFGHJKLMNPQRSTUVWXYZ"
_WITHOUT_OPTIONS, _WITH_PRICE_RANGE = 0.08, 0.1


@lru_cache(maxsize=1)
def generated_products() -> tuple[Product, ...]:
    """All of them, shuffled: products of a kind do not stand together."""
    products = [
        product
        for department in departments()
        for kind in department.kinds
        for family in range(FAMILIES_A_KIND)
        for product in _family(department, kind, family)
    ]
    random.Random(derive_seed("webshop", "catalogue order")).shuffle(products)
    return tuple(products)


def _family(department: Department, kind: ProductKind, number: int) -> list[Product]:
    rng = random.Random(derive_seed("webshop", "family", kind.query, number))
    brand, series, noun = rng.choice(words().brands), rng.choice(words().series), rng.choice(kind.nouns)
    waiting = rng.sample(kind.features, len(kind.features))
    shared = _taken(department, waiting, [], _SHARED_FEATURES)
    low, high = kind.price
    middle = low * (high / low) ** rng.random()
    products = []
    for sister in range(SISTERS):
        own = _taken(department, waiting, shared, _OWN_FEATURES)
        price = middle * rng.uniform(0.65, 1.5)
        products.append(_product(department, kind, (_asin(kind, number, sister), brand, series, noun), (shared, own), price, rng))
    return products


def _taken(department: Department, waiting: list[str], beside: list[str], number: int) -> list[str]:
    """The first features of `waiting` that go with each other and with those `beside` them; they are taken out of it."""
    taken: list[str] = []
    for name in list(waiting):
        others = {rival for group in department.rivals if name in group for rival in group}
        if len(taken) < number and others.isdisjoint(beside + taken):
            taken.append(name)
            waiting.remove(name)
    return taken


def _product(
    department: Department,
    kind: ProductKind,
    identity: tuple[str, str, str, str],
    features: tuple[list[str], list[str]],
    price: float,
    rng: random.Random,
) -> Product:
    asin, brand, series, noun = identity
    shared, own = features
    material = rng.choice(kind.materials)
    attributes = rng.sample(shared + own, len(shared) + len(own))
    wanted = own + rng.sample(shared, rng.randint(1, 2))
    sentences = [department.features[attribute].sentence for attribute in attributes]
    intro = rng.choice(words().intros).format(brand=brand, series=series, noun=noun)
    return Product(
        asin=asin,
        title=", ".join([f"{brand} {series} {noun}", material, *(attribute.title() for attribute in attributes[:_IN_TITLE])]),
        category=department.category,
        query=kind.query,
        product_category=kind.path,
        # What stands in no title or description is found on the features page only, and not by a search.
        description=" ".join([intro, *sentences[:_IN_DESCRIPTION], rng.choice(words().closings)]),
        bullets=(f"Details: {material.lower()}.", *rng.sample(kind.facts, len(kind.facts)), *sentences[_IN_DESCRIPTION:]),
        prices=_prices(price, rng),
        options=_options(kind.axes, rng),
        attributes=tuple(attributes),
        instruction=_instruction(department, kind, wanted),
        instruction_attributes=tuple(wanted),
    )


def _instruction(department: Department, kind: ProductKind, wanted: list[str]) -> str:
    """As the original's: Find me easy carry, high quality refillable containers with rose gold for dry skin."""
    slots = {slot: ", ".join(name for name in wanted if department.features[name].slot == slot) for slot in ("is", "with", "for")}
    parts = ["Find me", slots["is"], kind.query, slots["with"] and f"with {slots['with']}", slots["for"] and f"for {slots['for']}"]
    return " ".join(part for part in parts if part)


def _prices(price: float, rng: random.Random) -> tuple[float, ...]:
    cents = rng.choice((0.99, 0.49, 0.95, 0.0))
    first = round(int(price) + cents, 2)
    return (first, round(first * rng.uniform(1.1, 1.6), 2)) if rng.random() < _WITH_PRICE_RANGE else (first,)


def _options(axes: tuple[Axis, ...], rng: random.Random) -> dict[str, tuple[str, ...]]:
    return {} if rng.random() < _WITHOUT_OPTIONS else {axis.name: _offered(axis, rng) for axis in axes}


def _offered(axis: Axis, rng: random.Random) -> tuple[str, ...]:
    number = rng.randint(axis.least, axis.most)
    if axis.run:
        start = rng.randrange(len(axis.values) - number + 1)
        return axis.values[start : start + number]
    chosen = set(rng.sample(axis.values, number))
    return tuple(value for value in axis.values if value in chosen)


def _asin(kind: ProductKind, family: int, sister: int) -> str:
    """A code like the original's: B0 and eight letters or digits."""
    number = derive_seed("webshop", "asin", kind.query, family, sister)
    letters = []
    for _ in range(8):
        number, place = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[place])
    return "B0" + "".join(letters)
