"""The names of units, their usual spellings, and the words after a number that are none. Tables, and the one function that reads them."""

import re

CURRENCIES = {"$": "dollar", "£": "pound sterling", "€": "euro", "¥": "yen", "₹": "rupee"}

ATTACHED = frozenset(
    {
        "mm", "cm", "km", "kg", "mg", "lb", "lbs", "oz", "ft", "yd", "mi", "mph", "kmh", "km/h", "m/s", "hr", "hrs", "min", "sec", "ml",
        "gb", "mb", "kb", "am", "pm", "a.m", "p.m",
    }
)  # fmt: skip
"""What may follow a number without a space, 5cm, and still be a unit; other letters there are variables."""

MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}

NO_UNIT = frozenset(
    {
        "half", "halves", "third", "thirds", "fourth", "fourths", "fifth", "fifths", "sixth", "sixths", "seventh", "sevenths", "eighth",
        "eighths", "ninth", "ninths", "tenth", "tenths", "hundredth", "hundredths", "thousandth", "thousandths", "squared", "cubed",
        "plus", "minus", "over", "divided", "factorial", "point", "and", "or", "not", "nor", "to", "if", "when", "mod", "base",
        "root", "pi", "sqrt", "except", "but", "unless", "versus", "maybe", "than",
    }
)  # fmt: skip
"""A number followed by one of these is not that number with a unit."""

_PERCENT = frozenset({"percent", "percents", "per cent", "percentage", "%"})
_SPELLINGS = {
    "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm", "kilometer": "km", "kilometre": "km", "meter": "m",
    "metre": "m", "inch": "in", "inche": "in", "foot": "ft", "feet": "ft", "yard": "yd", "mile": "mi", "kilogram": "kg", "gram": "g",
    "gm": "g", "milligram": "mg", "pound": "lb", "ounce": "oz", "liter": "l", "litre": "l", "milliliter": "ml", "millilitre": "ml",
    "hour": "h", "hr": "h", "minute": "min", "second": "sec", "degree": "°", "deg": "°", "usd": "dollar", "people": "person",
    "children": "child", "miles per hour": "mph", "miles/hour": "mph", "kilometers per hour": "km/h", "kmh": "km/h", "penny": "cent",
    "pennie": "cent",
}  # fmt: skip
_REMARK = re.compile(r" (?:of|in|left|total|altogether|each)\b.*")


def unit_name(names: list[str], power: str | None) -> str:
    """The usual name of a unit spelled in these words, raised to a power.

    >>> unit_name(["square", "centimeters"], None), unit_name(["apples", "in", "total"], None)
    ('cm^2', 'apple')
    """
    phrase = _REMARK.sub("", " ".join(name.replace(".", "").strip("'") for name in names))
    if phrase in _PERCENT:
        return "%"
    for word, exponent in (("square ", "2"), ("sq ", "2"), ("cubic ", "3")):
        if phrase.startswith(word):
            phrase, power = phrase.removeprefix(word), exponent
    spelled = _SPELLINGS.get(phrase) or _SPELLINGS.get(phrase.removesuffix("s")) or phrase
    if spelled == phrase and len(phrase) > 3 and not phrase.endswith("ss"):
        spelled = phrase.removesuffix("s")
    return f"{spelled}^{power}" if power else spelled
