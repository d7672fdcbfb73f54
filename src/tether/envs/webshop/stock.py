"""What the generated shop may sell: departments, kinds of products, features, and the words of titles and descriptions.

The tables are TOML files in `data/`, one per department, and `words.toml`. A department file holds `category`, `rivals`, `features`
(by name: slot and sentence), `axes` (options that several kinds share) and a list of `kinds`; a kind names a shared axis by its key or
defines its own.

The name of a feature is an attribute of the score and a phrase that agents search for. So the feature's sentence contains the name
word for word, and no sentence, fact or material contains the name of another feature of the same kind. The tests check this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from tether.envs.dataset import read_packaged

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
    return tuple(_department(read_packaged(__package__, name)) for name in _DEPARTMENT_FILES)


@lru_cache(maxsize=1)
def words() -> ProductWords:
    """The words of titles and descriptions, read once per process."""
    return ProductWords(**{name: tuple(values) for name, values in read_packaged(__package__, "words.toml").items()})


def _department(table: Mapping[str, Any]) -> Department:
    shared = {key: _axis(axis) for key, axis in table["axes"].items()}
    return Department(
        category=table["category"],
        features={name: Feature(**feature) for name, feature in table["features"].items()},
        kinds=tuple(_kind(kind, shared) for kind in table["kinds"]),
        rivals=tuple(tuple(group) for group in table.get("rivals", ())),
    )


def _kind(table: Mapping[str, Any], shared: Mapping[str, Axis]) -> ProductKind:
    low, high = table["price"]
    lists = {name: tuple(table[name]) for name in ("nouns", "features", "materials", "facts")}
    axes = tuple(shared[axis] if isinstance(axis, str) else _axis(axis) for axis in table["axes"])
    return ProductKind(path=table["path"], query=table["query"], axes=axes, price=(low, high), **lists)


def _axis(table: Mapping[str, Any]) -> Axis:
    return Axis(**{**table, "values": tuple(table["values"])})
