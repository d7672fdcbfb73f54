"""The original's data files as products: the raw product list, its attributes and instructions, and what people wrote.

`data` names the folder that holds the files, found by their names, or the file of products itself, whose folder then holds the rest:

- products: items_shuffle.json, items_shuffle_1000.json (as scraped), or products_1000.jsonl (the option table already built);
- attributes and synthetic instructions: items_ins_v2.json or items_ins_v2_1000.json, by product code;
- what people wrote: items_human_ins.json, by product code; needed for human goals only.

Cleaning is the original's: a product whose code is "nan" or longer than ten characters is left out, as is the second of two with one
code; option names are lower-cased, values stripped, `/` spaced out as ` | ` and lower-cased; a product without a price costs 100.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from tether.core.errors import BadInput
from tether.envs.dataset import BadRows, Pool, Row, RowError, load_instances
from tether.envs.webshop.generator import generated_products
from tether.envs.webshop.products import Catalogue, Goal, HumanInstruction, Product, Wanted, human_goals, synthetic_goals

GoalKind = Literal["synthetic", "human"]

_DEFAULT = "the generated catalogue"
_PRODUCTS = ("items_shuffle.json", "items_shuffle_1000.json", "products_1000.jsonl")
_INSTRUCTIONS = ("items_ins_v2.json", "items_ins_v2_1000.json")
_HUMAN = ("items_human_ins.json",)
_LONGEST_ASIN = 10
_UNKNOWN_ATTRIBUTES = ("DUMMY_ATTR",)
"""What the original gives a product that the attribute file does not list."""

_TEXT_FIELDS = ("asin", "name", "category", "query", "product_category")

_Instruction = tuple[tuple[str, ...], str | None, tuple[str, ...]]
"""Attributes of a product, its instruction, and the attributes that asks for."""

T = TypeVar("T")


@lru_cache(maxsize=4)
def load_catalogue(data: str | None, bad_rows: BadRows) -> Catalogue:
    """The products of a folder, or the generated ones; read once per process."""
    if data is None:
        return Catalogue(generated_products())
    files = _Files(data, bad_rows)
    instructions = files.read_table(_INSTRUCTIONS, _instruction)
    products: dict[str, Product] = {}
    for product in files.read(files.products, _product):
        if product is not None and product.asin not in products:
            attributes, text, wanted = instructions.get(product.asin, (_UNKNOWN_ATTRIBUTES, None, ()))
            products[product.asin] = replace(product, attributes=attributes, instruction=text, instruction_attributes=wanted)
    if not products:
        raise BadInput(f"webshop: '{files.products}' holds no product with a code of at most {_LONGEST_ASIN} characters; give another file")
    return Catalogue(tuple(products.values()))


@lru_cache(maxsize=8)
def load_goals(data: str | None, kind: GoalKind, bad_rows: BadRows) -> Pool[Goal]:
    """The goals over the products of a folder, or over the generated ones."""
    products = load_catalogue(data, bad_rows).products
    if kind == "synthetic":
        goals = synthetic_goals(products)
    elif data is None:
        raise BadInput(f"webshop: goals=human needs {_HUMAN[0]}; give data the folder that holds it, or use goals=synthetic")
    else:
        written = _Files(data, bad_rows).read_table(_HUMAN, _human_instructions)
        goals = human_goals(products, written)
    source = data or _DEFAULT
    if not goals:
        raise BadInput(f"webshop: no product of '{source}' has a {kind} instruction; use other data, or leave data out for {_DEFAULT}")
    return Pool(goals, env="webshop", source=source)


class _Files:
    """The files of a data folder, found by name."""

    def __init__(self, data: str, bad_rows: BadRows) -> None:
        self._data, self._bad_rows = data, bad_rows
        path = Path(data).expanduser()
        if not path.exists():
            raise BadInput(
                f"webshop: data='{data}' does not exist; give data the folder of {_PRODUCTS[1]} and {_INSTRUCTIONS[1]}, "
                f"or leave it out for {_DEFAULT}"
            )
        self._folder = path if path.is_dir() else path.parent
        self.products = self._found(_PRODUCTS) if path.is_dir() else path

    def read(self, path: Path, parse: Callable[[Row], T]) -> list[T]:
        return load_instances(str(path), parse, env="webshop", default=_DEFAULT, bad_rows=self._bad_rows)

    def read_table(self, names: tuple[str, ...], parse: Callable[[Any], T]) -> dict[str, T]:
        """A file of entries by product code."""

        def entry(row: Row) -> tuple[str, T]:
            if not isinstance(row.value, tuple):
                raise RowError("is not an object of entries by product code")
            return row.value[0], parse(row.value[1])

        # Where both sizes of a file are there, the one that goes with the products.
        by_fit = sorted(names, key=lambda name: ("1000" in name) != ("1000" in self.products.name))
        return dict(self.read(self._found(by_fit), entry))

    def _found(self, names: Sequence[str]) -> Path:
        """The first of these files that is there, plain or gzipped."""
        for name in names:
            for path in (self._folder / name, self._folder / f"{name}.gz"):
                if path.is_file():
                    return path
        raise BadInput(
            f"webshop: data='{self._data}' has no {' or '.join(names)} in '{self._folder}'; put it there, give another folder, "
            f"or leave data out for {_DEFAULT}"
        )


def _product(row: Row) -> Product | None:
    """A product, None for one that the original leaves out."""
    asin, title, category, query, path = map(_text, row.fields(*_TEXT_FIELDS), _TEXT_FIELDS)
    if asin == "nan" or len(asin) > _LONGEST_ASIN:
        return None
    description, bullets = row.fields("full_description", "small_description")
    return Product(
        asin=asin,
        title=title,
        category=category,
        query=query.lower().strip(),
        product_category=path,
        description=_text(description or "", "full_description"),
        bullets=_texts(bullets if isinstance(bullets, list) else [bullets or ""], "small_description"),
        prices=_prices(row.value.get("pricing")),
        options=_option_table(row.value),
    )


def _instruction(entry: Any) -> _Instruction:
    if not isinstance(entry, dict):
        raise RowError(f"is a {type(entry).__name__}; expected an object with attributes")
    attributes = _texts(entry["attributes"], "attributes") if "attributes" in entry else _UNKNOWN_ATTRIBUTES
    if entry.get("instruction") is None:
        return attributes, None, ()
    wanted = _texts(entry.get("instruction_attributes"), "instruction_attributes")
    if not wanted:
        raise RowError("has an instruction but no instruction_attributes")
    return attributes, _text(entry["instruction"], "instruction"), wanted


def _human_instructions(entry: Any) -> tuple[HumanInstruction, ...]:
    if not isinstance(entry, list) or not all(isinstance(item, dict) for item in entry):
        raise RowError("is not a list of objects with instruction, instruction_attributes and instruction_options")
    return tuple(
        HumanInstruction(
            _text(item.get("instruction"), "instruction"),
            _texts(item.get("instruction_attributes"), "instruction_attributes"),
            _wanted_options(item.get("instruction_options")),
        )
        for item in entry
    )


def _wanted_options(value: Any) -> Wanted:
    """Option values, or (name, value) pairs where the file gives an object."""
    if isinstance(value, dict):
        return tuple((name, _text(wanted, "instruction_options")) for name, wanted in value.items())
    return _texts(value, "instruction_options")


def _prices(pricing: Any) -> tuple[float, ...]:
    """One price or the two ends of a range, from "$5.99", "$5.99 - $9.99" or the list made of it."""
    if not pricing:
        return (100.0,)
    found = [_number(part) for part in (pricing if isinstance(pricing, list) else _text(pricing, "pricing").split("$")[1:])]
    if not found:
        raise RowError(f"has pricing {pricing!r}, which names no price in dollars")
    return tuple(found[:2])


def _number(part: Any) -> float:
    try:
        price = float(re.sub(r"[^\d.]", "", part)) if isinstance(part, str) else float(part)
    except (TypeError, ValueError):
        price = math.nan
    if not math.isfinite(price):
        raise RowError(f"has the price {part!r}, which is not a number")
    return price


def _option_table(row: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Values by option name; from the raw customization_options, or from a table already built."""
    raw = row.get("customization_options")
    if "customization_options" not in row and "options" in row:
        raw = {name: [{"value": value} for value in values] for name, values in _object(row["options"], "options").items()}
    table: dict[str, tuple[str, ...]] = {}
    for name, contents in _object(raw or {}, "customization_options").items():
        if contents is None:
            continue
        if not isinstance(contents, list) or not all(isinstance(content, dict) for content in contents):
            raise RowError(f"has the option {name!r}, whose contents are not a list of objects with a value")
        table[name.lower()] = tuple(
            _text(content.get("value"), f"option {name}").strip().replace("/", " | ").lower() for content in contents
        )
    return table


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowError(f"has a {type(value).__name__} as {name}; expected an object")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"has a {type(value).__name__} as {name}; expected text")
    return value


def _texts(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise RowError(f"has {name} that is not a list of texts")
    return tuple(value)
