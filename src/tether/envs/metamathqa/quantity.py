"""Plain numbers, exactly: integers with or without separators, decimals, fractions, mixed and repeating ones, with or without a unit.

`split_unit` takes the unit off the end of a canonical answer and `number` reads what is left as a Fraction; both return None for
anything that is more than that, which other modules compare. A unit is a name: two that are spelled alike are the same
(5 cm, 5 centimeters), others are not, and nothing is converted. Words that change a number are no units: 5 million is 5000000,
5 thirds is no plain number.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

from tether.envs.dataset import read_packaged

_UNITS = read_packaged("tether.envs.metamathqa", "units.toml")
CURRENCIES: dict[str, str] = _UNITS["currencies"]
"""Names of currencies by sign."""
ATTACHED = frozenset(_UNITS["attached"])
"""What may follow a number without a space, 5cm, and still be a unit; other letters there are variables."""
MULTIPLIERS: dict[str, int] = _UNITS["multipliers"]
NO_UNIT = frozenset(_UNITS["no_unit"])
"""A number followed by one of these is not that number with a unit."""
NO_REMARK = NO_UNIT | frozenset(_UNITS["no_remark"])
"""A number followed by one of these in brackets is qualified or contradicted: 5 (approximately), 5 (six)."""
SHORT = frozenset(_UNITS["short"])
"""Units of two or three letters that are no product of variables."""

_PERCENT = frozenset(_UNITS["percent"])
_SPELLINGS: dict[str, str] = _UNITS["spellings"]
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


_GROUPED = r"\d{1,3}(?:[, ]\d{3})+(?!\d)"
_WHOLE = rf"(?:{_GROUPED}|\d+)"
_DECIMAL = rf"(?:{_WHOLE}(?:\.\d*)?|\.\d+)"
_RATIO = rf"(?:\\frac\{{(-?{_DECIMAL})\}}\{{(-?{_DECIMAL})\}}|({_DECIMAL})/({_DECIMAL}))"
_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)(?:(?P<whole>{_WHOLE}) ?(?P<mixed>\\frac\{{\d+\}}\{{\d+\}}|(?<= )\d+/\d+)"
    rf"|(?P<ratio>{_RATIO})"
    r"|(?P<head>\d*\.\d*)\\overline\{(?P<period>\d+)\}"
    rf"|(?:(?P<factor>{_DECIMAL})\*)?10\^\{{(?P<power>-?\d{{1,2}})\}}"
    rf"|(?P<decimal>{_DECIMAL})(?:[eE](?P<exponent>[+-]?\d{{1,2}}))?)"
)
_RATIO_PARTS = re.compile(_RATIO)

_CURRENCY_FIRST = re.compile(rf"([+-]?)([{''.join(CURRENCIES)}])([+-]?)(?=[\d.\\])")
_BRACKETED_TEXT = re.compile(r"\((\\text\{[^{}\\\d$]+\}(?:\^\{[23]\})?)\)$|\\text\{\(([^(){}\\\d$]+)\)\}$")
"""5(\\text{cm}^{2}), 5\\text{(cm)}."""
_BRACKETED_WORDS = re.compile(r"\(((?:[A-Za-z][A-Za-z.']*)(?:[ /-][A-Za-z][A-Za-z.']*){0,3})(\^\{[23]\})?\)$")
_LAST_TEXT = re.compile(r"\\text\{([^{}\\\d$]+)\}(?:\^\{([23])\})?$")
_LAST_WORDS = re.compile(r"(?<=[\d.}])( ?)((?:[A-Za-z][A-Za-z.']*)(?:[ /-][A-Za-z][A-Za-z.']*){0,3})(?:\^\{([23])\})?$")


@dataclass(frozen=True, slots=True)
class Measure:
    """An answer and its unit. Example: "5 square meters" is Measure("5", "m^2"), "$5 million" is Measure("5", "dollar", 10**6)."""

    body: str
    """What is left of the canonical text."""
    unit: str = ""
    """Its usual name, "%" for per cent, "°" for degrees; empty without one."""
    multiplier: int = 1


def split_unit(text: str) -> Measure:
    """The answer without its unit; a word after anything but a plain number is left where it is."""
    currency = ""
    found = _CURRENCY_FIRST.match(text)
    if found and not (found.group(1) and found.group(3)):
        currency, text = CURRENCIES[found.group(2)], found.group(1) + found.group(3) + text[found.end() :]
    elif text.endswith("$") and number(text[:-1].strip()) is not None:
        currency, text = "dollar", text[:-1].strip()
    if text[-1:] in "%°" and text and number(text[:-1].strip()) is not None:
        return Measure(text[:-1].strip(), text[-1] if not currency else f"{currency} {text[-1]}")
    measure = _worded(text)
    if not currency:
        return measure
    return Measure(measure.body, currency if measure.unit in ("", currency) else f"{currency} {measure.unit}", measure.multiplier)


def _without_brackets(text: str) -> str:
    """The answer with a unit in brackets, 9 (apples), written as a unit without them.

    Letters in brackets behind a number are a product, 5(ab), unless they are longer or a known unit.
    """
    found = _BRACKETED_TEXT.search(text)
    if found and text[: found.start()]:
        return text[: found.start()] + (found.group(1) or rf"\text{{{found.group(2)}}}")
    found = _BRACKETED_WORDS.search(text)
    if found is None or number(text[: found.start()]) is None:
        return text
    names = found.group(1).lower().replace("-", " ").split()
    if not is_unit_word(names[0]) or NO_REMARK & set(names) or MULTIPLIERS.keys() & set(names):
        return text
    return f"{text[: found.start()]} {found.group(1)}{found.group(2) or ''}"


def is_unit_word(name: str) -> bool:
    """Whether a word must be meant as a word: a known unit, or too long for a product of variables."""
    bare = name.rstrip(".")
    return len(bare) > 3 or bare in ATTACHED or bare in SHORT or bare in _SPELLINGS or bare.removesuffix("s") in SHORT


def _worded(text: str) -> Measure:
    """A unit in words, or in \\text{...}, at the end, in brackets or not."""
    text = _without_brackets(text)
    found = _LAST_TEXT.search(text)
    if found:
        body, words, power, bare = text[: found.start()], found.group(1), found.group(2), False
    else:
        found = _LAST_WORDS.search(text)
        if not found or number(text[: found.start()]) is None:
            return Measure(text)
        body, words, power, bare = text[: found.start()], found.group(2), found.group(3), True
        behind_fraction = text[found.start() - 1] == "}"
        if not found.group(1) and words.lower().rstrip(".") not in ATTACHED:
            return Measure(text)
        if behind_fraction and not is_unit_word(words.lower().split()[0]):  # \frac{1}{2} bh is an area
            return Measure(text)
    names = words.lower().replace("-", " ").split()
    if not body or not names or NO_UNIT & set(names) or (bare and all(len(name.strip(".")) < 2 for name in names)):
        return Measure(text)
    multiplier = MULTIPLIERS.get(names[0], 1)
    return Measure(body.strip(), unit_name(names[1:] if multiplier > 1 else names, power), multiplier)


def number(text: str) -> Fraction | None:
    """The exact value of a plain number; None if the text is anything else.

    >>> number("1,234.50"), number("-2 1/2"), number("0.1\\\\overline{6}"), number("2^{3}")
    (Fraction(2469, 2), Fraction(-5, 2), Fraction(1, 6), None)
    """
    found = _NUMBER.fullmatch(text)
    if found is None:
        return None
    parts = found.groupdict()
    value: Fraction | None
    if parts["mixed"]:
        fraction = _ratio(parts["mixed"])
        value = None if fraction is None else _decimal(parts["whole"]) + fraction
    elif parts["ratio"]:
        value = _ratio(parts["ratio"])
    elif parts["period"]:
        head, period = parts["head"], parts["period"]
        shift = 10 ** len(head.partition(".")[2])
        value = _decimal(head) + Fraction(int(period), (10 ** len(period) - 1) * shift)
    elif parts["power"]:
        value = _decimal(parts["factor"] or "1") * Fraction(10) ** int(parts["power"])
    else:
        value = _decimal(parts["decimal"]) * Fraction(10) ** int(parts["exponent"] or 0)
    return -value if value is not None and parts["sign"] == "-" else value


def _ratio(text: str) -> Fraction | None:
    """The value of \\frac{a}{b} or a/b; None for a division by zero."""
    found = _RATIO_PARTS.fullmatch(text)
    assert found is not None  # the pattern of numbers has matched it already
    upper, lower = (part for part in found.groups() if part is not None)
    divisor = _decimal(lower)
    return _decimal(upper) / divisor if divisor else None


def _decimal(text: str) -> Fraction:
    """Digits with separators between thousands, a point, a sign."""
    plain = text.replace(",", "").replace(" ", "")
    sign = -1 if plain.startswith("-") else 1
    whole, _, decimals = plain.lstrip("-").partition(".")
    return sign * Fraction(int(f"{whole}{decimals}" or "0"), 10 ** len(decimals))


def same_measure(gold: Measure, answer: Measure) -> bool | None:
    """Whether two measures are equal; None if either is no plain number.

    A unit only one of them names is taken to be understood. Per cent may be dropped likewise, or written out: 10%, 10 and 0.1.
    """
    left, right = number(gold.body), number(answer.body)
    if left is None or right is None:
        return None
    left, right = left * gold.multiplier, right * answer.multiplier
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.unit != answer.unit and "%" in (gold.unit, answer.unit):
        hundredths, other = (left, right) if gold.unit == "%" else (right, left)
        return other in (hundredths, hundredths / 100)
    return left == right
