"""The shape of the tables: a kind of product, what can be said about it, and what can be chosen when it is bought.

The name of a feature is an attribute of the score and a phrase that is searched, so its sentence holds it word for word, and no
sentence, fact or material may hold the name of another feature of the same kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Slot = Literal["is", "with", "for"]
"""Where an instruction puts a feature: Find me IS things with WITH for FOR."""


@dataclass(frozen=True, slots=True)
class Feature:
    slot: Slot
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
class Kind:
    """Example: desk lamps, their place in the tree of categories, and what they are made of, cost and offer."""

    path: str
    query: str
    nouns: tuple[str, ...]
    features: tuple[str, ...]
    materials: tuple[str, ...]
    facts: tuple[str, ...]
    axes: tuple[Axis, ...]
    price: tuple[int, int]
    """About the least and the most such a thing costs, in dollars."""


@dataclass(frozen=True, slots=True)
class Department:
    category: str
    features: Mapping[str, Feature]
    kinds: tuple[Kind, ...]
    rivals: tuple[tuple[str, ...], ...] = ()
    """Features of which a product has at most one, such as a long and a short sleeve."""


def names(text: str) -> tuple[str, ...]:
    """The items of a list written with commas."""
    return tuple(" ".join(item.split()) for item in text.split(","))
